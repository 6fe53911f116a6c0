"""Compares runs with each other and with published bandwidths."""
