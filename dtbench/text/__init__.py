"""Output formats: units, tables, Markdown, JUnit and CSV; masked secrets and safe terminal output."""
