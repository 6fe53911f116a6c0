"""`dtbench export`: writes a topology in the forms that other programs read.

The Python modules import their taker, but not dtbench; they are rendered from the templates in this folder.
"""
