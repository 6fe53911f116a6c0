"""The version. Other modules import it from here, and the build reads it here."""

__version__ = "0.1.0"
