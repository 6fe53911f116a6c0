"""Where other tools meet the core: collective utilities by torch's names, local_map, pictures, stopwatches."""
