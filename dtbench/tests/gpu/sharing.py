"""Lets two ranks share one GPU: the library of NCCL that permits it, and the environment variables of such ranks.

NCCL from 2.30 lets ranks share a GPU if `NCCL_MULTI_RANK_GPU_ENABLE` is set, which its documentation calls
experimental: ranks may lock up. torch may have been built with an older one, so a library is preloaded in its place:
`.wheels/libnccl.so.2`, an NCCL of 2.30 or newer built for the card (`make wheels NCCL_LIB=PATH` puts it there). In a
rehearsal gloo stands in for NCCL. Imports the standard library alone, as the check does.
"""

import json
from pathlib import Path

from dtbench.tests.gpu.steps import ROOT

LIBRARY = ROOT / ".wheels/libnccl.so.2"
# From NCCL's env.rst. CTAs: two ranks' kernels must fit on the card together. NVLS and cuMem share memory between
# cards. A build for one card may have the ring and two protocols only.
NCCL = {
    "LD_PRELOAD": str(LIBRARY),
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "LL,Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "DTBENCH_TEST_BACKEND": "nccl",
}
GLOO = {"DTBENCH_TEST_BACKEND": "gloo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# Tried in turn by the step "pair", beside `NCCL`; it records the first that works, and later steps use it.
MODES: tuple[dict[str, str], ...] = ({}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_CUMEM_ENABLE": "1"})


def format_variables(variables: dict[str, str]) -> str:
    """Formats variables as a shell sets them, e.g. "NCCL_P2P_DISABLE=1"."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


def environ_of(results: Path, rehearsal: bool) -> dict[str, str]:
    """Returns the variables of a step with two ranks. results: the file of the step "pair"; it need not exist."""
    if rehearsal:
        return GLOO
    found = json.loads(results.read_text())[0][1] if results.exists() else {}  # written whole or not at all
    return NCCL | dict(word.split("=", 1) for word in str(found.get("variables", "")).split())
