"""The compile suite on two ranks: results are correct, graphs and collectives are counted."""

from __future__ import annotations

from pathlib import Path

from dtbench.records.run import read_run
from dtbench.tests.programs import start

CASES = "\n".join(
    f"compile {name} mesh_dim=tp backend=aot_eager pass=forward call={call}"
    for name in ("add", "redistribute")
    for call in ("cached", "recompiled")
)


def test_compiled_calls_of_every_implementation(tmp_path: Path) -> None:
    output = tmp_path / "x.jsonl"
    words = ("--quick", "--nproc", "2", "--device", "cpu", "--filter", CASES, "-o", str(output))
    done = start("run", "compile", *words)
    assert done.returncode == 0, done.stderr
    results = read_run(output).results
    assert [(r.name, r.impl, r.reason) for r in results if r.status != "ok"] == []
    assert {(r.name, r.params["call"], r.impl) for r in results} == {
        (name, call, impl)
        for name in ("add", "redistribute")
        for call in ("cached", "recompiled")
        for impl in ("core", "torch", "local")
    }
    for result in results:
        moves = result.name == "redistribute" and result.impl != "local"
        assert (result.counters["graph_breaks"], result.counters["graphs"]) == (0, 1), result
        assert result.counters["collectives"] == moves, result
