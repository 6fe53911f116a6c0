"""The entry of a mesh dim in a topology: layout, mixed groups, dtypes, contention and redistributions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from dtbench.cost.calibration import calibrate
from dtbench.errors import UsageError
from dtbench.records.result import Result
from dtbench.records.topology import Dim, HostLayout
from dtbench.tests import made_up
from dtbench.tests.made_up import slowed
from dtbench_core.cost.ring import RING_COLLECTIVES

KIB, MIB = made_up.KIB, made_up.MIB


def dims_of(results: Sequence[Result] | Iterator[Result], **changes: Any) -> dict[str, Dim]:
    return {dim.name: dim for dim in calibrate([made_up.run(list(results), **changes)]).dims}


def exact(**changes: Any) -> list[Result]:
    options = {"names": RING_COLLECTIVES, "noise": 0.0, "samples": 8, "modes": ["together"]}
    return list(made_up.collectives(**{**options, **changes}))


# ------------------------------------------------------------------------------ meshes of other shapes


@pytest.mark.parametrize(
    ("mesh", "hosts", "layouts"),
    [
        # 3 hosts of 2: hops of groups of 3 and of 2, beside one base latency.
        (
            {"dp": 3, "tp": 2},
            ("a", "a", "b", "b", "c", "c"),
            {"dp": ("inter-host", (3, 3), (1, 1), 2), "tp": ("intra-host", (1, 1), (2, 2), 0)},
        ),
        (
            {"dp": 2, "tp": 4},
            ("a", "a", "a", "a", "b", "b", "b", "b"),
            {"dp": ("inter-host", (2, 2), (1, 1), 4), "tp": ("intra-host", (1, 1), (4, 4), 0)},
        ),
        # The same mesh on hosts of two: the rows now cross hosts, two ranks of a row on each.
        (
            {"dp": 2, "tp": 4},
            ("a", "a", "b", "b", "c", "c", "d", "d"),
            {"dp": ("inter-host", (2, 2), (1, 1), 2), "tp": ("inter-host", (2, 2), (2, 2), 1)},
        ),
        # And with the hosts dealt out in turn: what the shape calls the inner dim crosses, the outer not.
        (
            {"dp": 2, "tp": 4},
            ("a", "b", "c", "d", "a", "b", "c", "d"),
            {"dp": ("intra-host", (1, 1), (2, 2), 0), "tp": ("inter-host", (4, 4), (1, 1), 2)},
        ),
    ],
)
def test_dims_on_different_links_get_their_own_constants_and_layout(
    mesh: dict[str, int], hosts: tuple[str, ...], layouts: dict[str, tuple[Any, ...]]
) -> None:
    truth = {"dp": (0.5, 200.0), "tp": (4.0, 30.0)}
    dims = dims_of(exact(mesh=mesh, truth=truth), mesh=mesh, hosts=hosts)
    for name, (bandwidth, latency) in truth.items():
        dim = dims[name]
        assert dim.bandwidth_GiBps == pytest.approx(bandwidth, rel=1e-3)
        assert dim.latency_us_per_hop == pytest.approx(latency, rel=1e-3)
        kind, spans, per_host, pairs = layouts[name]
        assert dim.layout == HostLayout(
            kind=kind, hosts_per_group=spans, ranks_per_host=per_host, groups_per_host_pair=pairs
        )
        assert dim.builtin.latency_us_per_hop == (2.7 if kind == "inter-host" else 0.6)
        assert dim.builtin.bandwidth_GiBps == pytest.approx(19.294 if kind == "inter-host" else 87.7)
        assert not any("mixed" in w for w in dim.warnings)


def test_missing_layout_is_not_guessed() -> None:
    for dim in dims_of(exact(), ranks=[]).values():
        assert (dim.builtin, dim.layout) == (None, HostLayout())
        assert any("lacks the hosts" in w for w in dim.warnings)


# ------------------------------------------------------------------------------------- mixed dims


def test_flattened_mesh_has_an_entry_if_it_was_measured() -> None:
    joint = exact(mesh={"both": 4}, truth={"both": (0.3, 120.0)})
    renamed = [msgspec.structs.replace(r, params={**r.params, "mesh_dim": "dp+tp"}) for r in joint]
    dims = dims_of([*exact(), *renamed])
    assert list(dims) == ["dp", "tp", "dp+tp"]
    both = dims["dp+tp"]
    assert (both.ranks, both.groups, both.layout.kind) == (4, 1, "inter-host")
    assert both.bandwidth_GiBps == pytest.approx(0.3, rel=1e-3)
    assert both.latency_us_per_hop == pytest.approx(120.0, rel=1e-3)
    assert list(dims_of(exact())) == ["dp", "tp"]


def test_groups_over_different_numbers_of_hosts_make_a_mixed_dim() -> None:
    dims = dims_of(exact(), hosts=("a", "a", "a", "b"))
    assert dims["tp"].layout.kind == dims["dp"].layout.kind == "mixed"
    assert dims["tp"].layout.hosts_per_group == (1, 2)
    assert any("its groups span 1 to 2 hosts" in w for w in dims["tp"].warnings)
    # Priced as its slowest group lies, so torch's constants for crossing hosts stand beside.
    assert dims["tp"].builtin.layout == "inter-host"


def test_consistently_slower_group_makes_a_mixed_dim() -> None:
    def second_tp_group(result: Result, rank: int) -> float:
        return 1.6 if result.params["mesh_dim"] == "tp" and rank >= 2 else 1.0

    dims = dims_of(slowed(exact(), second_tp_group), hosts=("a",) * 4)
    assert dims["tp"].layout.kind == "mixed" and dims["dp"].layout.kind == "intra-host"
    assert any("its slowest group takes 1.60x" in w and "slowest" in w for w in dims["tp"].warnings)
    # The price is that of the slow group.
    table = dims["tp"].collectives["all_gather"].table
    true_us = made_up.ring_us("all_gather", table[-1].size_bytes, 2, *made_up.TRUTH["tp"])
    assert table[-1].time_us == pytest.approx(1.6 * true_us)


def test_random_differences_of_groups_do_not_make_a_mixed_dim() -> None:
    """Each size has a slow group, now one and now the other."""
    rng = np.random.default_rng(1)
    slow: dict[tuple[Any, ...], int] = {}

    def either_group(result: Result, rank: int) -> float:
        key = (result.name, result.size_bytes, result.params["mesh_dim"])
        return 2.0 if slow.setdefault(key, int(rng.integers(2))) == rank // 2 else 1.0

    dims = dims_of(slowed(exact(), either_group), hosts=("a",) * 4)
    assert dims["tp"].layout.kind == "intra-host"
    # Nor by latency alone: below 64 KiB it is the host that decides which group waits.
    small = slowed(exact(sizes=made_up.SIZES[:3]), lambda r, rank: 2.0 if rank >= 2 else 1.0)
    assert dims_of(small, hosts=("a",) * 4)["tp"].layout.kind == "intra-host"


# ------------------------------------------------------------------------------------- contention


def test_contention_is_measured_at_the_largest_common_size() -> None:
    results = exact(modes=["alone", "together"], names=("all_gather", "all_reduce"))
    results = [
        r
        for r in results
        if (r.params["groups"], r.size_bytes) != ("alone", made_up.SIZES[-1]) or r.name == "all_reduce"
    ]
    contention = dims_of(results)["dp"].contention
    assert contention["all_gather"].size_bytes == made_up.SIZES[-2]
    for name, size in (("all_gather", made_up.SIZES[-2]), ("all_reduce", made_up.SIZES[-1])):
        bandwidth, latency = made_up.TRUTH["dp"]
        slow, fast = (made_up.ring_us(name, size, 2, b, latency) for b in (bandwidth, 2 * bandwidth))
        assert contention[name].together_over_alone == pytest.approx(slow / fast)
    assert dims_of(exact())["dp"].contention == {}
    assert dims_of(exact(modes=["alone"]))["dp"].contention == {}


# ----------------------------------------------------------------------------------------- dtypes


def as_dtype(results: list[Result], dtype: str, factor: float = 1.0) -> list[Result]:
    changed = [msgspec.structs.replace(r, params={**r.params, "dtype": dtype}) for r in results]
    return slowed(changed, factor)


def test_curve_uses_a_single_dtype_and_prefers_float32() -> None:
    results = exact()
    dims = dims_of([*as_dtype(results, "bfloat16", 1.5), *results])
    assert dims["tp"].collectives == dims_of(results)["tp"].collectives
    of_dtype = [w for w in dims["tp"].warnings if "bfloat16" in w]
    assert len(of_dtype) == 3 and "all_reduce of bfloat16 takes 1.50x as long as float32" in of_dtype[1]
    dim = dims_of([*results, *as_dtype(results, "bfloat16")])["tp"]
    assert not any("bfloat16" in w for w in dim.warnings)
    # Without float32 the dtype of most sizes is taken.
    few = as_dtype(exact(sizes=made_up.SIZES[:2]), "bfloat16")
    curve = dims_of([*few, *as_dtype(exact(), "float16", 2.0)])["tp"].collectives["all_gather"]
    assert (curve.dtype, curve.points) == ("float16", len(made_up.SIZES))


# ------------------------------------------------------------------------------- redistributions


def transitions(scale: float = 1.0, **params: Any) -> list[Result]:
    return [
        made_up.result(
            "redistribute",
            name,
            impl,
            {"mesh_dim": "tp", "ranks": 2, "dtype": "float32", "size": size, **params},
            [scale * host * (50e-6 + size / 1e9)] * 6,
            size_bytes=size,
        )
        for name in ("S(0)->R", "P->S(1)")
        for impl, host in (("core", 1.0), ("torch", 1.4))
        for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB)
    ]


def test_redistributions_have_a_curve_per_impl() -> None:
    dims = dims_of([*exact(), *transitions()])
    assert dims["dp"].transitions == {}
    assert set(dims["tp"].transitions) == {"core", "torch"}
    for impl, host in (("core", 1.0), ("torch", 1.4)):
        curve = dims["tp"].transitions[impl]["P->S(1)"]
        assert curve.alpha_us == pytest.approx(50 * host, rel=1e-3)
        assert curve.beta_GiBps == pytest.approx(1e9 / 2**30 / host, rel=1e-3)
        assert [row.time_us for row in curve.table] == pytest.approx(
            [host * (50 + row.size_bytes / 1e3) for row in curve.table]
        )


def test_redistributions_of_other_modes_and_bad_results_are_ignored() -> None:
    others = [*transitions(9.0, mode="back_to_back", groups="together"), *transitions(0.5, groups="alone")]
    wrong = [msgspec.structs.replace(r, status="wrong", launch=1) for r in transitions(9.0)]
    local = [msgspec.structs.replace(r, impl="local") for r in transitions(0.1)]
    good = transitions(mode="isolated", groups="together")
    all_of_them = dims_of([*exact(), *others, *wrong, *local, *good])["tp"]
    assert all_of_them.transitions == dims_of([*exact(), *transitions()])["tp"].transitions
    alone = dims_of([*exact(), *transitions(groups="alone")])["tp"]
    assert any("redistributions were measured with only one group at work" in w for w in alone.warnings)


# ------------------------------------------------------------------------------ tables, few sizes


def test_table_times_never_fall_and_keep_measured_times() -> None:
    """Pool adjacent violators, by hand: 400 and 100 us become their geometric mean."""
    times = {KIB: 50e-6, 4 * KIB: 400e-6, 16 * KIB: 100e-6, 64 * KIB: 500e-6}
    results = [
        made_up.result(
            "redistribute", "S(0)->R", "core", {"mesh_dim": "tp", "size": size}, [t] * 3, size_bytes=size
        )
        for size, t in times.items()
    ]
    table = dims_of([*exact(), *results])["tp"].transitions["core"]["S(0)->R"].table
    assert [row.time_us for row in table] == pytest.approx([50, 200, 200, 500])
    assert [row.measured_us for row in table] == pytest.approx([50, 400, 100, 500])
    assert all((row.low_us or row.time_us) <= row.time_us <= (row.high_us or row.time_us) for row in table)
    spoiled = {made_up.SIZES[2]: math.nan, made_up.SIZES[4]: 0.0}  # no times, which do not count
    results = slowed(exact(), lambda r, rank: spoiled.get(r.size_bytes or 0, 1.0))
    sizes = [row.size_bytes for row in dims_of(results)["tp"].collectives["all_gather"].table]
    assert sizes == [size for size in made_up.SIZES if size not in spoiled]


def test_end_bandwidth_is_that_of_large_messages() -> None:
    (tp,) = [d for name, d in dims_of(exact()).items() if name == "tp"]
    reduced = tp.collectives["all_reduce"]  # two ranks: its algbw is the ring's
    assert reduced.end_GiBps == pytest.approx(1.6, rel=1e-3)
    assert reduced.end_interval is None, "times without noise have no interval"
    # Messages below 4 MiB go twice as fast, as through a shaper's bucket: the line is pulled, the end not.
    quick = slowed(exact(), lambda r, rank: 0.5 if (r.size_bytes or 0) < 4 * MIB else 1.0)
    bent = dims_of(quick)["tp"].collectives["all_reduce"]
    assert bent.end_GiBps == pytest.approx(1.6, rel=1e-3)
    assert bent.beta_GiBps != pytest.approx(1.6, rel=0.05)
    one_size = [r for r in exact() if r.name != "all_reduce" or r.size_bytes == MIB]
    assert dims_of(one_size)["tp"].collectives["all_reduce"].end_GiBps is None


def test_few_sizes_are_warned_about() -> None:
    one, two = transitions()[:1], [*transitions()[:1], *transitions()[3:4]]
    dim = dims_of([*exact(), *one])["tp"]
    curve = dim.transitions["core"]["S(0)->R"]
    assert {curve.alpha_us, curve.beta_GiBps, curve.alpha_interval} == {None}
    assert curve.points == 1
    assert any("core S(0)->R measured at a single size" in w for w in dim.warnings)
    dim = dims_of([*exact(), *two])["tp"]
    assert dim.transitions["core"]["S(0)->R"].alpha_us is not None
    assert any("core S(0)->R measured at only two sizes" in w for w in dim.warnings)
    with pytest.raises(UsageError, match="no ok results of the collectives suite"):
        dims_of(transitions())
