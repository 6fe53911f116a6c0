"""Stands first on the PYTHONPATH of a job that is recorded."""
