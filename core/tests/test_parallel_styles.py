"""Parallel styles other than Colwise and Rowwise, meshes of several dims, cross entropy of sharded classes."""

import copy
import itertools
import pickle
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dtbench_core.parallel as ours
from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from core.tests.parallel_models import MLP, WIDTH, assert_same_parameters, assert_trains_alike, seeded
from core.tests.placing import S0, S1, R, assert_like_plain, place
from dtbench_core import (
    DTensor,
    MeshError,
    MixedTensorError,
    Partial,
    Placement,
    RaggedShard,
    Shard,
    StridedShard,
    count_collectives,
)
from dtbench_core.errors import ArgumentError, CoreError
from dtbench_core.parallel import (
    ColwiseParallel,
    LayoutsError,
    PairwiseParallel,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    cross_entropy,
    loss_parallel,
    parallelize_linear,
    parallelize_mlp,
    parallelize_module,
)


def _data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _assert_is(got: DTensor, placement: Placement, whole: Tensor) -> None:
    assert got.placements == (placement,)
    torch.testing.assert_close(got.full_tensor(), whole)


def _assert_part(got: Tensor, mesh: Any, placement: Placement, whole: Tensor) -> None:
    assert not isinstance(got, DTensor)
    torch.testing.assert_close(DTensor.from_local(got, mesh, [placement]).full_tensor(), whole)


# --- pairs -----------------------------------------------------------------------------------------


def _mlp(linears: int) -> nn.Module:
    """Returns linear layers of different widths with ReLUs between."""
    widths = [WIDTH, 10, 6, 12, 5, 7][: linears + 1]
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


PAIR = [(S0,), (S0,), (S1,), (R,)]  # the placements of two weights and biases


@pytest.mark.parametrize(("linears", "placements"), [(2, PAIR), (5, [*PAIR, *PAIR, None, None])])
@on_worlds
def test_pairs_of_linears(linears: int, placements: list[Any]) -> None:
    mesh = mesh_of((4,))
    plain, parallel = seeded(_mlp, linears), seeded(_mlp, linears)
    parallelize_module(parallel, mesh, PairwiseParallel())
    assert [getattr(p, "placements", None) for p in parallel.parameters()] == placements
    assert_trains_alike(plain, parallel, _data(3, WIDTH))


@on_worlds
def test_pairs_are_found_in_submodules() -> None:
    """At any depth and beside a single Linear, but not inside a pair."""
    mesh = mesh_of((4,))
    plain = seeded(lambda: nn.Sequential(nn.Sequential(MLP()), nn.Sequential(nn.Linear(WIDTH, WIDTH), MLP())))
    model = parallelize_module(copy.deepcopy(plain), mesh, PairwiseParallel())
    sharded = {name.rsplit(".", 2)[0] for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {"0.0", "1.1"}
    assert model[0][0].up.weight.placements == (S0,)
    assert_trains_alike(plain, model, _data(2, WIDTH))

    outer = nn.ModuleDict({"up": nn.Linear(4, 4), "block": MLP(), "down": nn.Linear(4, 4)})
    parallelize_module(outer, mesh, PairwiseParallel())
    assert isinstance(outer["down"].weight, DTensor) and not isinstance(outer["block"].up.weight, DTensor)
    with pytest.warns(UserWarning, match="applied to a LayerNorm, found no module with two nn.Linear"):
        parallelize_module(nn.LayerNorm(4), mesh, PairwiseParallel())
    with pytest.raises(
        ArgumentError, match="PairwiseParallel got a Linear whose weight is a DTensor already"
    ):
        parallelize_module(outer, mesh, PairwiseParallel())


@on_worlds
def test_pairs_with_conversions() -> None:
    """Tests conversion functions and the layouts that replace them."""
    mesh = mesh_of((4,))
    plain, x = seeded(MLP), _data(8, WIDTH)
    expected, part = plain(x), place(x, S0).to_local()

    def cut(*args: Any, **options: Any) -> Any:
        return parallelize_module(copy.deepcopy(plain), mesh, PairwiseParallel(*args, **options))

    _assert_part(
        cut(ours.make_input_reshard_replicate, ours.make_output_reshard_tensor)(part), mesh, S0, expected
    )
    _assert_part(cut(input_layouts=S0, output_layouts=S0)(part), mesh, S0, expected)
    _assert_is(cut(prepare_output=ours.make_output_replicate_1d)(x), R, expected)
    _assert_is(cut(output_layouts=S1, use_local_output=False)(x), S1, expected)


@on_worlds(world_size=2)
def test_single_modules() -> None:
    """Tests parallelize_linear and parallelize_mlp, and their errors."""
    mesh = mesh_of((1, 2), ("dp", "tp"))
    assert parallelize_linear(nn.Linear(4, 4), mesh, tp_mesh_dim="tp").weight.placements == (S0,)
    assert parallelize_linear(nn.Linear(4, 4), mesh, RowwiseParallel(), 1).weight.placements == (S1,)
    mlp = parallelize_mlp(MLP(), mesh, tp_mesh_dim=-1)
    assert mlp.down.weight.placements == (S1,) and mlp.down.weight.device_mesh == mesh["tp"]
    linear, mlp = nn.Linear(2, 2), MLP()
    refused: list[tuple[type[Exception], str, Any, tuple[Any, ...]]] = [
        (UnsupportedModuleError, "Expect a torch.nn.Linear module but rec", parallelize_linear, (mlp, mesh)),
        (PlanError, "Expect a ParallelStyle object but received <cl", parallelize_linear, (linear, mesh, 3)),
        (NotImplementedError, "is not supported!", parallelize_linear, (linear, mesh, PairwiseParallel())),
        (
            NotImplementedError,
            "Only support PairwiseParallel for MLP",
            parallelize_mlp,
            (mlp, mesh, Doubling()),
        ),
        (
            RuntimeError,
            "More than one nn.Linear needed for a MLP.",
            parallelize_mlp,
            (nn.Sequential(linear), mesh),
        ),
    ]
    for kind, message, function, args in refused:
        with pytest.raises(kind, match=re.escape(message)) as raised:
            function(*args)
        assert isinstance(raised.value, CoreError) and isinstance(raised.value, RuntimeError)


# --- sequences -------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A user's norm, with a parameter in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RMSNorm(WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        return self.inner(x) * self.weight * power


@pytest.mark.parametrize("make", (lambda: nn.LayerNorm(WIDTH), Scale, nn.Dropout))
@pytest.mark.parametrize("length", [8, 5])
@on_worlds
def test_sequences(length: int, make: Any) -> None:
    mesh = mesh_of((4,))
    plain, parallel = seeded(make), seeded(make)
    parallelize_module(parallel, mesh, SequenceParallel())
    assert all(p.placements == (R,) for p in parallel.parameters())
    whole = _data(2, length, WIDTH)
    x, y = whole.clone().requires_grad_(), place(whole, R).requires_grad_()
    torch.manual_seed(3)
    expected = plain(x)
    torch.manual_seed(3)
    got = parallel(y)
    _assert_is(got, S1, expected)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    (got.full_tensor() * weights).sum().backward()
    torch.testing.assert_close(y.grad.full_tensor(), x.grad)
    assert_same_parameters(parallel, plain)


@on_ranks
def test_parallelized_modules_are_pickled() -> None:
    mesh, x = mesh_of((4,)), _data(4, 8)
    style = PrepareModuleInput(input_layouts=R, desired_input_layouts=R, use_local_output=True)
    for plan in ({"0": style, "1": SequenceParallel(use_local_output=True)}, PairwiseParallel()):
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        parallelize_module(net, mesh, plan)
        assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x)), plan


@on_worlds
def test_sequences_of_another_dim() -> None:
    mesh = mesh_of((4,))
    plain, whole = seeded(Scale), _data(8, WIDTH)
    parallel = parallelize_module(
        copy.deepcopy(plain), mesh, SequenceParallel(sequence_dim=0, use_local_output=True)
    )
    part = place(whole, S0).to_local()
    _assert_part(parallel(part, 2.0), mesh, S0, plain(whole, 2.0))
    with pytest.raises(ArgumentError, match="Scale under SequenceParallel got no positional argument"):
        parallel(x=part)
    with pytest.raises(ArgumentError, match="got a Scale whose weight is a DTensor already"):
        parallelize_module(parallel, mesh, SequenceParallel())


# --- inputs and outputs ----------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Recorder(nn.Module):
    """Records its inputs and returns them in the requested container."""

    def forward(self, *args: Any, pack: Any = tuple, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return pack(args)


@on_worlds
def test_prepared_inputs() -> None:
    mesh = mesh_of((4,))
    whole = _data(4, 8)
    part = place(whole, S0).to_local()

    def seen(style: ParallelStyle, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        module = parallelize_module(Recorder(), mesh, style)
        module(*args, **kwargs)
        return module.seen

    style = PrepareModuleInput(
        input_layouts=(S0, None, Partial(), S1),
        desired_input_layouts=(R, None, S1, None),
        input_kwarg_layouts={"mask": R},
        desired_input_kwarg_layouts={"mask": S1},
    )
    args, kwargs = seen(style, part, "left alone", whole, whole, mask=whole, other=whole)
    assert args[1] == "left alone" and kwargs["other"] is whole
    _assert_is(args[0], R, whole)
    _assert_is(args[2], S1, 4 * whole)
    assert args[3].placements == (S1,) and args[3].shape == (4, 32)
    _assert_is(kwargs["mask"], S1, whole)
    # A DTensor that is not where its layout says is moved from where it is.
    ((got,), _) = seen(PrepareModuleInput(input_layouts=S0, desired_input_layouts=S0), place(whole, S1))
    _assert_is(got, S0, whole)
    local = PrepareModuleInput(input_layouts=S0, desired_input_layouts=R, use_local_output=True)
    torch.testing.assert_close(seen(local, part), ((whole,), {}))
    with pytest.raises(LayoutsError, match="Recorder got 2 positional inputs for 1 input_layouts"):
        seen(local, part, part)
    with pytest.raises(ArgumentError, match=r"input 0 is str, .*layout is S\(0\)"):
        seen(local, "text")


@on_worlds
def test_prepared_outputs() -> None:
    mesh = mesh_of((4,))
    whole = _data(4, 8)
    part = place(whole, S0).to_local()
    style = PrepareModuleOutput(output_layouts=(S0, None), desired_output_layouts=(R, None))
    module = parallelize_module(Recorder(), mesh, style)
    for pack in (tuple, list, lambda args: Pair(*args)):
        got = module(part, "text", pack=pack)
        assert type(got) is type(pack((1, 2))) and got[1] == "text"
        torch.testing.assert_close(got[0], whole)
    with pytest.raises(LayoutsError, match="Recorder returned 3 outputs for 2 output_layouts"):
        module(part, 1, 2)
    kept = PrepareModuleOutput(output_layouts=S0, desired_output_layouts=S1, use_local_output=False)
    _assert_is(parallelize_module(nn.Identity(), mesh, kept)(part), S1, whole)

    both = PrepareModuleInputOutput(
        input_layouts=S0,
        desired_input_layouts=R,
        output_layouts=R,
        desired_output_layouts=S0,
        use_local_input=True,
    )
    x, y = part.clone().requires_grad_(), whole.clone().requires_grad_()
    out = parallelize_module(nn.Softmax(dim=0), mesh, both)(x)
    _assert_part(out.detach(), mesh, S0, whole.softmax(0))
    out.square().sum().backward()
    y.softmax(0).square().sum().backward()
    _assert_part(x.grad, mesh, S0, y.grad)


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (LayoutsError, lambda: PrepareModuleInput(input_layouts=S0)),
        (LayoutsError, lambda: PrepareModuleInput(desired_input_layouts=S0)),
        (LayoutsError, lambda: PrepareModuleInput(input_layouts=(S0, S0), desired_input_layouts=(S0,))),
        (
            LayoutsError,
            lambda: PrepareModuleInput(input_kwarg_layouts={"x": S0}, desired_input_kwarg_layouts={"y": S0}),
        ),
        (LayoutsError, lambda: PrepareModuleOutput(output_layouts=(S0, S0), desired_output_layouts=S0)),
        (ValueError, lambda: PrepareModuleInput(input_layouts="R", desired_input_layouts=R)),
    ],
)
def test_invalid_layouts_are_refused(error: type[Exception], make: Callable[[], object]) -> None:
    messages = {
        LayoutsError: "expected the same (number|names)",
        ValueError: "got input_layouts='R'.*expected one",
    }
    with pytest.raises(error, match=messages[error]):
        make()


@on_worlds
def test_conversions() -> None:
    mesh, two_dims = mesh_of((4,)), mesh_of((2, 2), ("dp", "tp"))
    whole = _data(4, 8)
    placed = place(whole, S1)
    rows, columns = place(whole, S0).to_local(), placed.to_local()
    inputs: list[tuple[Any, Any, Any]] = [
        (ours.make_input_replicate_1d, whole, R),
        (ours.make_input_shard_1d, rows, S0),
        (ours.make_input_shard_1d_last_dim, columns, S1),
        (ours.make_input_reshard_replicate, rows, R),
        (lambda x, mesh: ours.make_input_shard_1d(x, mesh, dim=1), columns, S1),
    ]
    for make, local, placement in inputs:
        for one in (local, (local,), placed):  # plain, as hooks get it, and a DTensor
            _assert_is(make(one, mesh), placement, whole)
        with mesh:
            assert make(local, None).placements == (placement,)
    outputs: list[tuple[Any, Any, Any]] = [
        (ours.make_output_replicate_1d, R, True),
        (ours.make_output_shard_1d, S0, True),
        (lambda x: ours.make_output_shard_1d(x, dim=1), S1, True),
        (ours.make_output_tensor, R, False),
        (ours.make_output_reshard_tensor, S0, False),
        (ours.make_sharded_output_tensor, S1, False),
    ]
    for make, placement, distributed in outputs:
        got = make(placed)
        assert isinstance(got, DTensor) is distributed
        _assert_is(got if distributed else DTensor.from_local(got, mesh, [placement]), placement, whole)
    terms = DTensor.from_local(whole, mesh, [Partial()])
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: ours.make_input_replicate_1d([whole], mesh), ArgumentError, "got list as the input"),
        (lambda: ours.make_output_tensor(whole), ArgumentError, r"got (Local)?Tensor as the output"),
        (lambda: ours.make_sharded_output_tensor(terms), ArgumentError, "expected a DTensor that is sharded"),
        (
            lambda: ours.make_input_replicate_1d(whole, two_dims),
            MeshError,
            r"2x2 cpu .* expected a mesh with one dim",
        ),
    ]
    for call, kind, words in refused:
        with pytest.raises(kind, match=words):
            call()


# --- meshes, styles of one's own -------------------------------------------------------------------


class Doubling(ParallelStyle):
    """A style that doubles the output and records its mesh."""

    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.meshes.append(device_mesh)
        module.register_forward_hook(lambda mod, inputs, output: 2 * output)
        return module


@on_worlds
def test_parallelize_module_on_a_mesh_dim() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for dim, index in (("tp", 1), (0, 0), (-1, 1)):
        plain, parallel = seeded(MLP), seeded(MLP)
        doubling = Doubling()
        styles: Any = {"up": ColwiseParallel(), "down": RowwiseParallel(), "": doubling}
        parallelize_module(parallel, mesh, styles, dim)
        sub = parallel.up.weight.device_mesh
        assert sub == mesh[("dp", "tp")[index]] and doubling.meshes == [sub]
        assert sub.get_group() is mesh.get_group(index)
        torch.testing.assert_close(parallel(_data(3, WIDTH)), 2 * plain(_data(3, WIDTH)))
    # A slice, and as the first version of the API was called: dim 0 when none is named.
    plan: Any = {"up": ColwiseParallel()}
    assert parallelize_module(MLP(), mesh["tp"], plan, src_data_rank=1).up.weight.shape == (16, 8)
    assert parallelize_module(MLP(), mesh, plan).up.weight.device_mesh == mesh["dp"]


# ---- cross entropy of sharded classes ----


def _random(
    shape: tuple[int, ...], target_shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(shape, dtype=torch.float64, generator=rng)
    target = torch.randint(0, classes, target_shape, generator=rng)
    return logits, target, torch.rand(classes, dtype=torch.float64, generator=rng) + 0.5


def _compare(logits: Tensor, target: Tensor, placements: list[Any], sent: int | None, **options: Any) -> None:
    """Compares loss and gradient with those of one device. `sent`: the most bytes that may be sent."""
    x = logits.clone().requires_grad_()
    expected = F.cross_entropy(x, target, **options)
    factor = torch.linspace(0.5, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
    (expected * factor).sum().backward()
    dt = place(logits, *placements, mesh=(2, 2)).requires_grad_()
    with count_collectives() as forward, loss_parallel():
        loss = F.cross_entropy(dt, target, **options)
    scaled = (loss * place(factor, mesh=(2, 2))).sum()
    with count_collectives() as backward:
        scaled.backward()
    torch.testing.assert_close(loss.full_tensor(), expected, equal_nan=True)
    torch.testing.assert_close(dt.grad.full_tensor(), x.grad)
    assert loss.dtype == expected.dtype
    if sent is not None:
        assert dt.grad.placements == dt.placements
        assert forward.bytes.total() == forward.bytes["all_reduce"] <= sent
        assert backward.calls.total() == 0


@on_worlds
def test_reductions() -> None:
    logits, target, weight = _random((6, 10), (6,), 10)
    layouts = ([R, S1], [S0, S1], [S1, S1], [S1, S0])
    cases = [*(("mean", layout) for layout in layouts), ("none", layouts[1]), ("sum", layouts[1])]
    for (reduction, placements), weights, smoothing, ignored in itertools.product(
        cases, (None, weight), (0.0, 0.3), (-100, 1)
    ):
        options = {"weight": weights, "label_smoothing": smoothing, "ignore_index": ignored}
        _compare(logits, target, placements, 8 * 80, reduction=reduction, **options)


@on_worlds
def test_shapes_and_layouts() -> None:
    for shape, target_shape, classes, placements in (
        ((4, 7, 3), (4, 3), 7, [Shard(2), S1]),
        ((2, 5, 2, 3), (2, 2, 3), 5, [S0, S1]),
        ((10,), (), 10, [R, S0]),
        ((10,), (), 10, [S0, S0]),
        ((4, 3), (4,), 3, [S1, S1]),  # the last rank has no class
        ((3, 4), (3,), 4, [S0, S1]),  # samples that the ranks cannot share evenly
        ((4, 9), (4,), 9, [R, RaggedShard(1, (2, 7))]),
    ):
        logits, target, weight = _random(shape, target_shape, classes)
        _compare(logits, target, placements, 8 * 80, weight=weight, label_smoothing=0.1)
    logits, target, weight = _random((6, 8), (6,), 8)
    # Shards that are no range of classes, targets without class numbers, other dims: computed by torch's own ops.
    _compare(logits, target, [StridedShard(1, split_factor=2), R], None, weight=weight)
    _compare(logits, logits.softmax(1), [R, S1], None, weight=weight, label_smoothing=0.1)
    _compare(logits, target, [S0, R], None, weight=weight)
    # Values at the edge.
    logits[0, :4] = -torch.inf
    logits[1] *= 1e4
    _compare(logits, torch.tensor([7, 1, 2, 3, 4, 5]), [R, S1], 8 * 80, reduction="sum")
    _compare(logits.float(), target, [S0, S1], 8 * 80)


@on_worlds
def test_ignored_samples() -> None:
    """The mean of no samples is NaN and its gradient zero. All samples of one rank may be ignored."""
    logits, target, _ = _random((4, 6), (4,), 6)
    target[:2] = -100
    _compare(logits, target, [S0, S1], 8 * 80)  # all that the first rank of mesh dim 0 has
    _compare(logits, target, [S0, R], None)
    dt = place(logits, R, S1, mesh=(2, 2)).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(dt, torch.full((4,), -100))
    loss.backward()
    assert loss.full_tensor().isnan()
    assert not dt.grad.full_tensor().any()


@on_worlds
def test_invalid_targets_raise_on_every_rank() -> None:
    logits, target, _ = _random((4, 6), (4,), 6)
    for placements in ([R, S1], [S0, S1], [S1, S0]):
        dt = place(logits, *placements, mesh=(2, 2))
        for wrong, reduction in ((6, "mean"), (-1, "none"), (100, "sum")):
            bad = target.clone()
            bad[3] = wrong  # with batch shards, on some ranks alone
            with loss_parallel(), pytest.raises(IndexError, match=r"1 invalid targets.*\[0, 6\)"):
                F.cross_entropy(dt, bad, reduction=reduction)
    with loss_parallel():
        plain = F.cross_entropy(logits, target)  # what is not distributed is not touched
    torch.testing.assert_close(plain, F.cross_entropy(logits, target))
    with pytest.raises(MixedTensorError):
        F.cross_entropy(dt, target)


@on_worlds
def test_loss_parallel_and_cross_entropy_agree() -> None:
    logits, target, weight = _random((6, 12), (6,), 12)
    x = logits.clone().requires_grad_()
    module = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2)
    expected = module(x, target)
    expected.backward()
    there = [place(one, R) for one in (target, weight)]

    def calls(dt: DTensor) -> Any:
        with loss_parallel(), loss_parallel():
            yield module(dt, target)
        yield cross_entropy(dt, target, weight, label_smoothing=0.2)
        yield cross_entropy(input=dt, target=there[0], weight=there[1], label_smoothing=0.2)
        yield F.cross_entropy(dt, *there, label_smoothing=0.2)  # without the context, with DTensors alone

    terms = DTensor.from_local(logits / 4, mesh_of((4,)), [Partial()])
    for dt in (place(logits, S1).requires_grad_(), terms.requires_grad_()):
        for loss in calls(dt):
            torch.testing.assert_close(loss.full_tensor(), expected)
            (grad,) = torch.autograd.grad(loss, dt)
            torch.testing.assert_close(grad.full_tensor(), x.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda values: F.log_softmax(values, 1),
        lambda values: values.softmax(1),
        lambda values: F.nll_loss(values.log_softmax(1), values.argmin(1)),
    ],
    ids=["log_softmax", "softmax", "nll_loss"],
)
@on_worlds
def test_loss_parallel_leaves_other_ops_unchanged(function: Callable[[Any], Tensor]) -> None:
    """Other ops on class-sharded logits give the same results inside the context."""
    logits = _random((6, 12), (6,), 12)[0]
    with loss_parallel():
        assert_like_plain(function, [logits.requires_grad_()], [place(logits.detach(), S1).requires_grad_()])


@on_ranks
def test_precision_and_bytes() -> None:
    """Half precision is summed in float32, also under autocast. Nothing as large as the logits is sent."""
    rng = torch.Generator().manual_seed(1)
    logits, target = torch.randn(8, 4096, generator=rng), torch.randint(0, 4096, (8,), generator=rng)
    half = logits.bfloat16()
    dt = place(half, S1).requires_grad_()
    there = place(target, R)
    with count_collectives() as count:
        loss = F.cross_entropy(dt, there)
        loss.backward()
    # The maxima in bfloat16, with what tells a NaN, and two sums in float32: the logits take 65536 bytes.
    assert dict(count.bytes) == {"all_reduce": 2 * 8 * 2 + 2 * 8 * 4}
    assert loss.dtype == dt.grad.dtype == torch.bfloat16
    x = half.float().requires_grad_()
    expected = F.cross_entropy(x, target)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor().float(), expected.detach(), rtol=2**-8, atol=0)
    torch.testing.assert_close(dt.grad.full_tensor().float(), x.grad, rtol=2**-7, atol=1e-8)
    with torch.autocast("cpu", torch.bfloat16), loss_parallel():
        cast = F.cross_entropy(dt, target)
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast.full_tensor(), expected)


@on_ranks
def test_second_derivatives() -> None:
    logits, target, weight = _random((3, 8), (3,), 8)
    x = logits.clone().requires_grad_()
    dt = place(logits, S1).requires_grad_()

    def twice(values: Any, *rest: Any) -> Any:
        loss = F.cross_entropy(values, *rest, label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, values, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), values)[0]

    there = [place(one, R) for one in (target, weight)]
    torch.testing.assert_close(twice(dt, *there).full_tensor(), twice(x, target, weight))
