"""Texts and numbers with bounds, of which file formats and results are made; `dtbench.records.read` checks them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# JSON's integers have no limit; 64-bit readers (pandas, jq) and `float` do.
MAX_INT = 2**63 - 1

Name = Annotated[str, Meta(min_length=1, description="a name")]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Whole = Annotated[int, Meta(ge=1, le=MAX_INT)]
Rank = Annotated[str, Meta(pattern="^[0-9]{1,18}$", description="a rank")]  # as a key, which JSON has as text
