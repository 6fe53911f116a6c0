"""Interfaces to other tools: torch's DTensor, state dicts, local_map, collective utilities, drawings, stopwatches."""
