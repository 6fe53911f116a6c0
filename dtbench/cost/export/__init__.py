"""`dtbench export`: a topology as a Python module that puts its constants into torch itself.

The modules import torch and nothing of dtbench; they are rendered from the templates beside this file.
"""
