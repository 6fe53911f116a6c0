"""The folder of a profile of a suite's cases: its tables, and frames for speedscope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dtbench.engine.progress import print_status
from dtbench.records.atomic import write_folder
from dtbench.records.profile import CallsProfile, RanksProfile
from dtbench.text.units import plural

SPEEDSCOPE = "speedscope.json"


def speedscope(folded: Mapping[str, Mapping[tuple[str, ...], float]], name: str) -> dict[str, object]:
    """Frames for speedscope, which draws flame graphs: a profile per impl of a case, whose values are ns per call.

    folded: the impl's label -> stack, the root first -> ns in its last frame and in nothing that this called.
    Source: https://www.speedscope.app/file-format-schema.json.
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


def write_profile(
    folder: Path,
    lines: Sequence[str],
    record: CallsProfile | RanksProfile,
    further: Mapping[str, bytes],
    viewer: str,
) -> None:
    """Prints the table and writes the folder: the table, the record and further files, which the viewer opens.

    Raises:
        OutputError: it cannot be written, or came to exist meanwhile.
    """
    for line in lines:
        print_status(line)
    files = {
        "table.txt": "\n".join([*lines, ""]).encode("utf-8", "replace"),
        "table.json": msgspec.json.encode(record),
    }
    write_folder(folder, {**files, **further})
    print_status(f"{folder}: {', '.join(files)} and {plural(len(further), 'file')} for {viewer}")
