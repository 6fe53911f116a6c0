"""Runs ops on DTensors: entry, cache key, plans, fallback, `out=` and resizing. entry.py gives the overview."""
