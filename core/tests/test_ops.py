"""Every op the core has a rule for, against plain torch on the full tensors: values and gradients.

Each op runs over combinations of Replicate, Partial and Shard of every dim for each of its inputs, with
uneven and empty shards on a 1-D mesh of 4 or on a 2x2 mesh, and with even ones on a mesh of 2.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

from core.tests.gloo_world import Worlds, mesh_in, mesh_of, on_ranks
from core.tests.local_world import LocalWorlds, ThreadWorlds
from core.tests.op_case import DEVICE_ONLY, Shapes, index_for
from core.tests.op_cases import OPS
from core.tests.placing import assert_like_plain
from core.tests.torch_version import BEFORE_213, needs_213
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, clear_caches, distribute_tensor
from dtbench_core.dispatch import entry, rank_check
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.rules.base import OpCall, rules_by_op
from dtbench_core.simulate import maybe_run_for_local_tensor

# Fallbacks are right all the same; torch.triangular_solve is deprecated, and has a rule still.
quiet = pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning", "ignore:torch.triangular_solve")
# Every second op is tried with uneven shards on the other mesh.
MESH_OF = {name: ((4,), (2, 2))[i % 2] for i, name in enumerate(OPS)}


@functools.cache
def _combinations(shapes: Shapes, mesh_ndim: int, limit: int, seed: int) -> list[Any]:
    """Returns placements of all inputs except all replicated: every combination, or a seeded sample of `limit`."""
    choices = [[Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))] for shape in shapes]
    everything = list(itertools.product(*[itertools.product(each, repeat=mesh_ndim) for each in choices]))[1:]
    if len(everything) <= limit:
        return everything
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    return [everything[i] for i in order[:limit].tolist()]


@maybe_run_for_local_tensor
def _weight(index: int, ranks: int) -> float:
    """Returns the weight of the term of rank `index`. Weights differ, and their sum is exactly 1 in binary."""
    return 0.5 ** min(index + 1, ranks - 1)


def place(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    """Returns `full` as a DTensor. The terms of a Partial differ between ranks and add up to it."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    placed = distribute_tensor(full, mesh, whole, src_data_rank=None)
    if whole == list(placements):
        return placed
    local = placed.to_local()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            ranks = mesh.size(mesh_dim)
            share = _weight(mesh.get_local_rank(mesh_dim), ranks)
            local = local * (share * ranks if placement.is_partial("avg") else share)
    return DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.contiguous().stride())


def _inputs(shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@functools.lru_cache(maxsize=2)
def _reference(name: str, uneven: bool) -> tuple[Any, ...]:
    """Returns the inputs, the result of plain torch, a cotangent, and the gradients of the inputs."""
    op = OPS[name]
    plain = [t.requires_grad_(op.differentiable) for t in _inputs(op.uneven if uneven else op.shapes)]
    expected = op.fn(*plain)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, plain, cotangent) if op.differentiable else ()
    return [t.detach() for t in plain], expected.detach(), cotangent, list(gradients)


def _run_op(name: str, mesh_shape: tuple[int, ...], uneven: bool, limit: int) -> None:
    """Compares values and gradients on this rank with plain torch for several placements of the inputs."""
    # The ranks of the 2-D mesh do not ascend, so that a rank's place in its group is not its coordinate.
    op, mesh = OPS[name], mesh_of(mesh_shape) if len(mesh_shape) == 1 else mesh_in([[3, 1], [2, 0]])
    plain, expected, cotangent, gradients = _reference(name, uneven)
    shapes = op.uneven if uneven else op.shapes
    for placements in _combinations(shapes, len(mesh_shape), min(op.places, limit), len(name)):
        inputs = [
            place(t, mesh, p).requires_grad_(op.differentiable)
            for t, p in zip(plain, placements, strict=True)
        ]
        try:
            with torch.no_grad():
                results = [op.fn(*inputs) for _ in range(3)]  # the last call takes the fast path
            if op.differentiable:
                results[0] = op.fn(*inputs)
            for result in (results[0], results[-1]):
                torch.testing.assert_close(result.full_tensor(), expected)
            if op.differentiable:
                (results[0].full_tensor() * cotangent).sum().backward()
                torch.testing.assert_close([t.grad.full_tensor() for t in inputs], gradients)
        except Exception as error:
            mesh_name = "x".join(map(str, mesh_shape))
            error.add_note(f"{name} on {mesh_name}: {[','.join(map(str, p)) for p in placements]}")
            raise


@quiet
@pytest.mark.parametrize("name", OPS)
def test_op_equals_plain_torch(ranks: ThreadWorlds, name: str) -> None:
    ranks(_run_op, name, MESH_OF[name], True, 3)
    ranks(_run_op, name, (2,), False, 2, world_size=2)


def _solve_of_batches(op: Any) -> None:
    """Solves three systems on four ranks, of which the last has none."""
    clear_caches()
    matrices = torch.tensor([[4.0, 1.0], [1.0, 2.0]]).expand(3, 2, 2)
    factor = torch.linalg.lu_factor if op is torch.linalg.lu_solve else torch.linalg.ldl_factor
    full = [*factor(matrices), torch.ones(3, 2, 1)]
    sharded = [distribute_tensor(t, mesh_of((4,)), [Shard(0)], src_data_rank=None) for t in full]
    torch.testing.assert_close(op(*sharded).full_tensor(), op(*full))


@pytest.mark.parametrize("op", [torch.linalg.lu_solve, torch.linalg.ldl_solve])
def test_made_up_pivots_count_from_one(ranks: ThreadWorlds, monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    """LAPACK does not check pivots: with 0 it reads and writes outside the matrix."""
    tried: list[torch.Tensor] = []

    def checked(call: Any, strategy: Any, tensors: Any, expected: Any) -> Any:
        pivots = [t for t in tensors if not t.is_floating_point() and not t.is_meta]
        assert all((p > 0).all() for p in pivots)
        tried.extend(pivots)
        return run(call, strategy, tensors, expected)

    run = rank_check._run
    monkeypatch.setattr(rank_check, "_run", checked)
    ranks(_solve_of_batches, op)
    assert tried


# One or two of each family, for other kinds of ranks: these are the same for all.
OF_EACH_FAMILY = (
    *("add_broadcast", "to_int", "written", "sum_dim", "mean", "std", "max_dim", "mm", "linear_3d", "mlp"),
    *("sdpa_causal", "conv2d_strided", "batch_norm", "layer_norm", "softmax", "cross_entropy", "sort", "cat"),
    *("nll_ignoring", "embedding_sharded", "index_put", "scatter_in_place", "view_split", "split_other"),
    *("cumsum", "slice_scatter", "dropout", "listed_in_place"),
)


@quiet
@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_op_equals_plain_torch_on_gloo(gloo_ranks: Worlds, name: str) -> None:
    gloo_ranks(_run_op, name, MESH_OF[name], True, 2)


@pytest.mark.filterwarnings("ignore")  # of torch, and of fallbacks: what the cases warn of is theirs
@pytest.mark.parametrize("name", OF_EACH_FAMILY)
def test_op_equals_plain_torch_as_local_tensors(name: str) -> None:
    _reference(name, True)  # outside of the mode, in which its tensors would be LocalTensors
    LocalWorlds()(_run_op, name, (2, 2), True, 1)


@needs_213("the fake group leaves unwritten what it gathers, indices too")
@pytest.mark.filterwarnings("ignore")  # of torch, and of fallbacks: what the cases warn of is theirs
def test_every_rule_is_tested(fake_world: Any) -> None:
    """Each op that has a rule is reached by an entry of OPS, forward or backward."""
    fake_world(4)
    for op in OPS.values():
        inputs = [distribute_tensor(t, mesh_of((4,)), src_data_rank=None) for t in _inputs(op.shapes)]
        result = op.fn(*[t.requires_grad_(op.differentiable) for t in inputs])
        if op.differentiable:
            result.sum().backward()
    # Other tests register rules of their own.
    registered = [op for op in rules_by_op if not str(op).startswith("dtbench_test")]
    assert [str(op) for op in registered if op not in entry.ops and op not in DEVICE_ONLY] == []


# ---- random chains of ops ----


MESHES = ((2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2))


class Link(NamedTuple):
    """One op of a chain.

    Attributes:
        pick: draws the op's numbers for a shape.
        run: applies the op to (x, numbers).
    """

    pick: Callable[[Any, tuple[int, ...]], Any]
    run: Callable[[Any, Any], Any]


def _dim(draw: Any, shape: tuple[int, ...]) -> int:
    return int(draw(st.integers(-len(shape), len(shape) - 1)))


def _cut(draw: Any, shape: tuple[int, ...]) -> tuple[int, int, int]:
    dim = _dim(draw, shape)
    start = draw(st.integers(0, shape[dim] - 1))
    return dim, start, draw(st.integers(1, shape[dim] - start))


def _split(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draws another shape with as many elements."""
    left, sizes = math.prod(shape), []
    while left > 1 and len(sizes) < 2:
        sizes.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= sizes[-1]
    return (*sizes, left)


def _nothing(draw: Any, shape: tuple[int, ...]) -> None:
    return None


LINKS: dict[str, Link] = {
    "relu": Link(_nothing, lambda x, _: torch.relu(x)),
    "times": Link(lambda draw, _: draw(st.sampled_from([2, 0.5, -1.5])), lambda x, n: x * n),
    "plus": Link(lambda draw, _: draw(st.sampled_from([1, 0.25])), lambda x, n: x + n),
    "square": Link(_nothing, lambda x, _: x * x),
    "twice": Link(_nothing, lambda x, _: x + x.sin()),
    "mean": Link(_dim, lambda x, d: x - x.mean(d, keepdim=True)),
    "sum": Link(_dim, lambda x, d: x.sum(d)),
    "sum_all": Link(_nothing, lambda x, _: x * x.sum()),
    "amax": Link(_dim, lambda x, d: x - x.amax(d, keepdim=True)),
    "softmax": Link(_dim, torch.softmax),
    "cumsum": Link(_dim, torch.cumsum),
    "sort": Link(_dim, lambda x, d: x.sort(d).values),
    "transpose": Link(lambda draw, s: (_dim(draw, s), _dim(draw, s)), lambda x, d: x.transpose(*d)),
    "flip": Link(_dim, lambda x, d: x.flip(d)),
    "narrow": Link(_cut, lambda x, cut: x.narrow(*cut)),
    "select": Link(_cut, lambda x, cut: x.select(*cut[:2])),
    "unsqueeze": Link(_dim, lambda x, d: x.unsqueeze(d)),
    "reshape": Link(_split, lambda x, shape: x.reshape(shape)),
    "expand": Link(lambda draw, _: draw(st.integers(1, 3)), lambda x, n: x.expand(n, *x.shape)),
    "cat": Link(_dim, lambda x, d: torch.cat([x, x * 2], d)),
    "split": Link(_cut, lambda x, cut: torch.cat(x.split(cut[2], cut[0])[::-1], cut[0])),
    "outer": Link(_nothing, lambda x, _: x.flatten()[:4].unsqueeze(1) @ x.flatten()[:4].unsqueeze(0)),
    "square_matrix": Link(_nothing, lambda x, _: x.flatten(1) @ x.flatten(1).t() if x.ndim > 1 else x),
    "pick": Link(_cut, lambda x, cut: x.index_select(cut[0], index_for(x, [cut[1], 0, cut[1]], Replicate()))),
    "mask": Link(_nothing, lambda x, _: x.masked_fill(x > 0.5, 0.0)),
    "write": Link(_nothing, lambda x, _: (x * 1).add_(x).mul_(0.5)),
    "write_part": Link(_nothing, lambda x, _: (x + 1).clamp_(max=1)),
    "norm": Link(_dim, lambda x, d: x / (1 + torch.linalg.vector_norm(x, dim=d, keepdim=True))),
    "var": Link(_dim, lambda x, d: x * x.var(d, correction=0, keepdim=True)),
}


class Chain(NamedTuple):
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    links: tuple[tuple[str, Any], ...]


@st.composite
def chains(draw: Any) -> Chain:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    options = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    placements = tuple(draw(st.sampled_from(options)) for _ in mesh)
    links, x = [], torch.zeros(shape, dtype=torch.float64)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(LINKS)))
        if x.ndim == 0 or x.numel() > 400:
            break
        numbers = LINKS[name].pick(draw, tuple(x.shape))
        x = LINKS[name].run(x, numbers)
        links.append((name, numbers))
    return Chain(mesh, shape, placements, tuple(links))


def _run(x: Any, chain: Chain) -> Any:
    for name, numbers in chain.links:
        x = LINKS[name].run(x, numbers)
    return x


def _as_plain(chain: Chain) -> None:
    """Compares a chain with plain torch, with and without autograd."""
    mesh = mesh_of(chain.mesh)
    plain = torch.randn(chain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain.requires_grad_()
    expected = _run(plain, chain)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), plain)
    x = place(plain.detach(), mesh, chain.placements).requires_grad_()
    result = _run(x, chain)
    (gradient,) = torch.autograd.grad(result.sin().sum(), x)
    with torch.no_grad():
        fast = [_run(x, chain) for _ in range(3)][-1]
    got = [one.full_tensor() for one in (result, gradient, fast)]
    torch.testing.assert_close(got, [expected, wanted, expected], rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_chains_of_ops_equal_plain_torch(ranks: ThreadWorlds, count: int) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(chain=chains())
    def every(chain: Chain) -> None:
        ranks(_as_plain, chain, world_size=math.prod(chain.mesh))

    every()


# ---- cases that torch.distributed.tensor is known to get wrong ----


R, P, AVG = Replicate(), Partial(), Partial("avg")
S0, S1, S2, S3 = (Shard(d) for d in range(4))


EVEN = ((8, 4), (8, 4))
# name -> (function, shapes of its inputs, placements to try)
CASES: dict[str, tuple[Callable[..., Any], Shapes, tuple[tuple[Placement, ...], ...]]] = {
    "conv1d": (F.conv1d, ((4, 4, 9), (8, 4, 3)), tuple(itertools.product((S0, S1, S2, P), (R, S0, S1, P)))),
    "conv2d with bias": (
        F.conv2d,
        ((4, 4, 6, 6), (8, 4, 3, 3), (8,)),
        ((S0, R, R), (S1, S1, R), (R, S0, S0), (P, R, R), (R, R, P), (S2, R, S0), (S3, S0, R)),
    ),
    "conv_transpose2d": (
        F.conv_transpose2d,
        ((4, 4, 5, 5), (4, 8, 3, 3)),
        tuple(itertools.product((S0, S1, S3, P), (R, S0, S1))),
    ),
    "scatter_add_": (
        lambda x, src: (x * 1).scatter_add_(0, index_for(x, [[0, 1, 7, 7], [3, 3, 0, 1]], R), src[:2]),
        EVEN,
        ((S0, S0), (S1, S1), (S0, R), (S1, S0)),
    ),
    "linear of a vector, with bias": (F.linear, ((8,), (4, 8), (4,)), ((R, R, R), (S0, S1, R), (R, S0, S0))),
    "a number added to a pending sum": (lambda x: x + 3, ((8, 4),), ((P,), (AVG,), (S0,))),
    "a cached number": (lambda x: (x + 1) + (x + 2) + (x * 2) * (x * 3), ((8, 4),), ((P,), (S0,))),
    "a 0-dim tensor added to a pending sum": (lambda x: x + torch.tensor(2.0), ((8, 4),), ((P,), (S1,))),
    "mean, uneven": (lambda x: x.mean(0) + x.mean(), ((5, 3),), ((S0,), (S1,), (P,))),
    "mean, empty shards": (lambda x: x.mean(), ((2, 3),), ((S0,),)),
    "norm of a pending sum": (
        lambda x: torch.linalg.vector_norm(x) + x.norm(3) + torch.linalg.norm(x),
        ((8, 4),),
        ((P,), (S0,), (S1,)),
    ),
    "extremum and variance of a pending sum": (
        lambda x: x.amax(0) + x.max() + x.var(0) + x.std(),
        ((8, 4),),
        ((P,), (S0,)),
    ),
    "index_put, accumulated": (
        lambda x, v: torch.index_put(x, (index_for(x, [1, 1], R),), v[:2], accumulate=True),
        EVEN,
        ((S0, S0), (S1, S1), (S0, P)),
    ),
    "indexing by a tensor": (lambda x: x[index_for(x, [6, 0, 6], R)], ((8, 4),), ((S0,), (S1,), (P,))),
    "negative dims": (
        lambda x: x.sum(-2) + x.cumsum(-2)[-1] + x.softmax(-2)[0] + x.flip(-2)[1] + x.unsqueeze(-3)[0, 0],
        ((8, 4),),
        ((S0,), (S1,), (P,)),
    ),
    "a gather smaller than its source": (
        lambda x: x.gather(0, index_for(x, [[7, 0], [1, 1]], R)),
        ((8, 4),),
        ((S0,), (S1,), (P,)),
    ),
    "matmul, both dims": (torch.matmul, ((8, 4), (4, 8)), tuple(itertools.product((S0, S1, P, R), repeat=2))),
    "flatten an inner shard and split it again": (
        lambda x: x.flatten(0, 1).mul(2).unflatten(0, (4, 8)),
        ((4, 8, 4),),
        ((S0,), (S1,), (S2,)),
    ),
    "trace and prod": (lambda x: x[:4].trace() + x[:2, :2].prod(), ((8, 4),), ((S0,), (S1,), (P,))),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), ((8, 4),), ((S0,), (S1,), (P,))),
}


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_cases_that_torch_gets_wrong(name: str) -> None:
    fn, shapes, combinations = CASES[name]
    for placements in combinations:
        plain = [t.requires_grad_() for t in _inputs(shapes)]
        placed = [
            place(t.detach(), mesh_of((4,)), (p,)).requires_grad_()
            for t, p in zip(plain, placements, strict=True)
        ]
        assert_like_plain(fn, plain, placed, placements)


# ---- rules of ops that run on GPUs only ----


aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 7, 5, 32, 16  # uneven on 4 and on 2 ranks, and nowhere empty on 2


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def _attention_calls() -> Iterator[tuple[Any, tuple[Any, ...], int]]:
    """Yields (op, arguments, expected number of rows): each forward, then its backward."""
    q, k, v, grad = (_half(BATCH, HEADS, LENGTH, WIDTH) for _ in range(4))
    for bias in (_half(BATCH, HEADS, LENGTH, LENGTH), _half(BATCH, 1, LENGTH, LENGTH)):
        op = aten._scaled_dot_product_efficient_attention.default
        out, logsumexp, seed, offset = op(q, k, v, bias, True)
        yield op, (q, k, v, bias, True), 2
        given = (grad, q, k, v, bias, out, logsumexp, seed, offset, 0.0, [True] * 4)
        yield aten._scaled_dot_product_efficient_attention_backward.default, given, 2
        op = aten._scaled_dot_product_cudnn_attention.default
        made = op(q, k, v, bias, True)
        yield op, (q, k, v, bias, True), 2
        given = (grad, q, k, v, made[0], made[1], made[6], made[7], bias, *made[2:6], 0.0, False)
        yield aten._scaled_dot_product_cudnn_attention_backward.default, given, 2
        op = aten._scaled_dot_product_fused_attention_overrideable.default
        made = op(q, k, v, bias)
        yield op, (q, k, v, bias), 2
        given = (grad, q, k, v, bias, [True] * 4, *made[:6], 0.0, False, made[6], made[7])
        yield aten._scaled_dot_product_fused_attention_overrideable_backward.default, given, 2
    op = aten._scaled_dot_product_flash_attention.default
    made = op(q, k, v)
    yield op, (q, k, v), 2
    yield op, (q, k, v, 0.5), 0  # dropout
    given = (grad, q, k, v, *made[:6], 0.0, False, made[6], made[7])
    yield aten._scaled_dot_product_flash_attention_backward.default, given, 2
    x, weight = _half(BATCH, LENGTH, WIDTH), _half(WIDTH)
    op = aten._fused_rms_norm.default
    yield op, (x, [WIDTH], weight, None), 2
    yield (
        aten._fused_rms_norm_backward.default,
        (x, x, [WIDTH], op(x, [WIDTH], weight, None)[1], weight, [True, True]),
        2,
    )


def _call(op: Any, args: tuple[Any, ...], mesh: MeshInfo) -> OpCall:
    replicated = (REPLICATE,) * mesh.ndim
    specs: list[DTensorSpec] = []

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        specs.append(DTensorSpec.of(mesh, replicated, leaf.shape, leaf.stride(), leaf.dtype))
        return specs[-1]

    stated = tree_map(described, args)
    made = op(*args)
    metas = tuple(
        TensorMeta(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else None for t in made
    )
    return OpCall(op, stated, {}, tuple(specs), metas)


@pytest.fixture
def mesh(fake_world: Any) -> MeshInfo:
    fake_world(2)
    return mesh_info(init_device_mesh("cpu", (2,)))


def test_rows_of_gpu_ops_give_each_rank_its_shard(mesh: MeshInfo) -> None:
    seen = set()
    for op, args, count in _attention_calls():
        seen.add(op)
        try:
            call = _call(op, args, mesh)
        except NotImplementedError:  # torch 2.11 has no meta kernel for one of them
            assert BEFORE_213
            continue
        strategy = rules_by_op.get(op)(call)
        assert len(strategy.rows) == count, op
        for row in strategy.rows:
            inputs, outputs = [(p,) for p in row.inputs], [(p,) for p in row.outputs]
            assert rank_check.every_rank_can(call, strategy, inputs, outputs), (op, row)
    assert seen == DEVICE_ONLY


# Op of (data, weight, bias, running mean, running var). Without running statistics where torch without CUDA would write
# to them. The layer norm of CUDA refuses parameters of another dtype than the data's.
NORMS: dict[str, Callable[..., Any]] = {
    "native, training": lambda x, w, b, *_: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    "native": lambda *given: aten.native_batch_norm(*given, False, 0.1, 1e-5),
    "legit": lambda x, w, b, *_: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
    "no training": lambda *given: aten._native_batch_norm_legit_no_training(*given, 0.1, 1e-5),
    "cudnn": lambda x, w, b, *_: aten.cudnn_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    "layer_norm": lambda x, w, *_: aten.native_layer_norm(x, w.shape, *2 * [w.to(x.dtype)], 1e-5),
    "rms_norm": lambda x, w, *_: aten._fused_rms_norm(x, w.shape, w, 1e-5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", ["as the data", "float32"])
def test_norms_on_gpus_save_what_torch_saves(fake_world: Any, dtype: torch.dtype, parameters: str) -> None:
    """Compares shapes and dtypes on a fake GPU mesh, since statistics on a CPU have other dtypes."""
    fake_world(2)
    mesh = DeviceMesh("cuda", [0, 1])
    of_channels = dtype if parameters == "as the data" else torch.float32

    def described(results: Any) -> list[tuple[Any, ...]]:
        return [(one.shape, one.dtype, one.device.type) for one in results]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        whole = torch.empty(8, 8, 4, 8, dtype=dtype, device="cuda")
        four = [torch.empty(8, dtype=of_channels, device="cuda") for _ in range(4)]
        given = [distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in four]
        for name, op in NORMS.items():
            for dim in (0, 2):
                x = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
                assert described(op(x, *given)) == described(op(whole, *four)), (name, dim)
