"""Runs read-only git commands without starting any program that a repository's configuration names.

git runs configured programs for hooks, file system monitors, diffs and file filters. Reading a commit must not run
them, take a lock, prompt for a password or write.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Settings that disable configured programs; see `git help config`.
_SAFE_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "diff.external": "",
    "diff.ignoreSubmodules": "all",  # git would run in them, with their configuration
    "submodule.recurse": "false",
}
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"
_TIMEOUT_S = 10.0


def run_git(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs `git ARGUMENTS` and returns the finished process, whatever its exit code.

    Args:
        env: environment variables in addition to this process's.

    Raises:
        OSError, subprocess.SubprocessError: git cannot be run, or exceeds the timeout.
    """

    def run(command: tuple[str, ...], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        variables = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        # Settings pass through the environment, since `-c` cannot express all names of filters.
        # Those that the user's environment already has are kept.
        count = os.environ.get("GIT_CONFIG_COUNT", "")
        first = int(count) if count.isascii() and count.isdigit() else 0
        variables["GIT_CONFIG_COUNT"] = str(first + len(settings))
        for number, (name, value) in enumerate(settings.items(), first):
            variables |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
        return subprocess.run(
            ["git", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env={**os.environ, **variables, **(env or {})},
        )

    listed = run(("config", "--null", "--name-only", "--get-regexp", _FILTERS), _SAFE_SETTINGS)
    # A filter with an empty command does not change files.
    filters = {
        name: "false" if name.endswith(".required") else "" for name in listed.stdout.split("\0") if name
    }
    return run(arguments, _SAFE_SETTINGS | filters)
