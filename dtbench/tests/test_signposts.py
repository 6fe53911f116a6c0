"""Every path and name that docstrings, comments and the docs quote exists."""

import ast
import io
import pkgutil
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]
# Quoted, but of other projects or of files that a command makes.
FOREIGN_NAMES = {
    "PIP_EXTRA_INDEX_URL",  # pip
    "Measurement.meets_confidence",  # torch.utils.benchmark
    "_ex",  # torch's suffix of ops
    "customSmallerIsBetter",  # github-action-benchmark
    "mark_dynamic",  # torch._dynamo
    "ncclDevKernel_AllGather_RING_LL",  # NCCL
    "pp_comm_bandwidth",  # Hugging Face's playbook
    "rankN",  # a file per rank of a recorded job
    "run_eval_code_obj",  # CPython
}
MADE_BY_COMMANDS = {"results/gpu.zip", "results/plan/machine.json", "gate/gate.json"}
# Placeholders.
TO_BE_WRITTEN = {"dtbench/reporting/html/parts/mine.py", "results/reference/step-times/TABLE.csv"}

_DOTTED = re.compile(r"(?<![\w./-])(?:dtbench|dtbench_core|dtbench_suites)(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(
    r"(?<![\w/.{<*~@-])(?:[\w.-]+/)+[\w@.-]+\.(?:py|md|toml|jsonl?|csv|jinja|html|txt|yml|gz)\b"
)
_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")


@cache
def tracked() -> frozenset[str]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True)
    return frozenset(listed.stdout.splitlines())


@cache
def prose_and_words() -> tuple[dict[str, str], frozenset[str]]:
    """File -> its docstrings and comments, or its Markdown; and every word of code outside of them."""
    prose: dict[str, str] = {}
    words: set[str] = set()
    for name in sorted(tracked()):
        if name.endswith(".md") and not name.startswith("docs/site"):
            prose[name] = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        elif name.endswith(".py"):
            texts = []
            for is_prose, text in _tokens((ROOT / name).read_text()):
                texts.append(text) if is_prose else words.update(re.findall(r"\w+", text))
            prose[name] = "\n".join(texts)
        elif name.endswith((".toml", ".yml", ".jinja")) or name in ("Makefile", ".ci/run", ".ci/size"):
            words.update(re.findall(r"\w+", (ROOT / name).read_text()))
    return prose, frozenset(words)


def _tokens(source: str) -> Iterator[tuple[bool, str]]:
    """Each comment, string and name of a file, and whether it is prose."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.NAME):
            is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
            yield token.type == tokenize.COMMENT or is_docstring, token.string


def _resolves(name: str) -> bool:
    owner, _, field = name.rpartition(".")
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return "." in owner and _resolves(owner) and field in pkgutil.resolve_name(owner).__annotations__
    return True


def test_quoted_modules_and_attributes_exist() -> None:
    prose, _ = prose_and_words()
    quoted = {(name, dotted) for name, text in prose.items() for dotted in _DOTTED.findall(text)}
    assert len(quoted) > 100
    assert {(name, dotted) for name, dotted in quoted if not _resolves(dotted)} == set()


def test_quoted_paths_exist() -> None:
    """A path counts as ours if its first folder is one of the checkout, from the root or from where it is quoted."""
    folders = {str(parent) for name in tracked() for parent in PurePath(name).parents}
    missing = set()
    for name, text in prose_and_words()[0].items():
        if "/tests/" in name:  # they quote paths of files that they make
            continue
        for path in _PATH.findall(text):
            bases = ("", *map(str, PurePath(name).parents), "dtbench", "core", "core/dtbench_core")
            ours = any(str(PurePath(base, path.split("/")[0])) in folders for base in bases)
            exists = any(str(PurePath(base, path)) in tracked() for base in bases)
            if ours and not exists and path not in MADE_BY_COMMANDS | TO_BE_WRITTEN:
                missing.add((name, path))
    assert missing == set()


def test_quoted_identifiers_occur_in_code() -> None:
    prose, words = prose_and_words()
    known = words | FOREIGN_NAMES | {"gz", "txt", "html"}
    assert [
        (name, quoted)
        for name, text in prose.items()
        for quoted in _QUOTED.findall(text)
        if quoted not in FOREIGN_NAMES and not {*filter(None, quoted.split("."))} <= known
    ] == []


@pytest.mark.parametrize("name", ["dtbench.no_such_room", "dtbench.errors.NoSuchError"])
def test_names_that_do_not_exist_are_found(name: str) -> None:
    assert not _resolves(name)
