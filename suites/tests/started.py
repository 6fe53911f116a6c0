"""Programs as a user starts them: fresh processes of this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240  # a hang, not slowness


def start(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for name in list(env):
        # Also what tells pytest that it is a worker: it would then not measure.
        if name in ("RANK", "WORLD_SIZE", "PYTEST_ADDOPTS") or name.startswith("PYTEST_XDIST"):
            del env[name]
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
