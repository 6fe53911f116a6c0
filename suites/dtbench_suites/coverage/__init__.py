"""Is every op right on distributed tensors? torch's own op database over placements, core beside torch.

Reading order:

    verdicts what can come of a case
    samples  an op's sample arguments, and the placements they are tried in
    judge    one case: the op on four simulated ranks against the plain op
    pool     the worker processes: hands out ops, watches the time
    suite    `dtbench run coverage`

`dtbench.comparison.op_verdicts` makes the tables.
"""

from dtbench_suites.coverage.suite import coverage

__all__ = ["coverage"]
