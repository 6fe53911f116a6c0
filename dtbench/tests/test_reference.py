"""`dtbench compare --reference`: runs beside the table of public systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtbench.comparison import references as reference
from dtbench.importers import convert
from dtbench.suite import Run
from dtbench.suite.errors import EXIT_NOTHING, EXIT_OK, EXIT_USAGE, UnreadableRunError
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import SIZES, read, table, time_us


def test_the_table_of_public_systems_is_sound() -> None:
    systems = reference.read_systems()
    assert len({s.name for s in systems}) == len(systems) >= 30
    kinds = {(system.gpu, system.ranks) for system in systems}
    assert {("A100", 8), ("H100", 8), ("H200", 8), ("B200", 8), ("GB200", 72), ("MI300X", 8)} <= kinds
    for system in systems:
        for name, published in system.collectives.items():
            assert published.source and len(published.points) >= 2, (system.name, name)
            for size, _ in published.points:
                busbw = system.busbw(name, size)
                assert busbw is not None and 1e5 < busbw < 1e12, (system.name, name, size)
    # A figure of a source, by hand: 8 GiB in 31294 us, seven quarters of it on the bus.
    p5 = next(s for s in systems if s.name == "8xH100-AWS-p5")
    assert p5.busbw("all_reduce", 2**33) == pytest.approx(2**33 / 31294e-6 * 1.75)
    between = p5.busbw("all_reduce", 3 * 2**31)
    assert between is not None and 4.7e11 < between < 4.85e11
    assert p5.busbw("all_reduce", 512) is None and p5.busbw("all_gather", 2**30) is None
    b200 = next(s for s in systems if s.name == "8xB200")  # two sizes, far apart: nothing between them
    assert b200.busbw("all_reduce", 1024) and b200.busbw("all_reduce", 2**20) is None


def test_a_run_beside_its_kind(dtbench: Cli) -> None:
    Path("x.log").write_text(table(sizes=(*SIZES, 2**30)))
    dtbench("import", "x.log", "-o", "run.jsonl")
    code, out, _ = dtbench("compare", "--reference", "run.jsonl")
    assert code == EXIT_OK and "8xH100-AWS-p5 (NVLink)" in out and "A100" not in out
    code, out, _ = dtbench("compare", "--reference", "run.jsonl", "--system", "8xA100-SXM4-40GB", "--json")
    content = json.loads(out)
    row = next(r for r in content["rows"] if r["size_bytes"] == 2**30)
    mine = 2**30 / (time_us(2**30, True) * 1e-6) * 1.75
    assert row["run_Bps"] == pytest.approx(mine, rel=1e-3)
    assert row["reference_Bps"] == pytest.approx(2**30 / 8176.5e-6 * 1.75, rel=1e-3)
    assert row["ratio"] == pytest.approx(mine / row["reference_Bps"])
    assert {s["name"] for s in content["systems"]} == {"8xA100-SXM4-40GB"}
    code, _, err = dtbench("compare", "--reference", "run.jsonl", "--system", "nosuch")
    assert code == EXIT_USAGE and "no public system is called 'nosuch'" in err
    Path("y.log").write_text(table(ranks=5))
    dtbench("import", "y.log", "-o", "five.jsonl")
    code, out, _ = dtbench("compare", "--reference", "five.jsonl")
    assert code == EXIT_NOTHING and "no public figures of 5 ranks on 1 host(s) of NVIDIA H100" in out


def test_kinds_are_told_by_gpu_ranks_and_hosts() -> None:
    def names(**changes: object) -> set[str]:
        text = table(**changes).replace("NVIDIA H100", str(changes.pop("gpu", "NVIDIA H100")))  # type: ignore[arg-type]
        header, results = convert.to_run([read(text)], [])
        run = Run(Path("x"), header, tuple(results), True)
        comparison = reference.compare_with_reference(run, reference.read_systems())
        return {system.name for system in comparison.systems}

    assert names() == {"8xH100-AWS-p5", "8xH100-HBM3"}
    assert names(ranks=16, hosts=2) == {"2x8-H100-AWS-p5", "2x8-H100-GCP-A3-Mega"}
    assert names(ranks=16) == set()
    params = {"mesh_dim": "tp", "ranks": 2, "groups": "alone", "mode": "isolated", "dtype": "float32"}
    result = made_up.result("collectives", "all_reduce", "c10d", params, [1e-3], size_bytes=2**20, factor=1.0)
    comparison = reference.compare_with_reference(made_up.run([result]), reference.read_systems())
    assert comparison.exit_code == EXIT_NOTHING and "of cpu (dim tp)" in comparison.notes[0]


@pytest.mark.parametrize("args", ["run.jsonl", "--reference run.jsonl other.jsonl", "a b --system x"])
def test_compare_takes_two_runs_or_one_and_the_reference(dtbench: Cli, args: str) -> None:
    code, _, err = dtbench("compare", *args.split())
    assert code == EXIT_USAGE and ("give BASE and NEW" in err or "--system goes with --reference" in err)


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
