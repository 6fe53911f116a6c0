"""`dtbench run`: options, refinement, the session, the measuring loop, clocks, progress."""
