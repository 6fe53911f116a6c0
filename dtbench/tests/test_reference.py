"""`dtbench compare --reference`: runs beside the table of public systems."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dtbench.cli.compare import public_systems
from dtbench.comparison import references as reference
from dtbench.comparison.references import (
    MIN_SIZE,
    PublishedCollective,
    ReferenceComparison,
    ReferenceRow,
    System,
    verdicts_of,
)
from dtbench.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NOTHING,
    EXIT_OK,
    EXIT_REGRESSION,
    EXIT_USAGE,
    UnreadableRunError,
)
from dtbench.importers import convert
from dtbench.records.result import Run
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import SIZES, read, table, time_us
from dtbench_core.cost.ring import busbw_factor


def test_the_table_of_public_systems_is_sound() -> None:
    systems = reference.read_systems()
    assert len({s.name for s in systems}) == len(systems) >= 30
    usual = {("A100", 8), ("H100", 8), ("H200", 8), ("B200", 8), ("GB200", 72), ("MI300X", 8)}
    assert usual <= {(system.gpu, system.ranks) for system in systems}
    for system in systems:
        for name, published in system.collectives.items():
            assert published.source and len(published.points) >= 2, (system.name, name)
            for size, _ in published.points:
                assert 1e5 < (system.busbw(name, size) or 0) < 1e12, (system.name, name, size)
    # A figure of a source, by hand: 8 GiB in 31294 us, seven quarters of it on the bus.
    p5 = next(s for s in systems if s.name == "8xH100-AWS-p5")
    assert p5.busbw("all_reduce", 2**33) == pytest.approx(2**33 / 31294e-6 * 1.75)
    assert 4.7e11 < (p5.busbw("all_reduce", 3 * 2**31) or 0) < 4.85e11
    assert p5.busbw("all_reduce", 512) is None and p5.busbw("all_gather", 2**30) is None
    b200 = next(s for s in systems if s.name == "8xB200")  # two sizes, far apart: nothing between them
    assert b200.busbw("all_reduce", 1024) and b200.busbw("all_reduce", 2**20) is None


def test_a_run_beside_its_kind(dtbench: Cli) -> None:
    write_run("run.jsonl", dtbench, sizes=(*SIZES, 2**30))
    # At 64 MiB 175 GB/s where the median of three sources is 362, at 1 GiB 180 where two have 442 and 470.
    code, out, _ = dtbench("compare", "--reference", "run.jsonl")
    line, ratios = out.splitlines()
    assert line == "low: 0.40 to 0.48 of 8x H100 at 64 MiB and above, three sources (all_reduce of dim world)"
    assert code == EXIT_REGRESSION and ratios.endswith("ratios by size and source: --all")
    code, out, _ = dtbench("compare", "--reference", "run.jsonl", "--all")
    assert code == EXIT_REGRESSION and out.splitlines()[0] == line and "8xH100-AWS-p5 (NVLink)" in out
    code, out, _ = dtbench("compare", "--reference", "run.jsonl", "--system", "8xA100-SXM4-40GB", "--json")
    content = json.loads(out)
    assert code == EXIT_REGRESSION == content["exit_code"]
    (verdict,) = content["verdicts"]
    assert (verdict["verdict"], verdict["collectives"]) == ("low", ["all_reduce"])
    row = next(r for r in content["rows"] if r["size_bytes"] == 2**30)
    assert (row["run_Bps"], row["reference_Bps"]) == pytest.approx(
        (2**30 / time_us(2**30, True) * 1.75e6, 2**30 / 8176.5 * 1.75e6), rel=1e-3
    )
    assert row["ratio"] == pytest.approx(row["run_Bps"] / row["reference_Bps"])
    assert {s["name"] for s in content["systems"]} == {"8xA100-SXM4-40GB"}
    code, _, err = dtbench("compare", "--reference", "run.jsonl", "--system", "nosuch")
    assert code == EXIT_USAGE and "no public system is called 'nosuch'" in err
    write_run("five.jsonl", dtbench, ranks=5)
    code, out, _ = dtbench("compare", "--reference", "five.jsonl")
    assert code == EXIT_NOTHING and "no verdict on" in out
    assert "no public measurements of 5 ranks on 1 host(s) with NVIDIA H100; nearest is 8xH100-AWS-p5" in out


def write_run(path: str, dtbench: Cli, **changes: Any) -> None:
    """Imports a made-up log of nccl-tests."""
    Path("x.log").write_text(table(**changes))
    assert dtbench("import", "x.log", "-o", path)[0] == EXIT_OK


LARGE = tuple(2**20 * 4**k for k in range(7))  # 1 MiB to 4 GiB


def system(name: str, busbw: float, **changes: object) -> System:
    """GPUs, if not said otherwise 8 H100 of one host, with this bus bandwidth, GB/s, at every size."""
    kind = {"gpu": "H100", "ranks": 8, "hosts": 1, "link": "NVLink"} | changes
    factors = {name: busbw_factor(name, kind["ranks"]) for name in ("all_reduce", "all_gather", "broadcast")}  # type: ignore[arg-type]
    curves = {
        collective: PublishedCollective(tuple((size, size * factor / busbw / 1e3) for size in LARGE), name)
        for collective, factor in factors.items()
    }
    return System(name=name, collectives=curves, **kind)  # type: ignore[arg-type]


def measured(
    busbw: Callable[[int], float],
    collective: str = "all_reduce",
    gpu: str = "NVIDIA H100",
    ranks: int = 8,
    hosts: int = 1,
) -> str:
    def time_us(size: int, _in_place: bool) -> float:
        return size * busbw_factor(collective, ranks) / busbw(size) / 1e3

    return table(collective, ranks, LARGE, hosts=hosts, time=time_us).replace("NVIDIA H100", gpu)


def compared(texts: str | list[str], systems: list[System], **options: object) -> ReferenceComparison:
    return reference.compare_with_reference(imported(texts, **options), systems)


def imported(texts: str | list[str], **options: object) -> Run:
    logs = [read(text) for text in ([texts] if isinstance(texts, str) else texts)]
    header, results = convert.to_run(logs, [], **options)  # type: ignore[arg-type]
    return Run(Path("x"), header, tuple(results), True)


SOURCES = [system("a", 400), system("b", 410), system("c", 390)]


@pytest.mark.parametrize(
    ("busbw", "line", "code"),
    [
        (lambda _: 292, "low: 0.73 of 8x H100 at 64 MiB and above, three sources", 1),
        (
            lambda size: 366 if size < 2**30 else 88,
            "low: 0.22 of 8x H100 at 1 GiB and above, three sources",
            1,
        ),
        (lambda size: 100 if size == 2**28 else 400, "low: 0.25 of 8x H100 at 256 MiB, three sources", 1),
        (
            lambda size: 100 if size < 2**25 else 400,
            "as public measurements: 1.00 of 8x H100 at 64 MiB and above, three",
            0,
        ),
        (
            lambda size: 388 if size < 2**30 else 416,
            "as public measurements: 0.97 to 1.04 of 8x H100 at 64 MiB and ab",
            0,
        ),
        (lambda _: 333, "as public measurements: 0.83 of 8x H100", 0),  # 0.854 of the slowest
        (lambda _: 600, "above public measurements: 1.50 of 8x H100", 0),
    ],
)
def test_verdict_line_compares_the_bandwidth_of_large_sizes(
    busbw: Callable[[int], float], line: str, code: int
) -> None:
    comparison = compared(measured(busbw), SOURCES)
    assert str(comparison.verdicts[0]).startswith(line)
    assert (len(comparison.verdicts), comparison.exit_code) == (1, code)


@pytest.mark.parametrize(
    ("busbw", "verdict", "code"),
    [
        (40, "low", 1),
        (100, "cannot tell", 3),
        (180, "as public measurements", 0),
        (400, "above public measurements", 0),
    ],
)
def test_sources_that_disagree_leave_what_lies_between_open(busbw: float, verdict: str, code: int) -> None:
    network = {"hosts": 2, "ranks": 16, "link": "NVLink and EFA"}
    systems = [system("a", 50, **network), system("b", 190, **network)]
    comparison = compared(measured(lambda _: busbw, ranks=16, hosts=2), systems)
    assert (comparison.verdicts[0].verdict, comparison.exit_code) == (verdict, code)
    assert "of 16x H100 on 2 hosts at 64 MiB and above, two sources" in str(comparison.verdicts[0])


def test_single_source_decides_within_a_host_but_not_across_networks() -> None:
    across = measured(lambda _: 40, ranks=16, hosts=2)
    network = system("a", 50, hosts=2, ranks=16, link="NVLink and EFA")
    comparison = compared(across, [network])
    assert comparison.exit_code == EXIT_INCONCLUSIVE
    assert "one source, whose network or PCIe may differ" in str(comparison.verdicts[0])
    (low,) = compared(across, [replace(network, link="NVLink across 2 hosts of 8")]).verdicts
    assert low.verdict == "low" and low.ratios == pytest.approx((0.8, 0.8), rel=6e-3)
    assert compared(measured(lambda _: 40), [system("a", 50)]).verdicts[0].verdict == "low"
    assert compared(measured(lambda _: 40, gpu="H100 PCIe"), [system("a", 50, link="PCIe")]).exit_code == 3
    run = imported(across)
    assert reference.compare_with_reference(run, [network], "a").exit_code == EXIT_REGRESSION
    other = reference.compare_with_reference(run, [system("b", 50)], "b")
    assert other.exit_code == EXIT_INCONCLUSIVE and "b with 8 ranks" in other.notes[0] and other.rows


def test_collectives_and_dims_that_differ_have_a_line_each() -> None:
    texts = [
        measured(lambda _: 400),
        measured(lambda _: 100, "all_gather"),
        measured(lambda _: 395, "broadcast"),
    ]
    comparison = compared(texts, SOURCES)
    assert [str(verdict) for verdict in comparison.verdicts] == [
        "low: 0.25 of 8x H100 at 64 MiB and above, three sources (all_gather of dim world)",
        (
            "as public measurements: 0.99 to 1.00 of 8x H100 at 64 MiB and above, three sources "
            "(all_reduce, broadcast of dim world)"
        ),
    ]
    texts = [measured(lambda _: 20, ranks=2, hosts=2), measured(lambda _: 100)]
    comparison = compared(texts, SOURCES, mesh=(("dp", 2), ("tp", 8)))
    assert ([verdict.mesh_dim for verdict in comparison.verdicts], comparison.exit_code) == (
        ["tp"],
        EXIT_REGRESSION,
    )
    assert "2 ranks on 2 host(s) with NVIDIA H100; nearest is a" in comparison.notes[0]


@pytest.mark.parametrize(
    ("gpu", "link", "alike"),
    [
        ("NVIDIA H100 80GB HBM3", "NVLink", True),
        ("H100 SXM", "NVLink", True),
        ("NVIDIA H100 PCIe", "NVLink", False),
        ("NVIDIA H100 NVL", "NVLink", False),
        ("NVIDIA H100 PCIe", "PCIe", True),
        ("NVIDIA H100 80GB HBM3", "PCIe", False),
        ("NVIDIA GH100", "NVLink", False),
        ("NVIDIA H1000", "NVLink", False),
        ("NVIDIA A100-SXM4-80GB", "NVLink", False),
        ("", "NVLink", False),
    ],
)
def test_gpus_are_told_by_model_and_form(gpu: str, link: str, alike: bool) -> None:
    comparison = compared(measured(lambda _: 400, gpu=gpu), [system("a", 400, link=link)])
    assert bool(comparison.rows) == alike
    if not alike:
        assert comparison.exit_code == EXIT_NOTHING and "no verdict on" in comparison.notes[0]
        assert "--system NAME compares with another: a" in comparison.notes[0]


def test_kinds_are_told_by_ranks_and_hosts() -> None:
    for ranks, hosts, names in (
        (8, 1, {"8xH100-AWS-p5", "8xH100-HBM3"}),
        (16, 2, {"2x8-H100-AWS-p5", "2x8-H100-GCP-A3-Mega"}),
        (16, 1, set()),
    ):
        comparison = compared(table(ranks=ranks, hosts=hosts), list(reference.read_systems()))
        assert {system.name for system in comparison.systems} == names
    small = compared(table(sizes=SIZES[:7]), SOURCES)
    assert small.exit_code == EXIT_INCONCLUSIVE and small.rows and "no size from 64 MiB" in small.notes[0]
    params = {"mesh_dim": "tp", "ranks": 2, "groups": "alone", "mode": "isolated", "dtype": "float32"}
    result = made_up.result("collectives", "all_reduce", "c10d", params, [1e-3], size_bytes=2**20, factor=1.0)
    comparison = reference.compare_with_reference(made_up.run([result]), reference.read_systems())
    assert comparison.exit_code == EXIT_NOTHING
    assert "dim tp: no public measurements of 2 ranks on 1 host(s) with cpu;" in comparison.notes[0]


def test_no_public_system_is_low_beside_the_others_of_its_kind() -> None:
    """LOW and MIN_SIZE are chosen for this. Across hosts, systems with other networks cannot be judged."""
    systems = list(public_systems())
    seen = set()
    for mine in systems:
        rows = [
            ReferenceRow(
                other.name, "world", name, "float32", size, ours, theirs, ours / theirs, other.varies
            )
            for other in systems
            if other is not mine and (other.kind, other.hosts) == (mine.kind, mine.hosts)
            for name, published in mine.collectives.items()
            for size, _ in published.points
            if size >= MIN_SIZE and (theirs := other.busbw(name, size)) and (ours := mine.busbw(name, size))
        ]
        seen |= {(mine.hosts > 1, verdict.verdict) for verdict in verdicts_of(rows, mine.kind, False)}
    assert seen == {
        (False, "as public measurements"),
        (True, "cannot tell"),
        (True, "above public measurements"),
    }


@pytest.mark.parametrize("args", ["run.jsonl", "--reference run.jsonl other.jsonl", "a b --system x"])
def test_compare_takes_two_runs_or_one_and_the_reference(dtbench: Cli, args: str) -> None:
    code, _, err = dtbench("compare", *args.split())
    assert code == EXIT_USAGE and ("give BASE and HEAD" in err or "--system requires --reference" in err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "is not a reference table .* not JSON"),
        ("[]", "is not a reference table .* expected a JSON object"),
        ('{"kind": "reference", "schema": 2}', "is damaged: schema: invalid enum value 2"),
        ('{"kind": "reference", "schema": 1, "systems": [{}]}', r"systems\[0\]: object missing .* name"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "systems.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnreadableRunError, match=message):
        reference.read_systems(path)


@pytest.mark.parametrize("system", [None, "8xH100-AWS-p5"])
def test_log_that_a_reference_was_taken_from_is_1_00_of_it(dtbench: Cli, system: str | None) -> None:
    """Also where other sources of the kind are in the median, which a note says."""
    us = dict(
        next(s for s in reference.read_systems() if s.name == "8xH100-AWS-p5")
        .collectives["all_reduce"]
        .points
    )
    write_run("run.jsonl", dtbench, sizes=list(us), time=lambda size, _: us[size])
    code, out, _ = dtbench("compare", "--reference", "run.jsonl", *(("--system", system) if system else ()))
    note = "! the run has the same times as were published for 8xH100-AWS-p5 (ratio 1.00 at every size)"
    assert code == EXIT_OK and sum(line.startswith(note) for line in out.splitlines()) == 1
    assert out.startswith("as public measurements: 1.00 of 8xH100-AWS-p5" if system else "as public")
    us[2**30] *= 1.01
    write_run("other.jsonl", dtbench, sizes=list(us), time=lambda size, _: us[size])
    assert "the same times as were published" not in dtbench("compare", "--reference", "other.jsonl")[1]
