"""The host and its GPUs: provenance of a run, limits of the process, sources of noise."""
