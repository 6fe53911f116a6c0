"""Redistribution of tensors: the cheapest route between two placements, its steps, and its gradient."""
