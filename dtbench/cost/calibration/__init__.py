"""Calibration: fits the cost of collectives and redistributions on a machine to measured times.

Reading order:

- `times`: times per size and launch, and those of each mesh dim,
- `fit`: fits of lines and monotone curves,
- `intervals`: the times that a new launch may measure,
- `assemble`: `calibrate`,
- `validate`: errors of predictions.
"""

from dtbench.cost.calibration.assemble import calibrate
from dtbench.cost.calibration.setups import check_same_setup, setup_of

__all__ = ["calibrate", "check_same_setup", "setup_of"]
