"""The parts of the report, a file each; `page.py` puts them in order."""
