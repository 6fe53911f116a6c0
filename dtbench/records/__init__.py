"""The files that dtbench reads and writes, one struct each: runs, topologies, gates, histories, profiles."""
