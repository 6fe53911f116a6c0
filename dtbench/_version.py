"""The version, which rooms below `dtbench/__init__.py` name too; the build reads it here."""

__version__ = "0.1.0"
