"""The parts of the page in the order of their sections. Each part names its suites and draws them."""

from dtbench.reporting.html.parts.bucketer import BUCKETER
from dtbench.reporting.html.parts.changes import CHANGES
from dtbench.reporting.html.parts.collectives import COLLECTIVES, SYSTEMS
from dtbench.reporting.html.parts.dispatch import DISPATCH
from dtbench.reporting.html.parts.history import HISTORY
from dtbench.reporting.html.parts.job import JOB, RANKS
from dtbench.reporting.html.parts.redistribution import REDISTRIBUTION
from dtbench.reporting.html.parts.suites import TENSOR_PARALLEL, other_suites

_OF_SUITES = (DISPATCH, COLLECTIVES, REDISTRIBUTION, BUCKETER, TENSOR_PARALLEL)
_CLAIMED = {suite for part in _OF_SUITES for suite in part.suites}
PARTS = (CHANGES, JOB, SYSTEMS, *_OF_SUITES, other_suites(_CLAIMED), RANKS, HISTORY)
