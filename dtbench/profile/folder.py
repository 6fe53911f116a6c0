"""Writes the folder of a profile of a suite's cases."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dtbench.engine.progress import print_status
from dtbench.records.atomic import write_folder
from dtbench.records.profile import CallsProfile, RanksProfile
from dtbench.text.units import plural

SPEEDSCOPE = "speedscope.json"


def speedscope(folded: Mapping[str, Mapping[tuple[str, ...], float]], name: str) -> dict[str, object]:
    """Returns a file for speedscope, which draws flame graphs, with one profile for each impl of a case.

    The format's schema is https://www.speedscope.app/file-format-schema.json.

    Args:
        folded: impl -> stack of frames, outermost first -> nanoseconds per call.
        name: the file's title.
    """
    frame_ids: dict[str, int] = {}  # the profiles share their frames
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
                "samples": [
                    [frame_ids.setdefault(frame, len(frame_ids)) for frame in stack] for stack in stacks
                ],
                "weights": weights,
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "dtbench",
        "shared": {"frames": [{"name": frame} for frame in frame_ids]},
        "profiles": profiles,
    }


def write_profile(
    folder: Path,
    lines: Sequence[str],
    record: CallsProfile | RanksProfile,
    viewer_files: Mapping[str, bytes],
    viewer: str,
) -> None:
    """Prints the tables and writes the folder.

    Args:
        folder: the folder to make.
        lines: the tables, written to `table.txt`.
        record: the figures, written to `table.json`.
        viewer_files: name -> content of the files for the viewer.
        viewer: the web page that opens them.

    Raises:
        OutputError: the folder cannot be written, or exists by now.
    """
    for line in lines:
        print_status(line)
    files = {
        "table.txt": "\n".join([*lines, ""]).encode("utf-8", "replace"),
        "table.json": msgspec.json.encode(record),
    }
    write_folder(folder, {**files, **viewer_files})
    print_status(f"{folder}: {', '.join(files)} and {plural(len(viewer_files), 'file')} for {viewer}")
