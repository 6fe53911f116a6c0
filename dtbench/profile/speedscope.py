"""Frames of calls for speedscope, which draws flame graphs: https://www.speedscope.app. Pure.

The format: https://www.speedscope.app/file-format-schema.json. A stack is a list of numbers of frames, the root
first; its weight is the time spent in its last frame and in nothing that this called.
"""

from __future__ import annotations

from collections.abc import Mapping


def speedscope(folded: Mapping[str, Mapping[tuple[str, ...], float]], name: str) -> dict[str, object]:
    """The file: a profile per impl of a case, whose values are ns per call.

    folded: the impl's label -> stack -> ns.
    """
    numbers: dict[str, int] = {}  # of frames, which the profiles share
    profiles = []
    for label, stacks in folded.items():
        weights = [round(ns, 3) for ns in stacks.values()]
        profiles.append(
            {
                "type": "sampled",
                "name": f"{label}, per call",
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [[numbers.setdefault(f, len(numbers)) for f in stack] for stack in stacks],
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "dtbench",
        "shared": {"frames": [{"name": frame} for frame in numbers]},
        "profiles": profiles,
    }
