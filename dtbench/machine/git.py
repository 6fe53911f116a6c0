"""git beside somebody's repository: nothing that the repository or its configuration names is started.

git runs programs that a configuration names for hooks, file system monitors, diffs and filters of files. A benchmark
that only asks for a commit must not do that, nor take a lock, ask for a password or write.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Of `git help config`.
_OFF = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "diff.external": "",
    "diff.ignoreSubmodules": "all",  # it would run git in them, by their configuration
    "submodule.recurse": "false",
}
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"
_QUICK_S = 10.0


def run_git(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _QUICK_S,
) -> subprocess.CompletedProcess[str]:
    """`git ARGUMENTS`, ended. env: variables beside this process's.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, or takes longer.
    """

    def run(words: tuple[str, ...], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        own = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        # Names of filters may hold what `-c` cannot; the user's own settings in the environment stay.
        count = os.environ.get("GIT_CONFIG_COUNT", "")
        first = int(count) if count.isascii() and count.isdigit() else 0
        own["GIT_CONFIG_COUNT"] = str(first + len(settings))
        for number, (name, value) in enumerate(settings.items(), first):
            own |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
        return subprocess.run(
            ["git", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env={**os.environ, **own, **(env or {})},
        )

    listed = run(("config", "--null", "--name-only", "--get-regexp", _FILTERS), _OFF)
    filters = [name for name in listed.stdout.split("\0") if name]
    # An empty command of a filter leaves a file as it is.
    return run(arguments, _OFF | {name: "false" if name.endswith(".required") else "" for name in filters})
