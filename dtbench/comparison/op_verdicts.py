"""Verdicts on ops: sums them up, spells tables, finds what became worse. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dtbench.records.verdicts import (
    NOT_JUDGED,
    NOTHING,
    PROGRAMS,
    SUITE,
    VERDICTS,
    Baseline,
    OpVerdict,
    verdicts_of,
)
from dtbench.suite import Run
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by, known_first
from dtbench.text import markdown as md

MODES = ("even", "uneven", "partial", "mesh2x2", "order", "strided", "from_local", "inplace", "out")
# What programs run in: as they are written, under the mode of their topic, and in these modes.
WRITTEN = "written"
VARIANTS = (WRITTEN, "order", "uneven", "strided", "from_local", "inductor")
# Of an op's samples, what may stay not judged without a word in the way of a table.
MOST_NOT_JUDGED = 0.005


def modes_of(verdicts: Sequence[OpVerdict]) -> list[str]:
    """The modes there are, in the order in which people read them: of programs, topics before variants."""
    found = {v.mode for v in verdicts}
    if all(v.suite == PROGRAMS for v in verdicts):
        return [*sorted(found.difference(VARIANTS)), *(name for name in VARIANTS if name in found)]
    return known_first(found, MODES)


def summary_rows(verdicts: Sequence[OpVerdict]) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table with a row per mode and impl: ops and cases per verdict; verdicts that no op has are
    left out. Fully pass are ops of which every case does. Not judged: samples, of all that were tried.
    """
    groups = group_by(verdicts, lambda v: (v.mode, v.impl))
    there = {v.verdict for v in verdicts}
    shown = [word for word in VERDICTS if word in there]
    counted = any(v.samples for v in verdicts)
    aside = [NOT_JUDGED] * counted
    head = [
        "mode",
        "impl",
        "ops",
        "fully pass",
        *shown,
        NOTHING,
        "cases",
        "cases pass",
        "by fallback",
        *aside,
    ]
    rows = []
    for mode, impl in sorted(groups, key=lambda key: (modes_of(verdicts).index(key[0]), key[1])):
        own = groups[mode, impl]
        ops = Counter(v.verdict for v in own)
        total = sum(sum(v.cases.values()) for v in own)
        passed = sum(v.cases.get("pass", 0) for v in own)
        tested = len(own) - ops[NOTHING]
        fully = f"{100 * ops['pass'] / tested if tested else 0:.1f}%"
        share = f"{100 * passed / total:.1f}%" if total else "-"
        fallen = str(sum(v.by_fallback for v in own)) if impl == "core" else "-"
        counts = [str(ops[word]) for word in (*shown, NOTHING)]
        aside = [f"{sum(v.not_judged for v in own)} of {sum(v.samples for v in own)}"] * counted
        rows.append([mode, impl, str(tested), fully, *counts, str(total), share, fallen, *aside])
    return head, rows


def not_judged_lines(verdicts: Sequence[OpVerdict]) -> list[str]:
    """What was not judged: the sum, then a line per op, mode and impl; nothing where all was, or nobody counted."""
    found = [v for v in verdicts if v.not_judged]
    samples = sum(v.samples for v in verdicts)
    if not found:
        return []
    count = sum(v.not_judged for v in found)
    share = f" ({count / samples:.2%})" if samples else ""
    lines = [f"{NOT_JUDGED}: {count} of {samples} samples{share}"]
    return lines + [
        f"{NOT_JUDGED}: {v.impl} {v.mode} {v.op}: {v.not_judged} of {v.samples} samples" for v in found
    ]


# ---- the committed page ----


def markdown(runs: Sequence[Run]) -> str:
    """The verdicts of the runs as a page: how they came about, sums, then one line per op."""
    verdicts = merged(runs)
    if all(v.suite == PROGRAMS for v in verdicts):
        return _page_of_programs(runs, verdicts)
    impls = _impls(verdicts)
    modes = modes_of(verdicts)
    lines = ["# Ops of torch's database on distributed tensors", "", *_origin(runs), ""]
    lines += _summary(verdicts)
    key = (
        f"Per op and mode: {' / '.join(impls)}, one word where they agree. `*`: the core ran (also) by "
        "replicating, for want of a rule. An empty cell: nothing to compare."
    )
    lines += ["", key, ""]
    cells = {(v.op, v.mode, v.impl): v for v in verdicts}
    table = []
    for op in dict.fromkeys(v.op for v in verdicts):
        row = [_cell([cells.get((op, mode, impl)) for impl in impls]) for mode in modes]
        if any(row):
            table.append([md.name(op), *row])
    lines += md.table(["op", *map(md.name, modes)], table)
    return "\n".join([*lines, *[f"\n{md.name(line)}" for line in not_judged_lines(verdicts)], ""])


def _summary(verdicts: Sequence[OpVerdict]) -> list[str]:
    head, rows = summary_rows(verdicts)
    return md.table(head, [[*map(md.name, row)] for row in rows])


def _impls(verdicts: Sequence[OpVerdict]) -> list[str]:
    return [i for i in ("core", "torch") if any(v.impl == i for v in verdicts)]


def _page_of_programs(runs: Sequence[Run], verdicts: Sequence[OpVerdict]) -> str:
    """As `markdown`: a table per topic, with what an implementation says where it does not pass."""
    impls = _impls(verdicts)
    title = ["# PyTorch's other machinery on distributed tensors", ""]
    key = (
        "Each program runs on gloo ranks, four unless a variant says otherwise, and is compared with itself on plain "
        "tensors, values and gradients. "
        "`refused`: the core's own error on every rank, or autograd's of a write that gradients could not follow. "
        "What plain tensors refuse must be refused with the same class and kind of error to pass."
    )
    lines = [*title, *_origin(runs), "", key, "", *_summary(verdicts)]
    cells = {(v.op, v.mode, v.impl): _words(v) for v in verdicts}
    for mode in modes_of(verdicts):
        names = dict.fromkeys(v.op for v in verdicts if v.mode == mode and _is_listed(v))
        rows = [[md.name(name), *(cells.get((name, mode, impl), "") for impl in impls)] for name in names]
        lines += ["", f"## {_titles.get(mode) or md.name(mode)}", "", *md.table(["program", *impls], rows)]
        lines += _left_out([v for v in verdicts if v.mode == mode])
    return "\n".join([*lines, ""])


_titles = {
    "order": "Variant order: programs that do not pass on meshes whose ranks do not ascend",
    "uneven": "Variant uneven: programs that do not pass on three ranks, whose shards are uneven or empty",
    "strided": "Variant strided: programs that do not pass with inputs whose dims lie in memory in the opposite order",
    "from_local": "Variant from_local: programs that do not pass with inputs made by from_local of tensors with gaps",
    "inductor": "Variant inductor: programs that do not pass when torch.compile compiles them whole",
}


def _is_listed(found: OpVerdict) -> bool:
    """A topic lists all its programs, a variant those that do not pass."""
    return found.mode not in VARIANTS or found.verdict not in ("pass", NOTHING)


def _left_out(verdicts: Sequence[OpVerdict]) -> list[str]:
    """A line per reason for which programs have no verdict in a variant, with their names."""
    by_reason = group_by(
        [v for v in verdicts if v.verdict == NOTHING and not _is_listed(v)], lambda v: v.reason
    )
    lines = []
    for reason, own in by_reason.items():
        names = ", ".join(md.escaped(name) for name in dict.fromkeys(v.op for v in own))
        lines += ["", f"Left out, {md.escaped(reason)}: {names}."]
    return lines


def _words(found: OpVerdict) -> str:
    """The verdict, and the first 160 characters of why."""
    why = found.reason if len(found.reason) <= 160 else f"{found.reason[:157]}..."
    return f"{found.verdict}: {md.escaped(why)}" if why and found.verdict != "pass" else found.verdict


def _origin(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        header = run.header
        plan = header.plan
        words = [
            f"--impl {','.join(map(str, plan.get('impls') or []))}",
            *["--quick"] * bool(plan.get("quick")),
        ]
        words += [f"--{name} {value}" for name, value in (plan.get("options") or {}).items()]
        suite = next((r.suite for r in run.results), SUITE)
        checkout = header.git if header.git.commit or not header.git.dtbench else header.git.dtbench
        commit = str(checkout.commit or "unknown")[:12]
        lines.append(
            md.name(
                f"Made {header.started[:10]} with torch {header.versions.get('torch')} at commit {commit}: "
            )
            + md.code(f"dtbench run {suite} {' '.join(words)}")
        )
    return list(dict.fromkeys(lines))  # of runs of other cases the same is said


def _cell(verdicts: Sequence[OpVerdict | None]) -> str:
    words = []
    for found in verdicts:
        word = NOTHING if found is None else found.verdict
        fell = found is not None and found.by_fallback
        words.append(("" if word == NOTHING else word) + ("*" if fell else ""))
    if not any(words):
        return ""
    same = len({word.rstrip("*") for word in words}) == 1
    return words[0] if same else " / ".join(word or "-" for word in words)


# ---- against a base ----


def baseline_of(run: Run) -> Baseline:
    """What a run says of the core."""
    own = [v for v in merged([run]) if v.impl == "core"]
    by_op = group_by(own, lambda v: v.op)
    skipped = group_by([v for v in own if v.not_judged], lambda v: v.op)
    return Baseline(
        torch=str(run.header.versions.get("torch")),
        options=_caps(run),
        verdicts={op: {v.mode: v.verdict for v in modes} for op, modes in by_op.items()},
        samples=sum(v.samples for v in own) or None,
        not_judged={op: {v.mode: v.not_judged for v in modes} for op, modes in skipped.items()} or None,
    )


def _caps(run: Run) -> dict[str, str]:
    plan = run.header.plan
    options = {"quick": plan.get("quick", False), **(plan.get("options") or {})}
    return {name: str(options[name]) for name in ("quick", "samples", "places") if name in options}


def became_worse(was: Baseline, now: Baseline) -> tuple[list[str], int]:
    """(what to repair, a line per op and mode; how many became better).

    An op that passed must pass; one that did not must not have become wrong, nor a hang. An op that is
    not in `now` counts as worse: it was not measured. So does more that is not judged than MOST_NOT_JUDGED.

    Raises:
        UsageError: the two cannot be compared.
    """
    if (was.torch, dict(was.options)) != (now.torch, dict(now.options)):
        raise UsageError(
            f"the baseline was made with torch {was.torch} and {dict(was.options)}, the run with torch {now.torch} "
            f"and {dict(now.options)}: measure with the baseline's, or save a new one"
        )
    worse, better = [], 0
    for op, modes in was.verdicts.items():
        for mode, before in modes.items():
            after = now.verdicts.get(op, {}).get(mode, "not measured")
            if after == before:
                continue
            if before == "pass" or after in ("wrong", "hang", "died", "differs", "not measured"):
                worse.append(f"{op} ({mode}): was {before}, is {after}")
            elif after == "pass":
                better += 1
    count = sum(sum(modes.values()) for modes in (now.not_judged or {}).values())
    if now.samples and count > MOST_NOT_JUDGED * now.samples:
        worse.append(f"{count} of {now.samples} samples are not judged, at most {MOST_NOT_JUDGED:.1%} may be")
    return worse, better


def merged(runs: Sequence[Run]) -> list[OpVerdict]:
    """The verdicts of several runs, the last of each op, mode and impl.

    Raises:
        UsageError: there are none.
    """
    last = {(v.op, v.mode, v.impl): v for run in runs for v in verdicts_of(run)}
    if not last:
        raise UsageError("no verdicts in these runs: make some with `dtbench run coverage`")
    return sorted(last.values(), key=lambda v: v.op)
