"""One op on distributed tensors: entry, cache key, plan, fallback, out= and resizing."""
