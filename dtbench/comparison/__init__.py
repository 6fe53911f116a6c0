"""Statistics and verdicts: comparison, the gate, ops right or wrong, published references."""
