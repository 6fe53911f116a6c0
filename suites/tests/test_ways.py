"""The candidate ways of a decision: what they send, that torch's own are among them, that all are right."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from dtbench.records.run import read_run
from dtbench.suite import RunOptions
from dtbench.suite.errors import UsageError
from dtbench.suite.suites import load
from dtbench.tests.programs import start
from dtbench_suites import regret as suite
from dtbench_suites.ways import (
    Leg,
    Product,
    Way,
    offline_mesh,
    torch_leg,
    torch_product,
    ways_between,
    ways_of_product,
)

DIMS = (("dp", 2), ("tp", 4))
SHAPE = (64, 32)
PLAN = RunOptions((("dp", 2), ("tp", 4)), (65536,), sizes_chosen=True)


def ways(src: tuple[str, ...], dst: tuple[str, ...]) -> list[str]:
    found = ways_between(SHAPE, 4, src, dst, DIMS, None, together=True)
    return [way.words(DIMS, 4) for way in found]


def test_ways_are_written_with_what_is_shared() -> None:
    whole = 64 * 32 * 4
    assert ways(("R", "S(1)"), ("R", "R"))[0] == f"tp:S(1)->R:{whole}"
    assert f"dp:S(0)->R:{whole // 4} tp:S(1)->R:{whole}" in ways(("S(0)", "S(1)"), ("R", "R"))
    assert f"tp:S(1)->R:{whole // 2} dp:S(0)->R:{whole}" in ways(("S(0)", "S(1)"), ("R", "R"))
    assert f"dp+tp:P+P->S(0)+S(1):{whole}" in ways(("P", "P"), ("S(0)", "S(1)"))
    leg = Leg("out", SHAPE, (("R", "R"),), ())
    assert Way((leg,)).words(DIMS, 4) == "nothing to send"


def test_ways_lead_from_one_end_to_the_other() -> None:
    for src, dst in suite.REDISTRIBUTIONS:
        found = ways_between(SHAPE, 4, src, dst, DIMS, None, together=True)
        assert len(found) > 1, (src, dst)
        for way in found:
            (leg,) = way.legs
            assert (leg.placed[0], leg.placed[-1]) == (src, dst)
            for step, (before, after) in zip(leg.steps, itertools.pairwise(leg.placed), strict=True):
                changed = tuple(d for d in range(2) if before[d] != after[d])
                assert changed == step.mesh_dims


def test_torchs_own_ways() -> None:
    """Greedy gathers from the inside out and reduces where it stands, whatever it costs."""
    mesh = offline_mesh(DIMS)
    whole = 64 * 32 * 4
    greedy = torch_leg("x", SHAPE, ("P", "S(0)"), ("R", "R"), mesh, torch.float32, by_cost=False)
    assert Way((greedy,)).words(DIMS, 4) == f"tp:S(0)->R:{whole} dp:P->R:{whole}"
    by_cost = torch_leg("x", SHAPE, ("P", "S(0)"), ("R", "R"), mesh, torch.float32, by_cost=True)
    assert Way((by_cost,)).words(DIMS, 4) == f"dp:P->R:{whole // 4} tp:S(0)->R:{whole}"
    product = Product(64, 32, 32, ("S(0)", "S(1)"), ("R", "S(0)"), ("S(0)", "R"))
    chosen = torch_product(product, mesh, torch.float32)
    assert chosen.words(DIMS, 4) == f"out.tp:P->R:{64 // 2 * 32 * 4}"
    assert chosen in ways_of_product(product, 4, DIMS, None, together=False)


def test_ways_of_torch_take_one_mesh_dim_at_a_time() -> None:
    listed = [case for case in load(["regret"])[0].cases(PLAN) if case.params["library"] == "torch"]
    assert listed
    assert not any("+" in way for case in listed for way in case.build)
    for case in listed:
        assert case.params["torch_greedy"] in case.build
        assert case.params.get("torch_by_cost", case.params["torch_greedy"]) in case.build
        assert math.isclose(case.size_bytes or 0, 65536, rel_tol=0.05)


def test_a_mesh_without_a_choice_is_refused() -> None:
    for mesh in ((("tp", 4),), (("dp", 1), ("tp", 4)), (("a", 2), ("b", 2), ("c", 2))):
        with pytest.raises(UsageError, match=r"expected two mesh dims .*--mesh dp=2,tp=2"):
            list(load(["regret"])[0].cases(RunOptions(mesh, (4096,))))


def test_every_way_is_right_on_real_ranks(tmp_path: Path) -> None:
    """Each result is compared with the whole matrix, cut by hand."""
    output = tmp_path / "r.jsonl"
    command = ["run", "regret", "--quick", "--device", "cpu", "--mesh", "dp=2,tp=2"]
    done = start(*command, "--size", "16KiB", "-o", str(output))
    assert done.returncode == 0, done.stderr
    results = read_run(output).results
    assert {r.status for r in results} == {"ok"}
    kinds = Counter((r.params["library"], r.name) for r in results)
    assert set(kinds) == set(itertools.product(("core", "torch"), ("redistribute", "product")))
    assert len({r.params["problem"] for r in results}) == len(suite.REDISTRIBUTIONS) + len(suite.PRODUCTS)


def test_what_a_rank_holds() -> None:
    """Against shards cut by hand; the terms of a pending sum add up."""
    full = torch.arange(32.0).view(8, 4)
    dims = (("dp", 2), ("tp", 2))
    at = [1, 0]
    assert torch.equal(suite.local_of(full, ("S(0)", "S(1)"), at, dims), full[4:, :2])
    assert torch.equal(suite.local_of(full, ("S(0)", "S(0)"), at, dims), full[4:6])
    terms = [suite.local_of(full, ("P", "P"), [i, j], dims) for i in range(2) for j in range(2)]
    assert torch.equal(sum(terms), full)  # type: ignore[arg-type]
    halves = [suite.local_of(full, ("P", "S(1)"), [i, 1], dims) for i in range(2)]
    assert torch.equal(sum(halves), full[:, 2:])  # type: ignore[arg-type]
