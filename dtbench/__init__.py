"""dtbench measures what distributed tensors cost and turns the measurements into decisions.

Reading order: `model` (the data), `suite` (what a suite is), `bench` (how a case is timed), `world` (who runs it),
`files` (where results go), then `cost`, `judge` and `show`.
"""

__version__ = "0.1.0"
