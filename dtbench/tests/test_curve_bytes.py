"""One curve of a collective has one price: in the core's planner, in exported modules and in `dtbench plan`.

The curves come from logs of nccl-tests and from runs of dtbench; both count bytes as nccl-tests does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench.cost.estimate import times_of
from dtbench.cost.export.module import render
from dtbench.cost.plan.machines import TopologyLinks
from dtbench.errors import EXIT_OK
from dtbench.records.topology import CalibratedTopology, read_topology
from dtbench.reporting.html.parts import redistribution
from dtbench.reporting.html.section import ReportCase, collect
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import table
from dtbench_core.cost.redistribution import ChainSearch
from dtbench_core.cost.topology import Topology
from dtbench_core.layout import placement as core

RANKS, SIZE = 8, 16 * 2**20
SHAPE = (2048, 2048)  # of float32: 16 MiB
# Microseconds and GB/s of each collective, so unlike that no other bytes have the same price.
TIMES = {
    "all_gather": (40.0, 200.0),
    "all_reduce": (55.0, 150.0),
    "reduce_scatter": (30.0, 230.0),
    "all_to_all": (12.0, 300.0),
}
CHANGES = [
    ("S0", "R", "all_gather"),
    ("S1", "R", "all_gather"),
    ("P", "R", "all_reduce"),
    ("P", "S0", "reduce_scatter"),
    ("P", "S1", "reduce_scatter"),
    ("S0", "S1", "all_to_all"),
    ("S1", "S0", "all_to_all"),
]
THEIRS: dict[str, Any] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}
OURS: dict[str, Any] = {
    "S0": core.Shard(0),
    "S1": core.Shard(1),
    "R": core.Replicate(),
    "P": core.Partial(),
}


def time_us(collective: str) -> Callable[[int], float]:
    latency_us, rate = TIMES[collective]
    return lambda size: latency_us + size / rate / 1e3


def log_of(collective: str) -> str:
    return table(collective, RANKS, time=lambda size, _in_place: time_us(collective)(size))


def from_logs(dtbench: Cli) -> CalibratedTopology:
    Path("nccl.log").write_text("\n".join(map(log_of, TIMES)))
    assert dtbench("import", "nccl.log", "-o", "run.jsonl", "--mesh", f"tp={RANKS}")[0] == EXIT_OK
    return calibrated(dtbench)


def from_own_run(dtbench: Cli) -> CalibratedTopology:
    results = [
        made_up.result(
            "collectives",
            name,
            "c10d",
            {
                "mesh_dim": "tp",
                "ranks": RANKS,
                "groups": "together",
                "mode": "isolated",
                "dtype": "float32",
                "size": size,
            },
            [1e-6 * time_us(name)(size)] * 5,
            size_bytes=size,
        )
        for name in TIMES
        for size in (2**12 * 4**k for k in range(8))
    ]
    made_up.write(Path("run.jsonl"), made_up.run(results, mesh={"tp": RANKS}, hosts=["node-a"] * RANKS))
    return calibrated(dtbench)


def calibrated(dtbench: Cli) -> CalibratedTopology:
    code, _, err = dtbench("calibrate", "run.jsonl", "-o", "topology.json")
    assert code == EXIT_OK, err
    return read_topology(Path("topology.json"))


@pytest.fixture(params=[from_logs, from_own_run])
def topology(request: pytest.FixtureRequest, dtbench: Cli) -> CalibratedTopology:
    return request.param(dtbench)  # type: ignore[no-any-return]


def message_us(topology: CalibratedTopology, collective: str) -> float:
    """The curve's own time of the message that moves the tensor: an all-to-all's is a rank's buffer."""
    size = SIZE // RANKS if collective == "all_to_all" else SIZE
    us = times_of(topology.dims[0].collectives[collective]).us(size)
    assert us == pytest.approx(time_us(collective)(size), rel=0.01)
    return us


def test_core_prices_a_step_as_its_collective(topology: CalibratedTopology) -> None:
    constants = Topology.load("topology.json").constants([("tp", RANKS)])
    for src, dst, collective in CHANGES:
        chain = ChainSearch(SHAPE, 4, [OURS[src]], [OURS[dst]], constants).cheapest()
        assert chain is not None
        assert [step.collective for step in chain] == [collective]
        assert chain[0].us == pytest.approx(message_us(topology, collective))


def module_of(topology: CalibratedTopology, target: Literal["torch", "inductor"]) -> ModuleType:
    spec = importlib.util.spec_from_loader("exported", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(
        compile(render(topology, target, "exported"), "exported.py", "exec", dont_inherit=True),
        module.__dict__,
    )
    return module


def test_export_to_torch_prices_a_step_as_its_collective(topology: CalibratedTopology) -> None:
    exported = module_of(structs.replace(topology, device_type="cuda"), "torch")
    exported.DEVICE_TYPE = "cpu"  # no mesh on cuda here
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        meta = TensorMeta(torch.Size(SHAPE), (SHAPE[1], 1), torch.float32)
        with exported.apply():
            for src, dst, collective in CHANGES:
                ends = (DTensorSpec(mesh, (THEIRS[end],), tensor_meta=meta) for end in (src, dst))
                us = _collective_utils.redistribute_cost(*ends)
                assert us == pytest.approx(message_us(topology, collective))
    finally:
        dist.destroy_process_group()


def test_export_to_inductor_and_plan_price_a_message_as_its_collective(topology: CalibratedTopology) -> None:
    curves, links = module_of(topology, "inductor").CURVES, TopologyLinks(topology, RANKS)
    for collective in TIMES:
        size = SIZE // RANKS if collective == "all_to_all" else SIZE
        expected_us = message_us(topology, collective)
        assert curves["tp", collective].us(size) == pytest.approx(expected_us)
        assert links.collective(collective, size, RANKS, 1) == pytest.approx(1e-6 * expected_us)


def test_report_draws_a_change_of_placement_at_the_bytes_of_its_collective() -> None:
    def measured(suite: str, name: str, impl: str, size: int, seconds: float) -> Any:
        params = {"mesh_dim": "tp", "ranks": RANKS, "dtype": "float32", "size": size}
        return made_up.result(suite, name, impl, params, [seconds] * 3, size_bytes=size)

    run = made_up.run(
        [
            measured("collectives", "all_to_all", "c10d", SIZE // RANKS, 10e-6),
            measured("redistribute", "S(0)->S(1)", "core", SIZE, 12e-6),
        ]
    )
    cases: dict[str, Sequence[ReportCase]] = dict(collect([run]))
    raw, moved = cases["collectives"], cases["redistribute"]
    drawn = redistribution._measured("all_to_all", raw, moved)
    assert {line.label: list(line.x) for line in drawn} == {"c10d": [SIZE // RANKS], "core": [SIZE // RANKS]}
