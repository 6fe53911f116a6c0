"""Calibration: what collectives and redistributions cost on this machine, from measured times.

Reading order: `points` (which times count), `measured` and `layout` (per mesh dim), `ring` (torch's
formulas), `fit` (the lines, times that rise), `intervals` (what a new launch may measure), `curve` (the
price of a size), `assemble` (`calibrate`), `topology` (the file), `validate` (how good it is).
"""

from dtbench.cost.calibration.assemble import calibrate
from dtbench.cost.calibration.curve import Price, price
from dtbench.cost.calibration.setups import check_same_setup
from dtbench.files.topology import read_topology, write_topology

__all__ = ["Price", "calibrate", "check_same_setup", "price", "read_topology", "write_topology"]
