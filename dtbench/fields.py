"""Types of fields in files, with bounds that `dtbench.records.read` checks."""

from typing import Annotated

from msgspec import Meta

# JSON allows larger integers, but pandas, jq and `float` do not represent them.
MAX_INT = 2**63 - 1

# All real quantities lie far within these bounds. Quotients and squares of numbers within them do not overflow.
MIN_POSITIVE, MAX_NUMBER = 1e-30, 1e30
_MIN_TIME, _MAX_TIME = 1e-15, 1e18

Name = Annotated[str, Meta(min_length=1, description="a name")]
Amount = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Positive = Annotated[float, Meta(ge=MIN_POSITIVE, le=MAX_NUMBER)]
Real = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
# A time that serves as a divisor or is drawn on a logarithmic axis.
Time = Annotated[float, Meta(ge=_MIN_TIME, le=_MAX_TIME)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Whole = Annotated[int, Meta(ge=1, le=MAX_INT)]
