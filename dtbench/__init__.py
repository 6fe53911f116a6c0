"""dtbench measures what distributed tensors cost and turns the measurements into decisions.

Reading order: `model` (the data), `registry` (what a suite is), `sampling` (how a case is timed),
`ranks` (who runs it), `store` (where results go), then `calibration`, `compare` and `reporting`.
"""

__version__ = "0.1.0"
