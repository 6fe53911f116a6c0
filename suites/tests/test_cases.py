"""The cases that the suites list: their params and impls are unique, complete and found without ranks."""

import itertools
import math
from dataclasses import replace

import pytest
import torch.distributed as dist

from dtbench.engine.options import RunRequest
from dtbench.suite import ROUTING, Case, RunOptions
from dtbench.suite.registry import load
from dtbench_core.cost.ring import busbw_factor
from dtbench_suites import collectives, dispatch, redistribute
from dtbench_suites.dispatch_programs import PROGRAMS, PYTORCH_PROGRAMS

SIZES = (1024, 65536, 10**6)
# Programs without a counterpart in plain torch.
NO_FLOOR = {(p.name, p.placements) for p in (*PROGRAMS, *PYTORCH_PROGRAMS) if not p.local}

# Cases with the impl "wrapped": calls of single ops without a backward pass, except from_local and to_local.
WRAPPED = {
    (op.name, op.placements, pass_, call)
    for op in dispatch.OPS
    for pass_, call in (("forward", "cached"), ("forward", "busy"), ("forward+requires_grad", "cached"))
    if not op.name.endswith("_local")
}

OPTIONS = {
    "2x2": RunOptions((("dp", 2), ("tp", 2)), SIZES, ("float32", "bfloat16")),
    "quick": RunOptions((("dp", 2), ("tp", 2)), SIZES, quick=True),
    "one dim": RunOptions((("tp", 3),), SIZES, ("float64",)),
    "a dim of one rank": RunOptions((("dp", 1), ("tp", 4)), SIZES),
    "cuda": RunOptions((("dp", 4), ("tp", 8)), SIZES, device_type="cuda"),
    "one rank": RunOptions((("tp", 1),), SIZES),
}
# The impls of each suite; calibrate and report read them from run files by name.
IMPLS = {
    "dispatch": {"core", "torch", "local"},
    "redistribute": {"core", "torch"},
    "collectives": {"c10d"},
    "bucketer": {"core", "reference", "unbucketed", "packed", "limit"},
    "tensor_parallel": {"core", "torch", "whole"},
    "embedding": {"core", "torch", "whole"},
    "overlap": {"core", "torch", "wait_at_once", "local"},
}
# The impls of the bucketer's cases of 64 MiB.
LARGE = {"core", "core_held", "reference", "packed", "limit", "copy"}
PARAMS = {
    "dispatch": {"placements", "mesh", "pass", "call"},
    "redistribute": {"mesh_dim", "ranks", "groups", "mode", "dtype", "size"},
    "collectives": {"mesh_dim", "ranks", "groups", "mode", "dtype", "size"},
    "bucketer": {"mesh_dim", "ranks", "dtype", "tensor_bytes", "bucket_bytes", "total_bytes"},
    "tensor_parallel": {"mesh_dim", "ranks", "pass", "dtype", "batch", "seq", "d_model", "heads"},
    "embedding": {"mesh_dim", "ranks", "pass", "dtype", "rows", "width", "lookups"},
    "overlap": {"mesh_dim", "ranks", "dtype", "size", "late_ms", "layers", "width"},
}


def cases(suite: str, options: RunOptions) -> list[Case]:
    return list(load([suite])[0].cases(options))


def test_load_finds_the_suites():
    assert {s.name: s.world for s in load()} == {
        name: "simulated" if name == "dispatch" else "ranks" for name in IMPLS
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("suite", IMPLS)
def test_cases_are_unique_and_have_the_expected_params_and_impls(suite: str, options: RunOptions):
    assert not dist.is_initialized()  # listing needs no ranks
    listed = cases(suite, options)
    keys = [(case.name, *sorted(case.params.items())) for case in listed]
    assert len(set(keys)) == len(keys)
    for case in listed:
        assert {*case.params} - {ROUTING} == PARAMS[suite]
        placements, pass_, call = (case.params.get(name) for name in ("placements", "pass", "call"))
        expected = set(LARGE if case.name == "reduce_scatter_large" else IMPLS[suite])
        if call in ("first", "second") or (case.name, placements) in NO_FLOOR:
            expected.discard("local")
        if (case.name, placements, pass_, call) in WRAPPED:
            expected.add("wrapped")
        assert set(case.build) == expected
    assert listed or (options.world_size == 1 and suite not in ("dispatch", "collectives"))


@pytest.mark.parametrize("suite", sorted(IMPLS.keys() - {"dispatch"}))
def test_suites_measure_all_dtypes_and_mesh_dims_of_several_ranks(suite: str):
    assert {case.params["mesh_dim"] for case in cases(suite, OPTIONS["a dim of one rank"])} == {"tp"}
    dims = ("dp", "tp", "dp+tp") if suite in ("collectives", "redistribute") else ("dp", "tp")
    assert {(case.params["mesh_dim"], case.params["dtype"]) for case in cases(suite, OPTIONS["2x2"])} == set(
        itertools.product(dims, ("float32", "bfloat16"))
    )


@pytest.mark.parametrize("suite", ["redistribute", "collectives"])
def test_chosen_sizes_are_measured_in_every_regime(suite: str):
    chosen = RunOptions((("tp", 2),), (2**10, 2**14, 2**18, 2**22), sizes_chosen=True)
    assert set(map(frozenset, sizes_by_regime(suite, chosen).values())) == {frozenset(chosen.sizes_bytes)}


def sizes_by_regime(suite: str, options: RunOptions) -> dict[tuple[str, object, object], set[object]]:
    sizes: dict[tuple[str, object, object], set[object]] = {}
    for case in cases(suite, options):
        if ROUTING in case.params:  # few sizes, see test_routing.py
            continue
        sizes.setdefault((case.name, case.params["groups"], case.params["mode"]), set()).add(
            case.params["size"]
        )
    return sizes


@pytest.mark.parametrize("mesh", [(("tp", 4),), (("dp", 2), ("tp", 2)), (("pp", 2), ("dp", 2), ("tp", 2))])
@pytest.mark.parametrize("suite", ["redistribute", "collectives"])
def test_default_sizes_are_all_measured_only_together_and_isolated(
    suite: str, mesh: tuple[tuple[str, int], ...]
):
    options = RunRequest(max_size_bytes=5 * 2**20, mesh=mesh).resolve("cpu", math.prod(n for _, n in mesh))
    measured = sizes_by_regime(suite, options)
    expected = {("together", "isolated"): set(options.sizes_bytes), ("alone", "isolated"): {5 * 2**20}}
    for (_, *regime), sizes in measured.items():
        assert sizes == expected.get(tuple(regime), {256 * 2**10})
    assert {groups for _, groups, _ in measured} == (
        {"together"} if len(mesh) == 1 else {"alone", "together"}
    )
    names = [name for name, _ in mesh]
    assert {case.params["mesh_dim"] for case in cases(suite, options)} == {*names, "+".join(names)}


@pytest.mark.parametrize("suite", ["redistribute", "collectives"])
def test_refinement_makes_the_cases_that_the_suite_lists(suite: str):
    options = RunOptions((("dp", 2), ("tp", 3)), (1000, 70000), ("bfloat16",), sizes_chosen=True)
    refinement = load([suite])[0].refinement
    for case in cases(suite, options):
        if ROUTING in case.params:
            continue
        assert replace(refinement.case(options, case.name, case.params), build=case.build) == case
        between = refinement.case(options, case.name, {**case.params, "size": 12345})
        assert between.params == {**case.params, "size": between.size_bytes}
        assert 12345 * 0.8 < (between.size_bytes or 0) <= 12345


def test_collectives_of_one_rank_have_no_bus_bandwidth():
    assert {c.busbw_factor for c in cases("collectives", OPTIONS["one rank"])} == {None}


@pytest.mark.parametrize(
    ("name", "requested", "n", "itemsize", "size"),
    [
        ("all_reduce", 1000, 3, 4, 1000),  # need not be a multiple of the ranks
        ("broadcast", 1003, 3, 4, 1000),
        ("all_gather", 1000, 3, 4, 996),  # 83 elements for each of 3 ranks
        ("scatter", 1, 4, 2, 8),  # at least one element per rank
        ("all_reduce", 1, 4, 8, 8),
    ],
)
def test_sizes_are_trimmed_to_equal_elements_per_rank(
    name: str, requested: int, n: int, itemsize: int, size: int
):
    assert collectives.trimmed(name, requested, n, itemsize) == size


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("size", [1, 100, 4096, 2**20, 10**7])
def test_redistributed_shapes_are_multiples_of_the_ranks(size: int, n: int):
    rows, cols = redistribute.shape_of(size, 4, n)
    assert rows % n == cols % n == 0
    assert rows * cols * 4 <= max(size, 4 * n * n)
    if size >= 2**20:
        assert 1 / 4 <= rows / cols <= 4 and rows * cols * 4 > 0.9 * size


@pytest.mark.parametrize("quick", (False, True))
def test_busy_cases_exist_on_gpus_only(quick: bool):
    on_cpu = RunOptions((("tp", 2),), (), quick=quick)
    assert not any(case.busy for case in dispatch.dispatch.cases(on_cpu))
    on_gpu = dispatch.dispatch.cases(replace(on_cpu, device_type="cuda"))
    assert {(case.name, case.params["call"], case.instrument) for case in on_gpu if case.busy} == {
        (name, "busy", "busy") for name in dispatch.BUSY
    }


@pytest.mark.parametrize("shape", ("8", "2x4"))
def test_every_op_is_measured_on_both_meshes(shape: str):
    listed = cases("dispatch", OPTIONS["2x2"])
    assert {(c.name, c.params["placements"]) for c in listed if c.params["mesh"] == shape} == {
        *((op.name, op.placements) for op in dispatch.OPS),
        *((p.name, p.placements) for p in PROGRAMS if not p.flat or shape == "8"),
    }


# 2 (n - 1) / n for all_reduce, (n - 1) / n for collectives in which each rank handles a part, otherwise 1. See
# nccl-tests, doc/PERFORMANCE.md.
@pytest.mark.parametrize(
    ("name", "n", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
    ],
)
def test_bus_bandwidth_factor(name: str, n: int, factor: float):
    assert busbw_factor(name, n) == factor
