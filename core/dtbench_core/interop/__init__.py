"""Where other tools meet the core: torch's DTensor, state dicts, local_map, collective utilities by torch's names,
pictures, stopwatches."""
