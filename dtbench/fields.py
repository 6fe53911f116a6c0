"""Texts and numbers with bounds, of which file formats and results are made; `dtbench.records.read` checks them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# JSON's integers have no limit; 64-bit readers (pandas, jq) and `float` do.
MAX_INT = 2**63 - 1

# Seconds, ns, bytes, FLOPs and their ratios lie far inside; quotients and squares of what does stay floats.
MIN_POSITIVE, MAX_NUMBER = 1e-30, 1e30
_MIN_TIME, _MAX_TIME = 1e-15, 1e18

Name = Annotated[str, Meta(min_length=1, description="a name")]
Amount = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(ge=MIN_POSITIVE, le=MAX_NUMBER)]
Real = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
# That something is divided by, or drawn on a logarithmic axis.
Time = Annotated[float, Meta(ge=_MIN_TIME, le=_MAX_TIME)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Whole = Annotated[int, Meta(ge=1, le=MAX_INT)]
