"""The recommended bucket size, its interval, and the output of `calibrate`."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtbench.cost.bucket_size import BucketChoice, BucketGroup, bucket_choices, choose
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli

RUN = str(Path(__file__).parents[2] / "results" / "buckets-cpu-2ranks.jsonl")
MIB = 2**20


def chosen(*launches: Sequence[float]) -> BucketChoice:
    sizes = [MIB * 4**k for k in range(len(launches[0]))]
    return choose(BucketGroup("dp", 2, "float32", 4096), sizes, np.asarray(launches, dtype=np.float64))


@pytest.mark.parametrize(
    ("launches", "mib", "cap_mb", "interval"),
    [
        ([[2.0, 1.06, 1.04, 1.0, 1.3]], 16, 16, None),
        ([[3.0, 2.0, 1.0]], 16, None, None),  # the edge of the sizes measured is no recommendation
        ([[1.0, 2.0, 3.0]], 1, None, None),
        ([[3.0, 1.02, 1.0]], 4, 4, None),  # flat up to the edge
        ([[1 / 0.951, 1.0]], 1, None, None),  # 5 % of the rate, not of the time
        ([[1 / 0.949, 1.0]], 4, None, None),
        ([[2.0, 1.0, 1.0]] * 6, 4, 4, None),  # all agree: the sizes are too far apart for an interval
        ([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]] * 3, 1, None, (1, 16)),
        # Launches of 1, 3 and 9 s: 4 MiB is 20 % faster in two of them, and has the larger median time.
        ([[1.0, 0.8], [3.0, 3.6], [9.0, 7.2]], 4, None, (1, 4)),
    ],
)
def test_choose_takes_the_smallest_size_within_5_percent(
    launches: Sequence[Sequence[float]], mib: int, cap_mb: float | None, interval: tuple[int, int] | None
) -> None:
    choice = chosen(*launches)
    assert (choice.bucket_bytes, choice.bucket_cap_mb) == (mib * MIB, cap_mb)
    assert (choice.low_bytes, choice.high_bytes) == (
        (interval[0] * MIB, interval[1] * MIB) if interval else (None, None)
    )


def test_loss_is_relative_to_the_fastest_size() -> None:
    choice = chosen([2.0, 1.06, 1.04, 1.0, 1.3])
    assert (choice.fastest_bytes, choice.loss) == (64 * MIB, pytest.approx(0.04))


def test_launches_without_all_sizes_are_ignored() -> None:
    cases = list(made_up.bucketer())
    one_size = [r for r in cases if r.params["bucket_bytes"] == MIB]
    choices = bucket_choices(
        [made_up.run([*cases, *[msgspec.structs.replace(r, launch=1) for r in one_size]])]
    )
    assert [(c.group.tensor_bytes, c.launches) for c in choices] == [(2**14, 1), (2**18, 1)]
    assert bucket_choices([made_up.run(one_size)]) == []


@pytest.mark.parametrize("value", ["", "x", 0, -1])
@pytest.mark.parametrize("param", ["bucket_bytes", "tensor_bytes"])
def test_damaged_sizes_are_ignored(param: str, value: str | int) -> None:
    cases = list(made_up.bucketer())
    damaged = msgspec.structs.replace(cases[0], launch=1, params={**cases[0].params, param: value})
    assert bucket_choices([made_up.run([*cases, damaged])]) == bucket_choices([made_up.run(cases)])


@pytest.mark.parametrize("param", ["ranks", "total_bytes"])
def test_damaged_params_of_a_group_read_as_missing(param: str) -> None:
    cases = [msgspec.structs.replace(r, params={**r.params, param: "x"}) for r in made_up.bucketer()]
    missing = [
        msgspec.structs.replace(r, params={k: v for k, v in r.params.items() if k != param})
        for r in made_up.bucketer()
    ]
    assert bucket_choices([made_up.run(cases)]) == bucket_choices([made_up.run(missing)])


def test_calibrate_prints_bucket_sizes(dtbench: Cli) -> None:
    code, out, error = dtbench("calibrate", RUN)
    assert (code, error) == (0, "") and "bucket_cap_mb" in out and "pre_bucketing_fsdp_collectives" in out
    choices = msgspec.convert(
        json.loads(dtbench("calibrate", RUN, "--json")[1])["buckets"], list[BucketChoice]
    )
    assert [choice.group.dtype for choice in choices] == ["float32", "bfloat16"]
    assert all(c.edge or c.bucket_cap_mb == c.bucket_bytes / MIB for c in choices)
    code, out, error = dtbench("calibrate", str(Path(RUN).parent / "packing-cpu-2cores.jsonl"))
    assert (code, out, error.count("\n")) == (2, "", 1) and "dtbench run bucketer --size" in error
