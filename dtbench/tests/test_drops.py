"""Drops of bandwidth over size are found, said and kept out of the constants; steps of protocols are no drops."""

from __future__ import annotations

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
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import table

KIB, MIB, GIB = 2**10, 2**20, 2**30
DOUBLING = [2.0**k for k in range(10, 33)]  # 1 KiB to 4 GiB
BY_FOUR = DOUBLING[::2]


def line(sizes: Sequence[float], latency_us: float = 20.0, GBps: float = 209.0) -> np.ndarray:  # noqa: N803
    return latency_us + np.array(sizes) / GBps / 1e3


def dropped(sizes: Sequence[float], times: np.ndarray) -> list[tuple[float, float, float]]:
    return [(sizes[i.start - 1], sizes[i.start], sizes[i[-1]]) for i in bandwidth_drops(sizes, list(times))]


@pytest.mark.parametrize("sizes", [DOUBLING, BY_FOUR, BY_FOUR[-4:], DOUBLING[-5:]], ids=len)
@pytest.mark.parametrize("depth", [0.25, 0.4, 0.5, 0.6])
@pytest.mark.parametrize("from_end", [1, 2, 3])
def test_a_bandwidth_that_falls_and_stays_low_is_a_drop(
    sizes: list[float], depth: float, from_end: int
) -> None:
    first = len(sizes) - from_end
    times = line(sizes)
    times[first:] /= depth
    assert dropped(sizes, times) == [(sizes[first - 1], sizes[first], sizes[-1])]


@pytest.mark.parametrize("at", [64 * MIB, 512 * MIB, 2 * GIB])
@pytest.mark.parametrize("depth", [0.25, 0.5, 0.6])
def test_a_bandwidth_that_recovers_is_a_drop_of_those_sizes(at: int, depth: float) -> None:
    times = line(DOUBLING)
    times[DOUBLING.index(at)] /= depth
    assert dropped(DOUBLING, times) == [(at / 2, at, at)]


def test_a_curve_may_drop_twice() -> None:
    times = line(DOUBLING)
    times[-6:] *= 2
    times[-2:] *= 2
    assert dropped(DOUBLING, times) == [
        (DOUBLING[-7], DOUBLING[-6], DOUBLING[-1]),
        (DOUBLING[-3], DOUBLING[-2], DOUBLING[-1]),
    ]


def test_what_a_public_log_shows() -> None:
    # Times of github.com/NVIDIA/nccl/issues/1453: all_reduce of 2 hosts of 8 H100, 1 to 512 MiB, out of place.
    us = [1626.5, 2325.3, 622.6, 992.6, 1334.9, 2180.1, 24410, 49264, 125807, 193909]
    sizes = [float(MIB * 2**k) for k in range(10)]
    assert dropped(sizes, np.array(us)) == [(32 * MIB, 64 * MIB, 512 * MIB)]


# ---------------------------------------------------------------------------- what is no drop


def protocols(sizes: Sequence[float], until: tuple[float, float], latency: float, GBps: float) -> np.ndarray:  # noqa: N803
    """LL, LL128 and Simple: half, 95 % and all of the bandwidth (NVIDIA/nccl#281), and 1, 2 and 6 latencies."""
    of = [line(sizes, latency * a, GBps * b) for a, b in ((1, 0.5), (2, 0.95), (6, 1.0))]
    return np.where(np.array(sizes) < until[0], of[0], np.where(np.array(sizes) < until[1], of[1], of[2]))


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


def test_rising_falling_gently_and_algorithms_are_no_drops() -> None:
    sizes = np.array(DOUBLING)
    caches = line(sizes, 300, 2.0) * (1 + 0.3 * np.clip(np.log2(sizes / MIB) / 4, 0, 1))
    nvls = np.where(sizes < 4 * MIB, line(sizes, 20, 200), line(sizes, 60, 270))
    tree_then_ring = np.where(sizes < 64 * MIB, line(sizes, 30, 150), line(sizes, 120, 200))
    falling_times = np.where(sizes < 256 * KIB, line(sizes, 20, 3), line(sizes, 25, 200))
    for times in (line(sizes), caches, nvls, tree_then_ring, falling_times):
        assert bandwidth_drops(list(sizes), list(times)) == []
    assert bandwidth_drops([], []) == bandwidth_drops([1024], [3.0]) == []


def test_small_messages_that_a_token_bucket_lets_pass_are_no_level() -> None:
    """64 KiB at once, then 50 MB/s: an all_reduce of gloo, 300 us and 500 MB/s without the bucket."""
    sizes = np.array(DOUBLING[:16])
    times = line(sizes, 300, 0.5) + np.maximum(sizes - 64 * KIB, 0) / 50
    assert bandwidth_drops(list(sizes), list(times)) == []


def test_noise_is_no_drop_and_hides_none() -> None:
    rates = study.simulated(curves=400)
    for kind in study.HEALTHY:
        assert (rates[kind, 0.0], rates[kind, 0.05]) == (0, 0)
        assert rates[kind, 0.1] <= 0.03
    for depth in (0.25, 0.4, 0.5):
        assert rates[f"{depth}x", 0.0] == 1
        assert rates[f"{depth}x", 0.05] >= 0.97


def test_public_curves_drop_where_they_really_do() -> None:
    [drop] = [drop for curve in study.committed() for drop in study.drops_in(curve)]
    assert str(drop) == (
        "broadcast over 2xRTX2080Ti (systems.json): bus bandwidth drops from 8.12 GB/s at 512 KiB to 3.64 GB/s at "
        "1 MiB, recovered at 2 MiB"
    )


@pytest.mark.parametrize("path", sorted(study.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_own_runs_have_none(path: Path) -> None:
    results = read_run(path).results
    assert drops_of(results) == []
    for launch in {r.launch for r in results}:
        assert drops_of(r for r in results if r.launch == launch) == []


# ---------------------------------------------------------------------------- from a log to the report


def log_of(collective: str, slow: Callable[[int], float] = lambda size: 1.0) -> str:
    """8 ranks, 2 us per hop, a bus bandwidth of 366 GB/s, 16 KiB to 2 GiB."""
    hops = (2 if collective == "all_reduce" else 1) * 7

    def time(size: int, in_place: bool) -> float:
        us = 6.6 + hops * 2.0 + size * hops / 8 / 366e3
        return us * slow(size) if in_place else us

    return table(collective, 8, [16 * KIB * 2**k for k in range(18)], time=time)


def test_from_a_log_to_the_report_a_drop_is_said_and_no_constant_is_fitted_to_it(dtbench: Cli) -> None:
    Path("good.log").write_text("\n".join(map(log_of, ("all_gather", "reduce_scatter", "all_reduce"))))
    bad = log_of("all_reduce", lambda size: 366 / 90 if size >= 512 * MIB else 1.0)
    Path("bad.log").write_text("\n".join([*map(log_of, ("all_gather", "reduce_scatter")), bad]))
    said = {}
    for name in ("good", "bad"):
        said["import", name] = dtbench("import", f"{name}.log", "-o", f"{name}.jsonl")
        said["calibrate", name] = dtbench("calibrate", f"{name}.jsonl", "-o", f"{name}.json")
        said["show", name] = dtbench("show", f"{name}.jsonl")
        said["show --json", name] = dtbench("show", f"{name}.jsonl", "--json")
        said["report", name] = dtbench("report", f"{name}.jsonl", f"{name}.json", "-o", f"{name}.html")
        assert {code for (_, of), (code, *_) in said.items() if of == name} == {EXIT_OK}
    # 1318 us and 10580 us by `log_of`, and 2 (n - 1) / n = 1.75 of it passes a link.
    levels = (
        "bus bandwidth drops from 356 GB/s at 256 MiB to 88.8 GB/s at 512 MiB, and stays low up to 2 GiB, "
    )
    levels += "the largest size measured"
    for command, of in (("import", " (in_place=True)"), ("show", " (in_place=True)"), ("calibrate", "")):
        text = " ".join(said[command, "bad"][1].split())
        assert text.count(f"all_reduce over world{of}: {levels}") == 1, text
        assert "drops from" not in said[command, "good"][1]
    [drop] = msgspec.json.decode(said["show --json", "bad"][1])[0]["bandwidth_drops"]
    assert (drop["collective"], drop["mesh_dim"], drop["first_bytes"]) == ("all_reduce", "world", 512 * MIB)
    assert (drop["before_Bps"], drop["first_Bps"]) == pytest.approx((356.4e9, 88.8e9), rel=1e-3)
    page, healthy = Path("bad.html").read_text(), Path("good.html").read_text()
    assert (
        page.count(levels) == 3 and "drops from" not in healthy
    )  # on top, the collectives and the cost model
    assert "and all_reduce drops at 512 MiB" in page.partition("</title>")[0]
    assert "in a drop of bandwidth" in page and "in a drop of bandwidth" not in healthy  # the figure's legend

    [good], [bad] = read_topology("good.json").dims, read_topology("bad.json").dims
    assert good.drops == () and [d.last_bytes for d in bad.drops] == [2 * GIB]
    for of in (bad, bad.collectives["all_reduce"]):  # as without the drop
        of_good = good if of is bad else good.collectives["all_reduce"]
        for constant in ("bandwidth_GiBps", "latency_us_per_hop", "alpha_us", "beta_GiBps"):
            if hasattr(of, constant):
                assert getattr(of, constant) == pytest.approx(getattr(of_good, constant), rel=1e-3)
    assert {p.size_bytes for p in bad.residuals.points if p.collective == "all_reduce"} == {
        16 * KIB * 2**k for k in range(15)
    }
    assert bad.residuals.worst_ratio < 1.01
    # A price is what was measured, though.
    assert (
        bad.collectives["all_reduce"].table[-1].time_us > 3 * good.collectives["all_reduce"].table[-1].time_us
    )


def test_only_the_curve_that_drops_is_named() -> None:
    """Of in and out of place, groups and dims the one, by what tells it from the others."""
    from dtbench.tests import made_up

    sizes = tuple(16 * KIB * 2**k for k in range(16))
    healthy = list(
        made_up.collectives(truth={"dp": (40, 2), "tp": (300, 2)}, sizes=sizes, noise=0.05, samples=20)
    )
    assert drops_of(healthy) == []
    results = [
        msgspec.structs.replace(r, busbw_Bps=r.busbw_Bps / 3)
        if (r.name, r.params["mesh_dim"], r.params["groups"]) == ("all_gather", "tp", "together")
        and r.size_bytes == sizes[-1]
        else r
        for r in healthy
        if r.busbw_Bps
    ]
    [drop] = drops_of(results)
    assert str(drop).startswith("all_gather over tp (groups=together): bus bandwidth drops from ")
    assert str(drop).endswith("at 512 MiB, the largest size measured")
    assert drop.first_Bps == pytest.approx(drop.before_Bps / 3, rel=0.1)
