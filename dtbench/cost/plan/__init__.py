"""`dtbench plan`: how to shard a transformer over a machine, by the time and memory of a training step."""
