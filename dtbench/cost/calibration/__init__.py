"""Calibration: what collectives and redistributions cost on this machine, from measured times.

Reading order: `times` (which times count), `dims` (per mesh dim), `fit` (the lines, times
that rise), `intervals` (what a new launch may measure), `assemble` (`calibrate`), `validate` (how good it is).
"""

from dtbench.cost.calibration.assemble import calibrate
from dtbench.cost.calibration.setups import check_same_setup, setup_of

__all__ = ["calibrate", "check_same_setup", "setup_of"]
