"""`dtbench export`: writes a topology as a Python module that installs its constants in torch.

The modules import torch, but not dtbench; they are rendered from the templates in this folder.
"""
