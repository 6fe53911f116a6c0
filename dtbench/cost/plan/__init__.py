"""`dtbench plan`: predicts step time and memory of training layouts, and searches the fastest."""
