"""What looks like a secret is masked before it is written or said: run files and reports are passed around.

By names (`TOKEN=...`, `--api-key ...`, `Authorization: ...`, `{"password": "..."}`), by users in URLs, and by the
shapes that known services give their tokens. Of a variable of the environment only what is known to be harmless is
kept. Rather too much is masked than too little.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

MASK = "***"
_MAX_VALUE = 200  # characters of one variable or argument
_MAX_ARGS = 200

# In any place of a name ...
_ROOTS = (
    r"token|secret|passw|passphrase|credential|cookie|bearer|auth(?!or(?:s|ed|ing)?\b)"
    r"|api[-_]?key|access[-_]?key|private[-_]?key"
)
# ... and as its last word, where `key_size` or `bypass=` would be something else.
_LAST_WORDS = (
    r"(?:[\w.-]*[-_.])?(?:key|pwd|pw|tok|pat|jwt|sig|signature|sid|session[-_]?id|creds?|otp)|[\w.-]*[-_.]pass|(?-i:PASS)"
    r"|[\w.-]*(?-i:[a-z](?:Key|Pwd|Pass|Sig|Signature))"
)
_NAME = rf"[\w.-]*(?:{_ROOTS})[\w.-]*|{_LAST_WORDS}"
_SECRET_NAME = re.compile(rf"-*(?:{_NAME})", re.IGNORECASE)
# A value goes on until the next name, so that one with a comma or a space in it is masked whole.
_NAMED_VALUE = re.compile(
    rf"""(?P<head>(?<![\w.-])(?P<name>{_NAME})\\?["']?\s*(?:[=:]|%3[ad])\s*)(?P<value>\S.*?)(?=[,;&\s]+["']?[\w.-]+["']?\s*[=:]|$)""",
    re.IGNORECASE | re.DOTALL,
)
# A header of HTTP goes on to the end of its line.
_HEADER = re.compile(rf"(?im)(?<![\w.-])((?:{_NAME})\s*:\s*)\S.*$")
# Up to the last @ of the word: a password may hold what a URL would have to escape.
_USER_IN_URL = re.compile(r"://(?:[^/\s]+|[^/:\s]*:\S+)@")
_USER_OPTION = re.compile(r"(?<![\w-])((?:-u|--(?:proxy-)?user)(?:\s+|=)[^\s:]+:)\S+")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|$)", re.DOTALL)
_AFTER_BEARER = re.compile(r"(?i)\b(bearer\s+)\S+")
# GitHub, GitLab, Hugging Face, OpenAI and its like, AWS, Slack, Stripe, Google, NVIDIA, Groq, npm, PyPI, Databricks,
# SendGrid, and JSON web tokens, as their documentation shows them.
_SHAPES = re.compile(
    r"\b(?:gh[opusr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[abeprs]-[\w-]{8,}|xapp-[\w-]{8,}|glrt-[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|nvapi-[\w-]{16,}|gsk_\w{16,}|npm_\w{30,}|pypi-[\w-]{16,}|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
)
# `--api-key VALUE` inside one text; the value goes on until the next option.
_OPTION = re.compile(rf"""(?i)(?<![\w-])(--?(?:{_NAME})\s+)(?!-)\S.*?(?=\s+-|$)""", re.DOTALL)

# What a variable's value may consist of. Words: of the documentation of NCCL, gloo, OpenMP, CUDA, jemalloc and torch.
_WORDS = """
true false yes no on off auto default none all any enable disable enabled disabled always never
tree ring collnet collnetdirect collnetchain nvls nvlstree pat ll ll128 simple
allreduce allgather reducescatter broadcast reduce sendrecv alltoall
version warn info abort trace init coll p2p shm net graph tuning env alloc call proxy bootstrap reg profile ras
loc nvl pix pxb pxn phb sys node local intra inter socket ib ofi rdma ucx efa sharp roce aws libfabric
tcp tls tcp_tls uv ibverbs lazy eager
active passive close spread master primary static dynamic guided runtime threads cores sockets ll_caches numa_domains
granularity fine core thread tile compact scatter balanced explicit verbose noverbose respect norespect warnings
nowarnings fastest_first pci_bus_id warning error fatal detail
backend native cudamallocasync expandable_segments max_split_size_mb garbage_collection_threshold
roundup_power2_divisions roundup_bypass_threshold_mb pinned_use_cuda_host_register pinned_num_register_threads
background_thread metadata_thp dirty_decay_ms muzzy_decay_ms narenas percpu_arena lg_tcache_max tcache prof
"""
_KNOWN = frozenset(_WORDS.split())
_NUMBER = r"-?(?:0x[0-9a-f]{1,16}|\d[\d.]*(?:e-?\d+)?(?:[kmgt]i?b?|b|us|ms|s|%)?)"
# Names that kernels and drivers give to network interfaces, HCAs and GPUs; libraries; paths.
_DEVICE = r"(?:eth|en[opsx]|ib|bond|team|br|veth|hsn|wl|docker|mlx[45]_|bnxt_re|irdma|rdmap|efa_|hfi1_)\d[\w.]{0,12}"
_GPU = r"(?:gpu|mig)-[0-9a-f-]{4,36}"
_LIBRARY = r"lib[\w+-]+\.so(?:\.\d+)*"
_PATH = r"(?:~|\.{1,2})?/[^\s=,;:]*"
_HARMLESS = re.compile(rf"{_NUMBER}|lo|{_DEVICE}|{_GPU}|{_LIBRARY}|{_PATH}", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s,;:=+^{}|]+")


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def mask(text: str) -> str:
    """The text without what looks like a secret."""
    text = _NAMED_VALUE.sub(_masked_value, _HEADER.sub(rf"\1{MASK}", text))
    text = _OPTION.sub(rf"\1{MASK}", text)
    text = _USER_OPTION.sub(rf"\1{MASK}", _PRIVATE_KEY.sub(rf"\1{MASK}", text))
    text = _AFTER_BEARER.sub(rf"\1{MASK}", _USER_IN_URL.sub(f"://{MASK}@", text))
    return _SHAPES.sub(MASK, text)


def _masked_value(found: re.Match[str]) -> str:
    if found["name"].lower().endswith("tokens") and found["value"].isdigit():  # a number of them
        return found[0]
    return found["head"] + MASK


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments of a command line, at most 200 of them, cut to 200 characters."""
    shown: list[str] = []
    hide_next = False
    for arg in list(argv)[:_MAX_ARGS]:
        hidden = MASK if hide_next else mask(arg)
        hide_next = not hide_next and arg.startswith("-") and is_secret(arg)
        shown.append(hidden if len(hidden) <= _MAX_VALUE else hidden[: _MAX_VALUE - 3] + "...")
    return shown


def mask_echoes(text: str, argv: Sequence[str]) -> str:
    """What is said of a command line, in which the arguments that hold a secret are masked as `mask_arguments` does."""
    hide_next = False
    for arg in argv:
        hidden = MASK if hide_next else mask(arg)
        hide_next = not hide_next and arg.startswith("-") and is_secret(arg)
        if hidden != arg:
            # As it was given, as a path spells it, and the value of an option alone.
            forms = {arg: hidden, arg.replace("://", ":/"): hidden, arg.partition("=")[2]: MASK}
            for form, shown in forms.items():
                if form:
                    text = shown.join(re.split(rf"(?<!\w){re.escape(form)}(?!\w)", text))
    return text


def is_whole(shown: Sequence[str]) -> bool:
    """Whether `mask_arguments` has left these as they were: nothing is masked, cut or missing."""
    cut = any(len(word) == _MAX_VALUE and word.endswith("...") for word in shown)
    return len(shown) < _MAX_ARGS and not cut and not any(MASK in word for word in shown)


def mask_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a command line by their names, each with what may be shown of its value."""
    return {name: _mark(value) if is_secret(name) else mask(value) for name, value in options.items()}


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment, each with its value where that consists of numbers, known words and paths.

    Of any other value a mark of 16 bits: another value has another one, and none can be found out by it.
    """
    return {
        name: _mark(value) if is_secret(name) or not _is_harmless(value) else value
        for name, value in variables.items()
    }


def _is_harmless(value: str) -> bool:
    parts = (part for part in _BETWEEN.split(value) if part)
    return mask(value) == value and all(
        part.lower() in _KNOWN or _HARMLESS.fullmatch(part) or _is_range(part) for part in parts
    )


def _is_range(part: str) -> bool:
    """`0-3`, `eth0-eth3`."""
    ends = part.split("-")
    return len(ends) == 2 and all(end.lower() in _KNOWN or _HARMLESS.fullmatch(end) for end in ends)


def _mark(secret: str) -> str:
    return f"{MASK}{hashlib.sha256(secret.encode('utf-8', 'replace')).hexdigest()[:4]}"
