"""What machine this is, and what on it disturbs a measurement."""
