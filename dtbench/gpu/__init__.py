"""`dtbench gpu-check`: all that one GPU can show of dtbench and its core, in parts; rehearsed on a CPU with a fake."""
