"""The parts of the page, in its order: each says which suites it claims, and draws them."""

from dtbench.show.report.parts.bucketer import BUCKETER
from dtbench.show.report.parts.changes import CHANGES
from dtbench.show.report.parts.collectives import COLLECTIVES
from dtbench.show.report.parts.coverage import COVERAGE
from dtbench.show.report.parts.dispatch import DISPATCH
from dtbench.show.report.parts.history import HISTORY
from dtbench.show.report.parts.plan import PLAN
from dtbench.show.report.parts.preflight import PREFLIGHT
from dtbench.show.report.parts.redistribution import REDISTRIBUTION
from dtbench.show.report.parts.settings import SETTINGS
from dtbench.show.report.parts.suites import TENSOR_PARALLEL, other_suites
from dtbench.show.report.parts.systems import SYSTEMS

_OF_SUITES = (DISPATCH, COLLECTIVES, REDISTRIBUTION, BUCKETER, TENSOR_PARALLEL)
_CLAIMED = {suite for part in _OF_SUITES for suite in part.suites}
PARTS = (CHANGES, PREFLIGHT, PLAN, SYSTEMS, *_OF_SUITES, SETTINGS, other_suites(_CLAIMED), HISTORY, COVERAGE)
