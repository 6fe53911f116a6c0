"""Drops of bandwidth over size are found, said and kept out of the constants; steps of protocols are no drops."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dtbench.errors import EXIT_OK
from dtbench.records.run import read_run
from dtbench.records.topology import read_topology
from dtbench.stats import bandwidth_drops
from dtbench.stats.drops import drops_of
from dtbench.tests import bandwidth_drops as study
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import table

KIB, MIB, GIB = 2**10, 2**20, 2**30
DOUBLING = [2.0**k for k in range(10, 33)]  # 1 KiB to 4 GiB
BY_FOUR = DOUBLING[::2]


def line(sizes: Sequence[float], latency_us: float = 20.0, GBps: float = 209.0) -> np.ndarray:  # noqa: N803
    return latency_us + np.array(sizes) / GBps / 1e3


def dropped(sizes: Sequence[float], times: np.ndarray) -> list[tuple[float, float, float]]:
    return [(sizes[i.start - 1], sizes[i.start], sizes[i[-1]]) for i in bandwidth_drops(sizes, list(times))]


def with_factors(sizes: Sequence[float], *factors: tuple[slice, float]) -> np.ndarray:
    """Returns the times of `line`, multiplied by a factor at some sizes."""
    times = line(sizes)
    for part, factor in factors:
        times[part] *= factor
    return times


# Times of github.com/NVIDIA/nccl/issues/1453: all_reduce of 2 hosts of 8 H100, 1 to 512 MiB, out of place.
PUBLIC_US = np.array([1626.5, 2325.3, 622.6, 992.6, 1334.9, 2180.1, 24410, 49264, 125807, 193909])


@pytest.mark.parametrize(
    ("sizes", "times", "drops"),
    [
        *(
            (
                sizes,
                with_factors(sizes, (slice(-end, None), 1 / depth)),
                [(sizes[-end - 1], sizes[-end], sizes[-1])],
            )
            for sizes in (DOUBLING, BY_FOUR, BY_FOUR[-4:], DOUBLING[-5:])
            for depth in (0.25, 0.4, 0.5, 0.6)
            for end in (1, 2, 3)
        ),
        *(  # the bandwidth recovers
            (DOUBLING, with_factors(DOUBLING, (slice(i, i + 1), 1 / depth)), [(size / 2, size, size)])
            for i, size in ((DOUBLING.index(size), size) for size in (64 * MIB, 512 * MIB, 2 * GIB))
            for depth in (0.25, 0.5, 0.6)
        ),
        pytest.param(
            DOUBLING,
            with_factors(DOUBLING, (slice(-6, None), 2), (slice(-2, None), 2)),
            [(DOUBLING[-7], DOUBLING[-6], DOUBLING[-1]), (DOUBLING[-3], DOUBLING[-2], DOUBLING[-1])],
            id="two drops",
        ),
        pytest.param(DOUBLING[10:20], PUBLIC_US, [(32 * MIB, 64 * MIB, 512 * MIB)], id="public log"),
    ],
)
def test_fall_of_the_bandwidth_is_a_drop(
    sizes: list[float], times: np.ndarray, drops: list[tuple[float, float, float]]
) -> None:
    assert dropped(sizes, times) == drops


# ---------------------------------------------------------------------------- what is no drop


def protocols(sizes: Sequence[float], until: tuple[float, float], latency: float, GBps: float) -> np.ndarray:  # noqa: N803
    """LL, LL128 and Simple: half, 95 % and all of the bandwidth (NVIDIA/nccl#281), and 1, 2 and 6 latencies."""
    low, middle, high = (line(sizes, latency * a, GBps * b) for a, b in ((1, 0.5), (2, 0.95), (6, 1.0)))
    return np.select([np.array(sizes) < until[0], np.array(sizes) < until[1]], [low, middle], high)


@pytest.mark.parametrize("latency", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("ll", [16 * KIB, 64 * KIB, 512 * KIB])
@pytest.mark.parametrize("ll128", [MIB, 4 * MIB, 16 * MIB])
def test_steps_of_protocols_are_no_drops_wherever_the_sweep_ends(latency: float, ll: int, ll128: int) -> None:
    times = protocols(DOUBLING, (ll, ll128), latency, 200.0)
    assert not any(
        bandwidth_drops(sizes[:end], times[::step][:end])
        for step in (1, 2)
        for sizes in [DOUBLING[::step]]
        for end in range(1, len(sizes) + 1)
    )


ALL_SIZES = np.array(DOUBLING)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(line(DOUBLING), id="line"),
        pytest.param(
            line(DOUBLING, 300, 2.0) * (1 + 0.3 * np.clip(np.log2(ALL_SIZES / MIB) / 4, 0, 1)), id="caches"
        ),
        pytest.param(
            np.where(ALL_SIZES < 4 * MIB, line(DOUBLING, 20, 200), line(DOUBLING, 60, 270)), id="NVLS"
        ),
        pytest.param(
            np.where(ALL_SIZES < 64 * MIB, line(DOUBLING, 30, 150), line(DOUBLING, 120, 200)),
            id="tree, then ring",
        ),
        pytest.param(
            np.where(ALL_SIZES < 256 * KIB, line(DOUBLING, 20, 3), line(DOUBLING, 25, 200)),
            id="falling times",
        ),
        # 64 KiB at once, then 50 MB/s: an all_reduce of gloo, 300 us and 500 MB/s without the bucket.
        pytest.param(
            (line(DOUBLING, 300, 0.5) + np.maximum(ALL_SIZES - 64 * KIB, 0) / 50)[:16], id="token bucket"
        ),
        pytest.param(np.array([3.0]), id="one size"),
        pytest.param(np.array([]), id="no size"),
    ],
)
def test_gentle_changes_and_other_algorithms_are_no_drops(times: np.ndarray) -> None:
    assert bandwidth_drops(DOUBLING[: len(times)], list(times)) == []


def test_noise_is_no_drop_and_hides_none() -> None:
    rates = study.simulated(curves=400)
    for kind in study.HEALTHY:
        assert (rates[kind, 0.0], rates[kind, 0.05]) == (0, 0) and rates[kind, 0.1] <= 0.03
    for depth in (0.25, 0.4, 0.5):
        assert rates[f"{depth}x", 0.0] == 1 and rates[f"{depth}x", 0.05] >= 0.97


def test_public_curves_drop_where_they_really_do() -> None:
    (drop,) = [drop for curve in study.committed() for drop in study.drops_in(curve)]
    assert str(drop) == (
        "broadcast over 2xRTX2080Ti (systems.json): bus bandwidth drops from 8.12 GB/s at 512 KiB to 3.64 GB/s at "
        "1 MiB, recovered at 2 MiB"
    )


@pytest.mark.parametrize("path", sorted(study.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_runs_have_no_drops(path: Path) -> None:
    results = read_run(path).results
    for launch in {result.launch for result in results}:
        assert drops_of(result for result in results if result.launch == launch) == []


# ---------------------------------------------------------------------------- from a log to the report


def log_of(collective: str, slow: Callable[[int], float] = lambda size: 1.0) -> str:
    """8 ranks, 2 us per hop, a bus bandwidth of 366 GB/s, 16 KiB to 2 GiB."""

    def time(size: int, in_place: bool) -> float:
        us = made_up.ring_us(collective, size, 8, 366e9 / GIB, 2.0)
        return us * slow(size) if in_place else us

    return table(collective, 8, [16 * KIB * 2**k for k in range(18)], time=time)


@pytest.fixture
def command_outputs(dtbench: Cli) -> dict[tuple[str, str], str]:
    """(command, log) -> what the command prints, for a log without a drop, "good", and one with a drop, "bad"."""
    outputs = {}
    for name, slowdown in (("good", 1.0), ("bad", 366 / 90)):
        all_reduce = log_of("all_reduce", lambda size, factor=slowdown: factor if size >= 512 * MIB else 1.0)  # type: ignore[misc]
        Path(f"{name}.log").write_text(
            "\n".join([log_of("all_gather"), log_of("reduce_scatter"), all_reduce])
        )
        for command in (
            f"import {name}.log -o {name}.jsonl",
            f"calibrate {name}.jsonl -o {name}.json",
            f"show {name}.jsonl",
            f"show --json {name}.jsonl",
            f"report {name}.jsonl {name}.json -o {name}.html",
        ):
            code, outputs[command.partition(f" {name}")[0], name], _ = dtbench(*command.split())
            assert code == EXIT_OK
    return outputs


# 1318 us and 10580 us by `log_of`, of which 2 (n - 1) / n = 1.75 passes a link.
LEVELS = (
    "bus bandwidth drops from 356 GB/s at 256 MiB to 88.8 GB/s at 512 MiB, and stays low up to 2 GiB, the largest size "
    "measured"
)


def test_every_command_reports_a_drop(command_outputs: dict[tuple[str, str], str]) -> None:
    for command, variant in (("import", " (in_place=True)"), ("show", " (in_place=True)"), ("calibrate", "")):
        text = " ".join(command_outputs[command, "bad"].split())
        assert text.count(f"all_reduce over world{variant}: {LEVELS}") == 1, text
        assert "drops from" not in command_outputs[command, "good"]
    [drop] = msgspec.json.decode(command_outputs["show --json", "bad"])[0]["bandwidth_drops"]
    assert (drop["collective"], drop["mesh_dim"], drop["first_bytes"]) == ("all_reduce", "world", 512 * MIB)
    assert (drop["before_Bps"], drop["first_Bps"]) == pytest.approx((356.4e9, 88.8e9), rel=1e-3)
    page, healthy = Path("bad.html").read_text(), Path("good.html").read_text()
    assert page.count(LEVELS) == 3  # on top, in collectives and the cost model
    assert "and all_reduce drops at 512 MiB" in page.partition("</title>")[0]
    assert "in a drop of bandwidth" in page  # the figure's legend
    assert "drops from" not in healthy and "in a drop of bandwidth" not in healthy


def test_constants_are_not_fitted_to_a_drop(command_outputs: dict[tuple[str, str], str]) -> None:
    [good], [bad] = read_topology("good.json").dims, read_topology("bad.json").dims
    assert good.drops == () and [drop.last_bytes for drop in bad.drops] == [2 * GIB]
    good_curve, bad_curve = good.collectives["all_reduce"], bad.collectives["all_reduce"]
    good_constants, bad_constants = (
        (dim.bandwidth_GiBps, dim.latency_us_per_hop, curve.alpha_us, curve.beta_GiBps)
        for dim, curve in ((good, good_curve), (bad, bad_curve))
    )
    assert bad_constants == pytest.approx(good_constants, rel=1e-3) and bad.residuals.worst_ratio < 1.01
    fitted = {p.size_bytes for p in bad.residuals.points if p.collective == "all_reduce"}
    assert fitted == {16 * KIB * 2**k for k in range(15)}
    # Prices are still the measured times.
    assert bad_curve.table[-1].time_us > 3 * good_curve.table[-1].time_us


def test_only_the_curve_that_drops_is_named() -> None:
    sizes = tuple(16 * KIB * 2**k for k in range(16))
    results = [
        *made_up.collectives(truth={"dp": (40, 2), "tp": (300, 2)}, sizes=sizes, noise=0.05, samples=20)
    ]
    assert drops_of(results) == []
    (slow,) = [
        i
        for i, r in enumerate(results)
        if (r.name, r.params["mesh_dim"], r.params["groups"], r.size_bytes)
        == ("all_gather", "tp", "together", sizes[-1])
    ]
    results[slow] = msgspec.structs.replace(results[slow], busbw_Bps=(results[slow].busbw_Bps or 0) / 3)
    [drop] = drops_of(results)
    assert str(drop).startswith("all_gather over tp (groups=together): bus bandwidth drops from ")
    assert str(drop).endswith("at 512 MiB, the largest size measured")
    assert drop.first_Bps == pytest.approx(drop.before_Bps / 3, rel=0.1)
