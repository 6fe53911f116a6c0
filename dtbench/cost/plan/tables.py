"""Rows of a table of measured steps as jobs and layouts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from msgspec import structs

from dtbench.cost.plan.columns import BYTES, TIMES, UNUSED
from dtbench.cost.plan.csv_table import Table, all_reduces, read_table
from dtbench.cost.plan.job import PLAIN, RECOMPUTE, Job, Layout, Recompute, Software
from dtbench.cost.plan.machines import Machine, machine_called
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.models import Model, model_called
from dtbench.cost.plan.search import RESERVED_BYTES
from dtbench.cost.plan.step import model_flops
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by

__all__ = ["Measured", "Steps", "Table", "all_reduces", "gpt", "measured_steps", "read_steps", "read_table"]

# GPT-2's 50,257 tokens, padded as Megatron-LM pads them for 8 tensor-parallel ranks: a multiple of 128 x 8.
GPT_VOCAB = 51200
SEQUENCE = 4096
# Of a larger share of rows that contradict themselves the columns are misread.
MOST_WRONG = 0.1
FP8_PEAK = 2  # times that of bfloat16
# What is predicted to need more than so many times the memory there is was computed again.
NOT_SURE = 1.3
# A model of a name has as many parameters as the table says, up to this share: positions may be counted.
PARAMETERS_OFF = 0.15
_SAID = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_FLAGS = {"sequence parallel": "sequence_parallel", "flash attention": "flash", "overlap": "overlap"}
_PRECISIONS = {"bf16": "bf16", "fp16": "bf16", "bfloat16": "bf16", "float16": "bf16", "half": "bf16"}
# Columns that Megatron-DeepSpeed of 2022 had no word for: attention is then taken to be flash, and what lies between
# the blocks to be cut over the tensor-parallel ranks.
_MODERN = {
    *("model", "kv heads", "ffn", "gated", "fsdp", "replicas", "zero", "precision", "context parallel"),
    *("expert parallel", "experts"),
}
_LLAMA = {"ffn", "kv heads"}  # columns of models with gated MLPs and an embedding apart from the head
_SHARDED = {"full_shard": "full", "hybrid_shard": "node", "shard_grad_op": "zero2", "no_shard": "none"}


@dataclass(frozen=True)
class Measured:
    """A row of a table. memory: bytes of one GPU, 0 where not measured."""

    job: Job
    layout: Layout
    time_s: float
    memory: float = 0.0


class InexpressibleError(Exception):
    """A row that the model has no words for; the message says why."""


class _ContradictionError(Exception):
    """A row that no run can have been."""


@dataclass(frozen=True)
class Steps:
    """measured: rows as jobs and layouts. lines: of the file, of each. left_out: reason -> lines. notes: what was
    assumed."""

    measured: list[Measured]
    lines: list[int]
    left_out: dict[str, list[int]]
    notes: tuple[str, ...]


def read_steps(table: Table, machine: Machine, sequence: int = SEQUENCE) -> Steps:
    """Rows as jobs and layouts. Where the table does not say what is computed again: nothing if every layout of a
    model on as many GPUs fits into memory so, else everything, as one script trained them all.

    sequence: tokens of a sequence, where the table does not say.

    Raises:
        UsageError: a value that cannot be; the line is named. Or no row is left.
    """
    if table.is_all_reduce:
        raise UsageError(f"{table.path} is a table of all-reduces, expected one of measured steps")
    rows = _Rows(table, machine, sequence)
    read: list[tuple[int, Measured]] = []
    left_out: defaultdict[str, list[int]] = defaultdict(list)
    wrong: list[tuple[int, UsageError]] = []
    for line, cells in table.lines:
        try:
            read.append((line, rows.measured(line, cells)))
        except InexpressibleError as error:
            left_out[str(error)].append(line)
        except _ContradictionError as error:
            wrong.append((line, table.wrong(line, str(error))))
            left_out[str(error)].append(line)
    if wrong and len(wrong) > MOST_WRONG * len(table.lines):
        raise wrong[0][1]
    if not read:
        why, lines = max(left_out.items(), key=lambda found: len(found[1]))
        raise UsageError(f"{table.path}: no row can be predicted; {len(lines)}: line {lines[0]}: {why}")
    measured = [one for _, one in read]
    if "recomputation" not in table.at and "selective recomputation" not in table.at:
        _assume_recomputation(measured, machine)
    return Steps(measured, [line for line, _ in read], dict(left_out), tuple(rows.notes(measured)))


def measured_steps(table: Table, machine: Machine) -> list[Measured]:
    """As `read_steps`, the rows alone."""
    return read_steps(table, machine).measured


def _assume_recomputation(measured: list[Measured], machine: Machine) -> None:
    limit = NOT_SURE * (machine.memory_GiB * 2**30 - RESERVED_BYTES)
    for group in group_by(
        enumerate(measured), lambda found: (found[1].job.model.name, found[1].job.gpus)
    ).values():
        again = [(at, replace(one.layout, recompute="full")) for at, one in group]
        known = [(one, layout) for (_, one), (_, layout) in zip(group, again, strict=True) if one.memory]
        if known:  # measured memory tells
            off = [
                median(
                    abs(memory_of(one.job, how, machine.fitted).total / one.memory - 1) for one, how in pairs
                )
                for pairs in ([(one, one.layout) for one, _ in known], known)
            ]
            needed = off[1] < off[0]
        else:
            needed = any(memory_of(one.job, one.layout, machine.fitted).total > limit for _, one in group)
        if needed:
            for at, layout in again:
                measured[at] = replace(measured[at], layout=layout)


class _Rows:
    """How the rows of one table are read."""

    def __init__(self, table: Table, machine: Machine, sequence: int) -> None:
        self.table, self.machine, self.sequence = table, machine, sequence
        self.time = next(name for name in TIMES if name in table.at)
        modern = any(name in table.at for name in _MODERN)
        overlap = "fsdp" in table.at or machine.fitted.overlaps
        self.software = Software(overlap=overlap) if modern else PLAIN
        # A column of nothing but 0 and 1 says whether, not over how many.
        self.fsdp_flag = {table.text(cells, "fsdp").lower() for _, cells in table.lines} <= {*_SAID, ""}
        self.mfu_percent = any(
            (table.text(cells, "mfu") or "0").rstrip("%").replace(".", "", 1).isdigit()
            and float(table.text(cells, "mfu").rstrip("%") or 0) > 1
            for _, cells in table.lines
        )

    def notes(self, measured: Sequence[Measured]) -> list[str]:
        """What the table does not say."""
        table, at = self.table, self.table.at
        found = sorted({f"recomputation: {one.layout.recompute}" for one in measured})
        assumed = {
            f"sequence length {self.sequence}": "sequence length" not in at,
            "tensor parallel 1": "tensor parallel" not in at,
            "pipeline parallel 1": "pipeline parallel" not in at,
            f"flash attention {'yes' if self.software.flash else 'no'}": "flash attention" not in at,
            f"sequence parallel {'yes' if self.software.sequence_parallel else 'no'}": "sequence parallel"
            not in at,
            f"sharded optimizer {'yes' if self.software.zero else 'no'}": not {"zero", "sharded optimizer"}
            & {*at},
            f"overlap {'yes' if self.software.overlap else 'no'}": "overlap" not in at,
            "gated yes": {*at} >= _LLAMA and "gated" not in at,
            "gated models have no tied embeddings": "tied embeddings" not in at
            and ("gated" in at or {*at} >= _LLAMA),
        }
        if any(assumed.values()):
            found.append(
                "not in the table, assumed: " + ", ".join(what for what, is_so in assumed.items() if is_so)
            )
        fast = sum(
            model_flops(one.job) / one.job.gpus / one.time_s
            > (FP8_PEAK if one.job.software.precision == "fp8" else 1) * self.machine.peak_tflops * 1e12
            for one in measured
        )
        if fast:
            found.append(
                f"{fast} of {len(measured)} rows are faster than {self.machine.name} can be: another --machine?"
            )
        sources = {one.job.model.name: one.job.model.source for one in measured if "model" in at}
        found += [
            f"{name}: {source}" for name, source in sorted(sources.items()) if source and "layers" not in at
        ]
        unused = [name for name in (*TIMES, *UNUSED) if name in at and name != self.time]
        if unused:
            found.append(f"the time is that of {self.time}; not used: {', '.join(unused)}")
        if table.ignored:
            found.append(f"ignored: {', '.join(table.ignored)}")
        return found

    def measured(self, line: int, cells: Sequence[str]) -> Measured:
        table = self.table
        if not table.text(cells, self.time) and self.time != "iteration time":
            raise InexpressibleError("no time was measured")
        self._refuse(cells)
        model = self._model(line, cells)
        tp, pp, cp = (
            table.count(line, cells, f"{kind} parallel", 1) for kind in ("tensor", "pipeline", "context")
        )
        gpus = table.count(line, cells, "gpus", 0) or (
            int(table.number(line, cells, "nodes")) * self.machine.gpus_per_node
        )
        dp = self._data_parallel(line, cells, max(1, gpus // (tp * pp * cp)), cp)
        batch = int(table.number(line, cells, "global batch"))
        software = self._software(line, cells)
        layout = Layout(
            tp,
            pp,
            dp,
            self._fsdp(line, cells, dp * cp, software),
            self._micro_batch(line, cells, batch, dp),
            table.count(line, cells, "interleaved chunks", 1),
            self._recompute(line, cells),
            cp,
            table.count(line, cells, "expert parallel", 1),
        )
        _check(gpus, batch, model, layout)
        sequence = table.count(line, cells, "sequence length", self.sequence)
        if sequence % cp:
            raise _ContradictionError(
                f"the sequence of {sequence} tokens is no multiple of context parallelism {cp}"
            )
        job = Job(model, gpus, batch, sequence, software)
        memory = 0.0
        if table.text(cells, "memory"):
            unit = table.units["memory"]
            if unit not in BYTES:
                raise UsageError(
                    f"{table.path}: the unit of memory is {ascii(unit)[:20]}, expected GiB or GB"
                )
            memory = table.number(line, cells, "memory", whole=False) * BYTES[unit or "gib"]
        return Measured(job, layout, self._seconds(line, cells, job), memory)

    def _seconds(self, line: int, cells: Sequence[str], job: Job) -> float:
        table = self.table
        if self.time == "iteration time":
            return table.seconds(line, cells, self.time)
        text = table.text(cells, self.time)
        if self.time == "mfu" and text.endswith("%"):
            value = float(text[:-1])
        else:
            if text.replace(".", "", 1).strip("0") == "":
                raise InexpressibleError(f"{self.time} is 0: rounded away")
            value = table.number(line, cells, self.time, whole=False)
        if self.time == "sequences/s":
            return job.batch / value
        if self.time in ("tokens/s", "tokens/s/gpu"):
            return job.batch * job.sequence / value / (1 if self.time == "tokens/s" else job.gpus)
        flops = value * (1e12 if value < 1e9 else 1)  # llm-foundry's are no tera
        if self.time == "mfu":
            peak = self.machine.peak_tflops * 1e12
            flops = value * (0.01 if self.mfu_percent else 1) * peak
        return model_flops(job) / flops / job.gpus

    def _refuse(self, cells: Sequence[str]) -> None:
        """Rows of which the model holds nothing like."""
        table = self.table
        if _SAID.get(table.text(cells, "cpu offload").lower(), False):
            raise InexpressibleError("offloading to the CPU is not in the model")
        if "lora" in table.text(cells, "training").lower():
            raise InexpressibleError("training of low-rank adapters is not in the model")
        if "precision" in table.at and not table.text(cells, "precision"):
            raise InexpressibleError("the precision is not said")
        system = table.text(cells, "system")
        name = machine_called(system) if system else None
        if name is not None and not self.machine.name.startswith(name):
            raise InexpressibleError(f"{system} is not {self.machine.name}")

    def _model(self, line: int, cells: Sequence[str]) -> Model:
        table, at = self.table, self.table.at
        known = None
        if name := table.text(cells, "model"):
            known = model_called(name)
            if known is None and "layers" not in at:
                raise InexpressibleError(
                    f"the model {name[:40]} is not known: give hidden, layers, attention heads, ffn"
                )
            if isinstance(known, str) and "layers" not in at:
                raise InexpressibleError(f"{name[:40]}: {known}")
            if isinstance(known, Model) and table.text(cells, "parameters") and "layers" not in at:
                said = table.number(line, cells, "parameters", whole=False)
                said *= 1e9 if said < 1e6 else 1
                if abs(known.elements() / said - 1) > PARAMETERS_OFF:
                    raise InexpressibleError(
                        f"{name[:40]} has {known.elements():.3g} parameters, not {said:.3g}"
                    )
        if not isinstance(known, Model) or "layers" in at:
            hidden, layers, heads = (
                int(table.number(line, cells, n)) for n in ("hidden", "layers", "attention heads")
            )
            known = gpt(hidden, layers, heads, table.count(line, cells, "vocabulary", GPT_VOCAB))
        changes = self._sizes(line, cells)
        if known.source == "" and at.keys() >= _LLAMA:
            changes = {"gated": True} | changes
        if known.source == "" and changes.get("gated"):
            changes = {"tied": False} | changes
        if not changes:
            return known
        model = structs.replace(known, **changes)
        if model.heads % model.kv_heads:
            raise _ContradictionError(
                f"the attention heads {model.heads} are no multiple of the kv heads {model.kv_heads}"
            )
        return structs.replace(
            model, name=f"{model.elements() / 1e9:.3g} B ({model.layers} x {model.hidden})"
        )

    def _sizes(self, line: int, cells: Sequence[str]) -> dict[str, int | bool]:
        """Fields of the model that a column says."""
        table = self.table
        said: dict[str, int | bool] = {
            key: int(table.number(line, cells, column))
            for column, key in _SIZES.items()
            if table.text(cells, column)
        }
        for column, key in (("gated", "gated"), ("tied embeddings", "tied")):
            if table.text(cells, column):
                said[key] = self._flag(line, cells, column)
        return said

    def _flag(self, line: int, cells: Sequence[str], column: str) -> bool:
        text = self.table.text(cells, column).lower()
        if text not in _SAID:
            raise self.table.wrong(line, f"got {ascii(text)[:40]}, expected yes or no")
        return _SAID[text]

    def _data_parallel(self, line: int, cells: Sequence[str], left: int, cp: int) -> int:
        """Ranks that see different sequences; `left` where no column says."""
        table = self.table
        if table.text(cells, "replicas"):  # torchtitan: replicas x shards, the shards over dp and cp
            shards = int(table.number(line, cells, "fsdp")) if table.text(cells, "fsdp") else 1
            return int(table.number(line, cells, "replicas")) * max(1, shards)
        if "data parallel" in table.at:
            return int(table.number(line, cells, "data parallel"))
        return left

    def _micro_batch(self, line: int, cells: Sequence[str], batch: int, dp: int) -> int:
        table = self.table
        steps = table.count(line, cells, "gradient accumulation", 0)
        if not table.text(cells, "micro batch"):
            if not steps or batch % (dp * steps):
                raise InexpressibleError(
                    f"no micro batch: {batch} sequences over {dp} ranks and {steps} steps"
                )
            return batch // (dp * steps)
        micro = int(table.number(line, cells, "micro batch"))
        if steps and micro * steps * dp != batch:
            raise InexpressibleError(
                "micro batch x gradient accumulation x data parallel is not the global batch"
            )
        return micro

    def _software(self, line: int, cells: Sequence[str]) -> Software:
        table, software = self.table, self.software
        for column, name in _FLAGS.items():
            if table.text(cells, column):
                changes: dict[str, Any] = {name: self._flag(line, cells, column)}
                software = replace(software, **changes)
        if table.text(cells, "sharded optimizer"):
            software = replace(software, zero=int(self._flag(line, cells, "sharded optimizer")))
        if zero := table.text(cells, "zero"):
            if zero not in ("0", "1", "2", "3"):
                raise table.wrong(line, f"zero is {ascii(zero)[:20]}, expected 0 to 3")
            software = replace(software, zero=int(zero))
        if text := table.text(cells, "precision").lower():
            words = re.sub(r"[^a-z0-9]", " ", text.partition("(")[0]).split()
            if any(word in ("fp8", "mxfp8", "float8") for word in words):
                return replace(software, precision="fp8")
            if not any(word in _PRECISIONS for word in words):
                raise InexpressibleError(f"the precision {text[:20]}: expected bf16, fp16 or fp8")
        return software

    def _fsdp(self, line: int, cells: Sequence[str], copies: int, software: Software) -> int:
        """Ranks that share one copy of the weights."""
        table = self.table
        text = table.text(cells, "fsdp").lower()
        if software.zero == 3:
            return copies
        if not text or text == "0":
            return 1
        kind = _SHARDED.get(text, "full" if self.fsdp_flag and _SAID.get(text) else "")
        if kind == "zero2":
            raise InexpressibleError("weights that stay gathered (SHARD_GRAD_OP): give zero 2")
        if kind:
            return {"full": copies, "node": min(copies, self.machine.gpus_per_node)}.get(kind, 1)
        if text in _SAID and not text.isdigit():
            return 1
        shards = int(table.number(line, cells, "fsdp"))
        return min(
            copies, shards * (table.count(line, cells, "context parallel", 1) if shards < copies else 1)
        )

    def _recompute(self, line: int, cells: Sequence[str]) -> Recompute:
        table = self.table
        given = table.text(cells, "recomputation").lower()
        if table.text(cells, "selective recomputation") and self._flag(
            line, cells, "selective recomputation"
        ):
            return "selective"
        word = {"": "none", "op": "selective"}.get(given, given)
        if given in _SAID:
            word = "full" if _SAID[given] else "none"
        found = next((one for one in RECOMPUTE if one == word), None)
        if found is None:
            raise table.wrong(
                line, f"recomputation is {ascii(given)[:40]}, expected one of {', '.join(RECOMPUTE)}"
            )
        return found


_SIZES = {
    "vocabulary": "vocab",
    "kv heads": "kv_heads",
    "head dim": "head_dim",
    "ffn": "ffn",
    "experts": "experts",
    "top k": "experts_per_token",
}


def _check(gpus: int, batch: int, model: Model, layout: Layout) -> None:
    """What no run can have been."""
    stages = layout.pp * layout.chunks
    samples = layout.dp * layout.micro_batch
    if batch % samples:  # llm-foundry's last micro batch may be smaller
        raise InexpressibleError(
            f"the global batch {batch} is no multiple of data parallelism x micro batch = {samples}"
        )
    parallel = "tensor x data x pipeline parallelism" + (" x context parallelism" if layout.cp > 1 else "")
    wrong = {
        f"{parallel} is {layout.ranks}, expected the {gpus} GPUs": layout.ranks != gpus,
        f"the hidden size {model.hidden} is no multiple of the attention heads {model.heads}": (
            not model.source and model.hidden % model.heads and model.head_dim * model.heads != model.hidden
        ),
        f"tensor parallelism is {layout.tp}, expected at most the {model.heads} attention heads": (
            layout.tp > model.heads
        ),
        f"pipeline parallelism x chunks is {stages}, expected at most the {model.layers} layers": (
            stages > model.layers + 2
        ),
        f"expert parallelism is {layout.ep}, expected at most the {model.experts} experts": (
            layout.ep > max(1, model.experts)
        ),
        f"top k is {model.experts_per_token}, expected at most the {model.experts} experts": (
            model.experts_per_token > model.experts
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise _ContradictionError(what)


def gpt(hidden: int, layers: int, heads: int, vocab: int) -> Model:
    """A model of GPT's kind: an MLP of four times the width, embedding and head one matrix."""
    model = Model(
        "", hidden, layers, heads, heads, max(1, hidden // heads), 4 * hidden, vocab, gated=False, tied=True
    )
    return structs.replace(model, name=f"GPT {model.elements() / 1e9:.3g} B ({layers} x {hidden})")
