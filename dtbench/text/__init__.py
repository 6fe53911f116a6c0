"""Output formats: units, tables and CSV; masked secrets and safe terminal output."""
