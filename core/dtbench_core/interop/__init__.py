"""Interfaces to other tools: torch's DTensor, state dicts, local_map, torch's collective utilities, drawings,
stopwatches.
"""
