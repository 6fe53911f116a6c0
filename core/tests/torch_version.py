"""Marks tests that need torch 2.13; the others also run with torch 2.11."""

import pytest
import torch

BEFORE_213 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def needs_213(reason: str) -> pytest.MarkDecorator:
    """Skips a test with an older torch. reason: the feature that it lacks."""
    return pytest.mark.skipif(BEFORE_213, reason=f"before torch 2.13 {reason}")
