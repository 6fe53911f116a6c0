"""`dtbench gpu-check`, from a checkout: all that one GPU can show of dtbench and its core; rehearsed on a CPU."""
