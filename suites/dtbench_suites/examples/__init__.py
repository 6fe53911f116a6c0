"""Small programs to read and to start with torchrun, one for each way of using the core."""
