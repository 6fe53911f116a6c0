"""DTensor, its methods, factories, distribution of tensors and modules, checkpoints."""
