"""Modules for the processes of a recorded job. This folder comes first on their PYTHONPATH."""
