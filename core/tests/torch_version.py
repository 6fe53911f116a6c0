"""What tests expect of the torch that is installed: 2.11 on, and not all of it has what 2.13 has."""

import pytest
import torch

BEFORE_213 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def needs_213(reason: str) -> pytest.MarkDecorator:
    """Skips a test with an older torch. reason: what that lacks."""
    return pytest.mark.skipif(BEFORE_213, reason=f"before torch 2.13 {reason}")
