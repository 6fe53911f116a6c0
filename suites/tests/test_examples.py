"""The example programs, started as their users start them. Each program checks its own results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtbench.tests.programs import start_fresh
from dtbench_suites.examples import (
    bucketed_gradients,
    placements,
    sharded_tables,
    tensor_parallel,
    wait_on_use,
)

LAUNCHED = {
    m.__name__.rpartition(".")[2]: m
    for m in (sharded_tables, tensor_parallel, bucketed_gradients, wait_on_use)
}
# All programs share a launch, because starting four ranks takes longer than any of them.
TOGETHER = f"""
import importlib
from dtbench_suites.examples.launched import launched

with launched("together", 4):
    for name in {list(LAUNCHED)}:
        importlib.import_module("dtbench_suites.examples." + name).main()
"""


def test_launched_examples_on_four_ranks(tmp_path: Path) -> None:
    driver = tmp_path / "together.py"
    driver.write_text(TOGETHER)
    done = start_fresh(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(driver))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(": right")] == [
        *(f"{name}: right" for name in (*sharded_tables.SHARDINGS, sharded_tables.TABLE_WISE)),
        *(f"{name}: right" for name in list(LAUNCHED)[1:]),
    ]
    drawn = lines[lines.index("row-wise-uneven") : lines.index("row-wise-uneven: right")]
    assert [line.split()[0] for line in drawn[4:8]] == ["0:1", "1:4", "4:5", "5:8"]
    assert {line for line in lines if "table-wise: table" in line} == {
        f"table-wise: table {k}" for k in range(4)
    }


def test_placements_example_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    placements.main()
    assert capsys.readouterr().out.endswith("placements: right\n")
