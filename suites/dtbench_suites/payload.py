"""Collectives of float32 tensors that are sent in a narrower dtype, with the time of the conversion on both sides.

    impl           sent                                                                  bytes per element
    float32        the tensor itself                                                     4
    bfloat16       the rounded tensor                                                    2
    float8_e4m3fn  the tensor divided by the scale of its block, and the float32 scales  1 + 4 / 128

    part           timed
    total          conversion, transfer, and conversion back to float32
    transfer       the transfer of the converted tensor, with its scales
    conversion     both conversions, without a transfer

`size` is S of the collectives suite for the float32 tensor, rounded down to whole blocks per rank. A block has 128
elements, as those of DeepSeek-V3's activations (arXiv 2412.19437, section 3.3.2). Its scale maps its largest value to
448, the largest of float8_e4m3fn. gloo does not know 8-bit floats, so their bytes are sent as integers.

reduce_scatter in bfloat16 is what FSDP does with reduce_dtype=torch.bfloat16: the backend adds in bfloat16. float8
values of different scales cannot be added on the way. They are exchanged by an all-to-all, converted, and added in
float32, which is a part of the conversion.

A quick run measures the totals only. The counter `sent_bytes` is what a rank passes to the collective, with scales.

Results are compared bit by bit with plain torch on the tensors of all ranks, converted in the same way, and with the
result in float32 within half an eps of the payload.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dtbench.suite import Case, RunOptions, Workload, World, suite, sweep
from dtbench_core.torch_compat import all_gather_single, reduce_scatter_single
from dtbench_suites import SUITES
from dtbench_suites.data import mismatch, summed_values, torch_dtype

BLOCK = 128
FLOAT8 = "float8_e4m3fn"
# Part -> the payloads, as impls, so that their samples alternate. A quick run measures only the totals. A float32
# tensor needs no conversion, so its total is its transfer.
PARTS = {
    "total": ("float32", "bfloat16", FLOAT8),
    "transfer": ("bfloat16", FLOAT8),
    "conversion": ("bfloat16", FLOAT8),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


def values_of(rank: int, ranks: int, count: int, device: torch.device) -> Tensor:
    """Returns the (count,) float32 values of a rank.

    They are small integers, divided by a power of two that differs between blocks, times 1 + 2^-10. bfloat16 rounds the
    last factor off, and adds what remains exactly.

    Raises:
        Skip: bfloat16 cannot add the integers of all ranks exactly.
    """
    integers = summed_values(rank, ranks, count, torch.bfloat16, device, start=rank)
    return integers.float() / 2.0 ** (torch.arange(count, device=device) // BLOCK % 8) * (1 + 2**-10)


def encode(values: Tensor, payload: str) -> list[Tensor]:
    """Returns the tensors to send: (count,), or for float8 the (count / BLOCK, BLOCK) bytes and the scales."""
    dtype = torch_dtype(payload)
    if payload != FLOAT8:
        return [values.to(dtype)]
    blocks = values.view(-1, BLOCK)
    # Not below the smallest normal number, so that zeros are not divided by zero.
    scales = (blocks.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max).clamp_(min=torch.finfo().tiny)
    return [(blocks / scales).to(dtype).view(torch.uint8), scales]


def decode(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the (count,) float32 values of what `encode` has returned."""
    if len(tensors) == 1:
        return tensors[0].float()
    return (tensors[0].view(torch_dtype(FLOAT8)).float() * tensors[1]).flatten()


def exchange(collective: str, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Calls the collective, which divides the first dim among the ranks. Returns the output."""
    n, rows = group.size(), len(tensor)
    call, rows = {
        "all_gather": (all_gather_single, rows * n),
        "reduce_scatter": (reduce_scatter_single, rows // n),
        "all_to_all": (dist.all_to_all_single, rows),
    }[collective]
    output = tensor.new_empty(rows, *tensor.shape[1:])
    call(output, tensor, group=group)
    return output


def expected_of(collective: str, parts: Sequence[Tensor], rank: int) -> Tensor:
    """Returns the result of `rank` in plain torch.

    Args:
        parts: the values that each rank sends.
    """
    if collective == "all_gather":
        return torch.cat([*parts])
    shards = [part.chunk(len(parts))[rank] for part in parts]
    return torch.cat(shards) if collective == "all_to_all" else torch.stack(shards).sum(0)


def build(collective: str, payload: str, part: str, mesh_dim: str, count: int, world: World) -> Workload:
    group = world.mesh.get_group(mesh_dim)
    rank, n = group.rank(), group.size()
    sent_by = "all_to_all" if (collective, payload) == ("reduce_scatter", FLOAT8) else collective
    length = count // n if collective == "all_gather" else count
    values = values_of(rank, n, length, world.device)
    encoded = encode(values, payload)
    received = [exchange(sent_by, tensor, group) for tensor in encoded]

    def finish(tensors: Sequence[Tensor]) -> Tensor:
        decoded = decode(tensors)
        return decoded if sent_by == collective else decoded.view(n, -1).sum(0)

    runs: dict[str, Callable[[], list[Tensor]]] = {
        "total": lambda: [finish([exchange(sent_by, t, group) for t in encode(values, payload)])],
        "transfer": lambda: [exchange(sent_by, tensor, group) for tensor in encoded],
        "conversion": lambda: [*encode(values, payload), finish(received)],
    }

    def check() -> str | None:
        outputs = runs[part]()
        got = finish(outputs) if part == "transfer" else outputs[-1]
        sent = [values_of(r, n, length, world.device) for r in range(n)]
        converted = [decode(encode(tensor, payload)) for tensor in sent]
        return mismatch(got, expected_of(collective, converted, rank)) or mismatch(
            got, expected_of(collective, sent, rank), rtol=torch.finfo(torch_dtype(payload)).eps / 2
        )

    return Workload(runs[part], check=check, counters=lambda: {"sent_bytes": sum(t.nbytes for t in encoded)})


@suite("payload", world="ranks", by_default=False, help=SUITES["payload"], impl_s=(0.15, 0.09))
def payload(options: RunOptions) -> Iterator[Case]:
    cases = {}
    for point in sweep(options, dtypes=["float32"]):
        count = max(point.size_bytes // (4 * BLOCK * point.ranks), 1) * BLOCK * point.ranks
        for collective, part in itertools.product(COLLECTIVES, [*PARTS][: 1 if options.quick else None]):
            params = {**point.params, "size": 4 * count, "part": part}
            cases[collective, *params.values()] = Case(
                name=collective,
                params=params,
                build={
                    payload: partial(build, collective, payload, part, point.mesh_dim, count)
                    for payload in PARTS[part]
                },
                size_bytes=4 * count,
                bandwidth=False,
            )
    yield from cases.values()  # small sizes may be rounded to the same size
