"""Payloads of collectives in a narrower dtype: rounding bounds, scales, expected results and listed cases."""

import pytest
import torch

from dtbench.suite import Case, RunOptions
from dtbench.suite.registry import load
from dtbench_suites.payload import BLOCK, COLLECTIVES, FLOAT8, decode, encode, expected_of, values_of

CPU = torch.device("cpu")
NARROW = ("bfloat16", FLOAT8)


def random_values(count: int) -> torch.Tensor:
    """Returns values whose blocks differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(count // BLOCK, BLOCK, generator=generator)
    return (blocks * 10.0 ** torch.linspace(-20, 20, len(blocks))[:, None]).flatten()


def test_float32_is_sent_unchanged() -> None:
    values = random_values(4 * BLOCK)
    (sent,) = encode(values, "float32")
    assert torch.equal(sent, values) and torch.equal(decode([sent]), values)


def test_bfloat16_is_rounded_to_nearest() -> None:
    values = random_values(64 * BLOCK)
    (sent,) = encode(values, "bfloat16")
    assert sent.dtype is torch.bfloat16
    # 8 significant bits: half a unit in the last place is 2^-8 of the value.
    assert ((decode([sent]) - values).abs() <= 2**-8 * values.abs()).all()


def test_float8_is_rounded_relative_to_its_block() -> None:
    values = random_values(64 * BLOCK)
    sent, scales = encode(values, FLOAT8)
    assert (sent.dtype, sent.shape, scales.dtype, scales.shape) == (
        torch.uint8,
        (64, BLOCK),
        torch.float32,
        (64, 1),
    )
    blocks, got = values.view(64, BLOCK), decode([sent, scales]).view(64, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(scales, largest / 448, rtol=1e-6, atol=0)
    # 4 significant bits: 2^-4 of the value; below the smallest normal number, 2^-6, steps of 2^-9 of the scale.
    bound = torch.maximum(2**-4 * blocks.abs(), 2**-10 * scales) * (1 + 1e-6)
    assert ((got - blocks).abs() <= bound).all()
    # The largest value of a block is exact but for the rounding of the scale.
    exact = (got - blocks).abs().gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    assert (exact <= 1e-6 * largest).all()


def test_blocks_of_zeros_stay_zeros() -> None:
    values = torch.cat([torch.zeros(BLOCK), torch.ones(BLOCK)])
    assert torch.equal(decode(encode(values, FLOAT8)), values)


@pytest.mark.parametrize("payload", NARROW)
def test_test_data_are_changed_by_the_conversion_within_half_an_eps(payload: str) -> None:
    for rank in range(4):
        values = values_of(rank, 4, 16 * BLOCK, CPU)
        got = decode(encode(values, payload))
        assert not torch.equal(got, values)  # so a check in float32 alone would not be exact
        eps = torch.finfo(getattr(torch, payload)).eps
        assert ((got - values).abs() <= eps / 2 * values.abs()).all()


@pytest.mark.parametrize("ranks", [2, 3, 8, 51])
def test_bfloat16_sums_of_the_test_data_are_exact_in_any_order(ranks: int) -> None:
    terms = [values_of(rank, ranks, 8 * BLOCK, CPU).bfloat16() for rank in range(ranks)]
    exact = torch.stack([term.double() for term in terms]).sum(0)
    for order in (terms, terms[::-1]):
        total = order[0].clone()
        for term in order[1:]:
            total += term
        assert torch.equal(total.double(), exact)


def test_expected_results_are_those_of_plain_indexing() -> None:
    parts = [torch.arange(6.0) + 10 * rank for rank in range(3)]
    assert expected_of("all_gather", parts, 1).tolist() == [
        *(0, 1, 2, 3, 4, 5),
        *(10, 11, 12, 13, 14, 15),
        *(20, 21, 22, 23, 24, 25),
    ]
    assert expected_of("all_to_all", parts, 1).tolist() == [2, 3, 12, 13, 22, 23]
    assert expected_of("reduce_scatter", parts, 1).tolist() == [36, 39]


def cases(**changes: object) -> list[Case]:
    options = RunOptions(**{"mesh": (("dp", 2), ("pp", 1), ("tp", 3)), "sizes_bytes": (2**16,)} | changes)  # type: ignore[arg-type]
    return list(load(["payload"])[0].cases(options))


def test_cases_are_all_payloads_and_parts_on_mesh_dims_of_several_ranks() -> None:
    listed = cases(dtypes=("float64", "bfloat16"))
    parts = {("total", "float32", *NARROW), ("transfer", *NARROW), ("conversion", *NARROW)}
    assert {(c.name, c.params["mesh_dim"], c.params["part"], *c.build) for c in listed} == {
        (name, dim, *part) for name in COLLECTIVES for dim in ("dp", "tp") for part in parts
    }
    assert len(listed) == 3 * 2 * 3 and {c.params["dtype"] for c in listed} == {"float32"}
    assert {c.params["part"] for c in cases(quick=True)} == {"total"}
    assert not load(["payload"])[0].by_default


@pytest.mark.parametrize(("requested", "size"), [(1, 3 * 512), (2**16, 42 * 3 * 512)])
def test_sizes_are_rounded_to_whole_blocks_per_rank(requested: int, size: int) -> None:
    assert {c.size_bytes for c in cases(mesh=(("tp", 3),), sizes_bytes=(requested, requested + 1))} == {size}
