"""Every file that dtbench reads or writes: runs, topologies, data frames, atomic writing."""
