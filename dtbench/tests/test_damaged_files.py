"""Every reader of files on damaged ones: cut, with bits flipped, parts repeated, values of another type or sign.

A reader returns finite, non-negative times or raises one of the project's own errors. It raises no other exception,
ends, and uses little memory. hypothesis draws the random seeds: the fast tier tries a few, the slow one hundreds, and
`DTBENCH_DAMAGED=5000` as many as it says.
"""

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtbench.comparison.references import TABLE, read_systems
from dtbench.comparison.topology_comparison import compare_topologies
from dtbench.cost.plan.machines import find_machine
from dtbench.cost.plan.measured_steps import read_steps, read_table
from dtbench.cost.plan.training import find_model
from dtbench.errors import DtbenchError
from dtbench.importers import checks
from dtbench.importers.convert import to_run
from dtbench.importers.import_logs import parse
from dtbench.records.gate import read_history
from dtbench.records.job import Job
from dtbench.records.read import convert
from dtbench.records.run import RunWriter, read_run
from dtbench.records.topology import read_topology
from dtbench.reporting.html.sources import gather
from dtbench.tests import made_up, made_up_inspector, made_up_logs
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_traces import of_all_kinds
from dtbench.traces.inspector import read_logs
from dtbench.traces.job import read_job

EXAMPLES = (8, int(os.environ.get("DTBENCH_DAMAGED", "400")))
RESULTS = Path(__file__).parents[2] / "results"
TOPOLOGY = read_topology(RESULTS / "baseline-cpu-gloo-4ranks.topology.json")


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Returns the bytes cut, with bits flipped, with a part repeated, or with a value of another type."""
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    values = [b"null", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"true", b"9" * 40, b"\xff\x00"]
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 3]) + data[at + 3 :]
        case 2:
            return data[:end] + data[at:end] + data[end:]
    colons = [n for n, byte in enumerate(data[:20_000]) if byte == ord(":")]
    start = rng.choice(colons or [at]) + 1
    ends = [n for n in (data.find(c, start) for c in (b",", b"}")) if n >= 0]
    return data[:start] + rng.choice(values) + data[min(ends, default=start) :]


def run_file() -> bytes:
    results = [
        *islice(made_up.collectives(samples=3), 2),
        *islice(made_up.dispatch(), 1),
        *made_up.NOT_OK[:1],
    ]
    return msgspec.json.Encoder().encode_lines([made_up.header(), *results])


def imported(path: Path) -> Any:
    log = parse(path.read_bytes(), path.name)
    checks.check(log)
    return to_run([log], argv=["import"])


def named(suffix: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Returns a reader that first renames its file: some readers choose the format by the suffix."""
    return lambda path: read(path.replace(path.with_suffix(suffix)))


def committed(name: str) -> Callable[[], bytes]:
    return (RESULTS / name).read_bytes


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}

# Reader -> a sound file of its kind, and what reads it.
READERS: dict[str, tuple[Callable[[], bytes], Callable[[Path], Any]]] = {
    "run": (run_file, read_run),
    "topology": (committed("baseline-cpu-gloo-4ranks.topology.json"), read_topology),
    "compared topology": (
        committed("baseline-cpu-gloo-4ranks.topology.json"),
        lambda path: compare_topologies(TOPOLOGY, read_topology(path)),
    ),
    "gate": (committed("gate/same.json"), lambda path: gather([path])),
    "profile of calls": (committed("profile/add/table.json"), lambda path: gather([path])),
    "profile of ranks": (committed("profile/mlp/table.json"), lambda path: gather([path])),
    # The job read from a trace can also be written and read again.
    "a job's trace": (of_all_kinds, lambda path: convert(msgspec.to_builtins(read_job([path])), Job)),
    "inspector log": (
        made_up_inspector.of_all_kinds,
        lambda path: convert(msgspec.to_builtins(read_logs([path])), Job),
    ),
    "history": (committed("history/intel-r-xeon-r-processor-2c-dee4835e.jsonl"), read_history),
    "resumed run": (run_file, lambda path: RunWriter.resume(path, {}).close()),
    "measured steps": (
        committed("reference/step-times/a100-64-gpus.csv"),
        lambda path: read_steps(read_table(path), find_machine("a100-8x")),
    ),
    "machine": (
        lambda: msgspec.json.encode(find_machine("a100-8x")),
        named(".json", lambda path: find_machine(str(path))),
    ),
    "model config": (
        lambda: json.dumps(LLAMA).encode(),
        named(".json", lambda path: find_model(str(path))),
    ),
    "reference systems": (TABLE.read_bytes, read_systems),
    "nccl-tests text": (
        lambda: made_up_logs.table().encode(),
        imported,
    ),
    "nccl-tests JSON": (lambda: made_up_logs.json_text().encode(), imported),
    "DeepSpeed": (
        lambda: (made_up_logs.DEEPSPEED.format(name="all_reduce") + made_up_logs.DEEPSPEED_ROW).encode(),
        imported,
    ),
    "OSU": (
        lambda: made_up_logs.OSU.format(program="allreduce", title="Allreduce").encode(),
        imported,
    ),
    "ml-engineering": (lambda: made_up_logs.ML_ENGINEERING.encode(), imported),
}


def numbers_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yields all numbers of plain Python objects, with the name of their field."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers_in(item, key if isinstance(key, str) and not key.isdecimal() else name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item, name)
    elif isinstance(value, float):
        yield name, value


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_read_or_refused(kind: str, examples: int, tmp_path: Path, bounded: None) -> None:
    make_sound, read = READERS[kind]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
    @example(seed=0, times=0)
    def read_damaged(seed: int, times: int) -> None:
        rng, data, path = random.Random(seed), make_sound(), tmp_path / "file.jsonl"
        for _ in range(times):
            data = damaged(rng, data)
        path.write_bytes(data)
        try:
            result = read(path)
        except DtbenchError as error:
            assert times, f"the sound file is refused: {error}"
            assert "\n" not in str(error) and "\x1b" not in str(error)
            return
        for name, value in numbers_in(msgspec.to_builtins(result, str_keys=True, enc_hook=str)):
            signed = name == "clock_offset_s" or not name.endswith(("_s", "samples", "Bps", "_us"))
            assert math.isfinite(value) and (value >= 0 or signed), (name, value)

    read_damaged()


@pytest.mark.parametrize("shape", [[2, 2**53 + 1], [2**63 - 1] * 2], ids=str)
def test_mesh_of_too_many_ranks_is_refused(dtbench: Cli, shape: list[int]) -> None:
    made_up.write(Path("r.jsonl"), made_up.run(list(made_up.collectives(samples=5))))
    header, rest = Path("r.jsonl").read_text().split("\n", 1)
    Path("f.jsonl").write_text(re.sub(r'"shape": ?\[[^]]*\]', f'"shape":{shape}', header) + "\n" + rest)
    for words in ("report f.jsonl -o p.html", "calibrate f.jsonl -o t.json"):
        code, _, err = dtbench(*words.split())
        assert (code, err.count("\n")) == (2, 1) and "shape has more ranks than the maximum of 1048576" in err
