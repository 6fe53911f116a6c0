"""Joining or starting ranks, their failures, and hosts made of network namespaces."""
