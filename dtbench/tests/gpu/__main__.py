"""Checks dtbench on one GPU, the most valuable steps first, and keeps all results in one file.

    python -m dtbench.tests.gpu --within 9m -o results/gpu.zip        in a checkout

The file is complete after every step. It has a folder for each card: run files, logs, JUnit, findings of instruments,
reports, and `summary.md`. A second call continues with the missing steps. `--rehearse` runs the same on a CPU with a
fake GPU. This module imports the standard library alone: packages that the steps need may be in `.wheels`.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from dtbench.tests.gpu import fake_gpu, sharing
from dtbench.tests.gpu.steps import ROOT, Step, steps_of

# Words, log, limit in seconds, variables besides those of the check -> exit code; None at the limit.
Program = Callable[[list[str], IO[bytes], float, dict[str, str]], int | None]
PAIR = "pair"  # the step that finds out whether two ranks can share the card
BUNDLE_BYTES = 16 * 2**20  # more is too large to be sent around
GRACE_S = 8.0  # from a step's limit to its kill: a run closes its file
_CELL = str.maketrans({"|": "\\|", "<": "&lt;"})  # of a table
# Beginnings of log lines that contain the reason why a step failed.
_ERROR = re.compile(r"^(E  |FAILED|ERROR|[\w.]*(Error|Exception)\b|dtbench: |\S+: \d+ ok, ).*", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every step is ok, and 5 otherwise; exits with 1 if nothing was run."""

    def seconds(text: str) -> float:
        return float(text.rstrip("ms")) * (60 if text.endswith("m") else 1)

    began, parser = time.monotonic(), argparse.ArgumentParser(prog="python -m dtbench.tests.gpu")
    parser.add_argument("--within", type=seconds, default="9m", help="all of it, e.g. 540s (default 9m)")
    parser.add_argument("-o", dest="bundle", type=Path, default=ROOT / "results/gpu.zip", help="gone on with")
    parser.add_argument("--rehearse", action="store_true", help="on this CPU: no figure counts")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    card = fake_gpu.NAME if options.rehearse else _card()
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ |= fake_gpu.ENVIRON if options.rehearse else {"DTBENCH_TEST_DEVICE": "cuda"}
    with tempfile.TemporaryDirectory(prefix="dtbench-gpu-") as folder:
        program = partial(run, environ, _interpreter(Path(folder, "environment")))
        check = Check(card, options.bundle, Path(folder, "cards"), program)
        return check.run(steps_of(options.rehearse), began + options.within)


def _card() -> str:
    """Returns the card's name, which names its folder, then driver, mode, clocks, power, temperature."""
    fields = "name,driver_version,compute_mode,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True, timeout=30).splitlines()[0]
    sys.exit("nvidia-smi names no GPU here, expected one; give --rehearse to try the steps on this CPU")


def _interpreter(folder: Path) -> Path:
    """Makes an environment of installed packages, wheels and this checkout, without pip. Returns its Python."""
    venv.create(folder, symlinks=True)
    own = folder / f"lib/python3.{sys.version_info.minor}/site-packages"
    for wheel in (ROOT / ".wheels").glob("*.whl"):  # archives of what lies there
        if wheel.name.split("-")[2] in ("py3", "py2.py3", f"cp3{sys.version_info.minor}"):
            zipfile.ZipFile(wheel).extractall(own)
    there = [path for path in sys.path if path.endswith("-packages")]
    (own / "all.pth").write_text("\n".join(map(str, (ROOT, ROOT / "core", ROOT / "suites", *there))))
    return folder / "bin/python"


def write_bundle(path: Path, folder: Path) -> list[str]:
    """Replaces the file with an archive of the folder. Returns the largest files, left out to limit its size."""
    files = sorted(filter(Path.is_file, folder.rglob("*")), key=lambda file: file.stat().st_size)
    left_out, partial = list[str](), path.with_name(f".{path.name}.part")
    while True:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, file.relative_to(folder))
        if partial.stat().st_size <= BUNDLE_BYTES:
            partial.replace(path)
            return left_out
        left_out.append(str(files.pop().relative_to(folder)))


def findings_of(file: Path) -> list[Any]:
    """Returns the findings of an instrument, or an empty list if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        return found if isinstance(found, list) else []
    return []


class Check:
    """The steps on one card.

    Attributes:
        outcomes: step -> ("ok", "failed", "cut off" or "skipped", seconds, reason).
    """

    def __init__(self, card: str, bundle: Path, all_cards: Path, program: Program) -> None:
        self.card, self.bundle, self._all_cards, self._program = card, bundle, all_cards, program
        self.folder = all_cards / re.sub(r"[^a-z0-9]+", "-", card.partition(",")[0].lower()).strip("-")
        self._state, self.outcomes = self.folder / "check.json", dict[str, tuple[str, float, str]]()
        self._left_out: list[str] = []
        try:
            bundle.parent.mkdir(parents=True, exist_ok=True)
            if bundle.exists():
                zipfile.ZipFile(bundle).extractall(all_cards)
            before = json.loads(self._state.read_text()) if self._state.exists() else {}
            self.outcomes |= {name: (str(how), float(s), str(why)) for name, (how, s, why) in before.items()}
        except (zipfile.BadZipFile, OSError, ValueError, TypeError, AttributeError) as error:
            sys.exit(f"{bundle} cannot be gone on with: {error}; move it away, or give another -o")
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, steps: Sequence[Step], until: float) -> int:
        """Runs each step that fits and is not ok yet, or whose results are missing."""
        kept_s = sum(step.limit_s for step in steps if step.last)
        for step in steps:
            before = self.outcomes.get(step.name, ("skipped", 0.0, ""))[0]
            if before == "ok" and not Path(self._words(step)[-1]).exists():
                before = "skipped"
            if before == "ok" and not step.last:
                continue
            left_s = until - time.monotonic() - (0.0 if step.last else kept_s)
            if step.pair and step.name != PAIR and self.outcomes.get(PAIR, ("",))[0] != "ok":
                self.outcomes[step.name] = ("skipped", 0.0, f"two ranks do not share this card: see {PAIR}")
            elif left_s >= step.limit_s:
                self._run(step, steps)
            elif before == "skipped":
                why = f"it may take {step.limit_s:.0f} s, {max(left_s, 0):.0f} were left"
                self.outcomes[step.name] = ("skipped", 0.0, why)
        self._keep(steps)
        sys.stdout.write(f"\n{self.bundle}\n{(self.folder / 'summary.md').read_text()}")
        return 0 if all(self.outcomes[step.name][0] == "ok" for step in steps) else 5

    def _words(self, step: Step) -> list[str]:
        return shlex.split(step.command.format(out=self.folder))

    def _run(self, step: Step, steps: Sequence[Step]) -> None:
        began, (how, why) = time.monotonic(), ("cut off", "the check was ended")
        try:
            how, why = self._step(step)
        finally:
            self.outcomes[step.name] = (how, round(time.monotonic() - began, 1), why)
            self._keep(steps)
        sys.stderr.write(f"{step.name}: {' '.join(map(str, self.outcomes[step.name]))}\n")

    def _step(self, step: Step) -> tuple[str, str]:
        """Runs a step. Returns its outcome and the reason."""
        *words, output = self._words(step)
        # A file that an earlier step did not write cannot be read.
        words = [word for word in words if not word.endswith(".jsonl") or Path(word).exists()]
        resume = ["--resume"] if step.resume and Path(output).exists() else []
        if not resume:
            shutil.rmtree(output, ignore_errors=True)  # a folder that an ended step has left
        with (self.folder / f"logs/{step.name}.log").open("w+b") as log:
            pair_results = self.folder / f"{PAIR}.json"
            variables = sharing.environ_of(pair_results, self.card == fake_gpu.NAME) if step.pair else {}
            code = self._program([*words, output, *resume], log, step.limit_s, variables)
            log.seek(0)
            log_text = log.read().decode(errors="replace")
        if code is None:
            return "cut off", f"at its {step.limit_s:.0f} s"
        if code in step.good:
            return "ok", ""
        match = _ERROR.search(log_text)
        return (
            "failed",
            f"exit {code}: {(match[0] if match else log_text.strip().rpartition(chr(10))[2])[:200]}",
        )

    def _keep(self, steps: Sequence[Step]) -> None:
        self._state.write_text(json.dumps(self.outcomes, indent=1))
        (self.folder / "summary.md").write_text("\n".join(self._summarized(steps)) + "\n")
        self._left_out = write_bundle(self.bundle, self._all_cards)

    def _summarized(self, steps: Sequence[Step]) -> Iterator[str]:
        """Yields the lines of the summary: one per step, and one per finding of an instrument."""
        yield f"# {self.card}\n"
        if self.card == fake_gpu.NAME:
            yield "**A rehearsal: a CPU measured all of this. No figure here says anything of a GPU.**\n"
        yield "| step | outcome | seconds | |\n|---|---|---:|---|"
        for step in steps:
            how, seconds, why = self.outcomes.get(step.name, ("not run", 0.0, ""))
            yield f"| {step.name} | {how} | {seconds:.0f} | {why.translate(_CELL)} |"
        yield "\n| instrument | measured | goal | met |\n|---|---|---|---|"
        for file in sorted(self.folder.glob("*.json")):
            for name, got, goal, met in findings_of(file) if file != self._state else ():
                shown = ", ".join(f"{k} {v:.4g}" if type(v) is float else f"{k} {v}" for k, v in got.items())
                yield f"| {name} | {shown.translate(_CELL)} | {goal.translate(_CELL)} | {met} |"
        if self._left_out:
            yield f"\nToo large for the bundle, left out: {', '.join(self._left_out)}"


def run(
    environ: Any, python: Path, words: list[str], out: IO[bytes], limit_s: float, variables: dict[str, str]
) -> int | None:
    """Runs a program, which ends with this process at the latest.

    Returns its exit code, or None if it was ended at its limit together with all processes that it started.
    """
    die = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h
    place: Any = {"env": environ | variables, "cwd": ROOT, "process_group": 0, "stdin": subprocess.DEVNULL}
    with subprocess.Popen([python, *words], stdout=out, stderr=out, preexec_fn=die, **place) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
