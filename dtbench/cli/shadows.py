"""Files of a user that hide a module which dtbench imports, such as `json.py` in a folder of PYTHONPATH: looked for
once something has failed. Imports only what cannot be hidden any more."""

from __future__ import annotations

import os
import sys

# What dtbench consists of, each a folder, and what it requires, by the name it is imported by.
_OURS = ("dtbench", "dtbench_core", "dtbench_suites")
_REQUIRED = (
    "click",
    "jinja2",
    "markupsafe",
    "matplotlib",
    "msgspec",
    "numpy",
    "packaging",
    "rich",
    "scipy",
    "torch",
)


def hidden_by(error: BaseException) -> str:
    """What hides a module of Python or of what dtbench requires, where that may have led to the error, and what to do;
    "" where nothing does."""
    passed = {os.path.realpath(str(error.filename))} if isinstance(error, SyntaxError) else set()
    frame = error.__traceback__
    while frame is not None:
        passed.add(os.path.realpath(frame.tb_frame.f_code.co_filename))
        frame = frame.tb_next
    names = {*sys.stdlib_module_names, *_REQUIRED, *_OURS}
    for folder in _given_folders():
        for name in sorted(names):
            for path in (f"{folder}/{name}.py", f"{folder}/{name}/__init__.py")[: 1 if name in _OURS else 2]:
                real = os.path.realpath(path)
                file = getattr(sys.modules.get(name), "__file__", None)
                loaded = file is not None and os.path.realpath(file) == real
                led = real in passed or (loaded and isinstance(error, ImportError | AttributeError))
                if led and not _is_installed(folder, name):
                    remedy = "rename it, or take its folder from PYTHONPATH"
                    return f"{path} hides the module {name}, which dtbench needs: {remedy}"
    return ""


def _given_folders() -> list[str]:
    """Those that a user puts in front of Python's own."""
    own = [] if sys.flags.safe_path or not sys.path else [sys.path[0] or "."]
    return [*own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _is_installed(folder: str, name: str) -> bool:
    """Whether the folder is Python's library, or holds the package as pip puts it there."""
    beside = {entry.lower() for entry in os.listdir(folder)}  # noqa: PTH208 - pathlib may be hidden
    return {"os.py", "abc.py"} <= beside or any(
        entry.startswith(f"{name}-") and entry.endswith("-info") for entry in beside
    )
