"""Programs that combine DTensors with other parts of PyTorch, compared with the same programs on plain tensors."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from core.tests.coverage.judge import difference
from core.tests.gloo_world import on_ranks, on_worlds
from core.tests.placing import full, place, sharded
from dtbench_core import (
    CoreError,
    DTensor,
    MixedTensorError,
    Placement,
    Replicate,
    Shard,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 17))


class Side:
    """Makes the tensors of a program: plain ones, or DTensors on a mesh of four ranks."""

    def __init__(self, distributed: bool) -> None:
        self.distributed = distributed

    def put(self, whole: torch.Tensor, placement: Placement = R, grad: bool = False) -> Any:
        tensor = place(whole, placement) if self.distributed else whole.clone()
        return tensor.requires_grad_(grad)

    def rows(self, placement: Placement = S0) -> Any:
        return self.put(randn(8, 4), placement)

    def spread(self, module: nn.Module, placement: Placement = S0) -> Any:
        return sharded(module, placement) if self.distributed else copy.deepcopy(module)

    def net(self, placement: Placement = S0) -> Any:
        torch.manual_seed(1)
        return self.spread(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), placement)

    def linear(self) -> Any:
        torch.manual_seed(1)
        return self.spread(nn.Linear(4, 8))


Program = Callable[[Side], Any]

# They compare with a plain tensor: the core raises its own error.
REFUSED = ("nn.Transformer", "nn.TransformerEncoder")


def _assert_same(name: str, program: Program) -> None:
    """Compares every leaf of the result; an error on plain tensors must have the same class on DTensors."""
    try:
        want = tree_flatten(program(Side(distributed=False)))[0]
    except Exception as error:
        with pytest.raises(type(error)):
            program(Side(distributed=True))
        return
    if name in REFUSED:
        with pytest.raises(CoreError):
            program(Side(distributed=True))
        return
    got = tree_flatten(full(program(Side(distributed=True))))[0]
    assert [difference(one, other) for one, other in zip(got, want, strict=True)] == [""] * len(want)


# ---- torch's databases of modules and optimizers ----


def _module(w: Side, info: Any) -> Any:
    """Returns results and gradients of four inputs of the database, with a sharded batch, then sharded parameters."""
    torch.manual_seed(1)
    inputs = list(info.module_inputs_func(info, "cpu", torch.float32, True, True))
    drawn = random.Random(0).sample(inputs, min(len(inputs), 4))  # options alternate: no fixed step
    return [_module_run(w, info, one, *way) for one in drawn for way in ((S0, R), (R, S0))]


def _module_run(w: Side, info: Any, inputs: Any, batch: Placement, weights: Placement) -> Any:
    torch.manual_seed(1)
    net = info.module_cls(*inputs.constructor_input.args, **inputs.constructor_input.kwargs)
    leaves, tree = tree_flatten((inputs.forward_input.args, inputs.forward_input.kwargs))
    if isinstance(net, nn.modules.lazy.LazyModuleMixin):
        net(*leaves)  # learns its sizes from a plain batch
    net = w.spread(net, weights)
    placed = [
        w.put(leaf.detach(), batch if leaf.ndim else R, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    args, kwargs = tree_unflatten(placed, tree)
    torch.manual_seed(2)
    out = net(*args, **kwargs)
    results = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    # The sum of squares of what is normalised has no gradient to compare.
    torch.autograd.backward([t.pow(3).sum() for t in results])
    grads = [leaf.grad for leaf in placed if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return out, grads, [p.grad for p in net.parameters()], list(net.buffers())


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
@on_ranks
def test_modules_of_torchs_database(info: Any) -> None:
    _assert_same(info.name, lambda w: _module(w, info))


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# LBFGS flattens all parameters into one vector, Muon takes whole matrices, SparseAdam sparse gradients.
FORMLESS = {"LBFGS": S0, "Muon": R}


def _optimizer(w: Side, info: Any, form: dict[str, bool]) -> Any:
    """Runs steps with each of the database's options, with distributed and plain parameters."""
    make, results = info.optim_cls, []
    for options in (given.kwargs for given in info.optim_inputs_func("cpu")):
        if form.get("foreach") and isinstance(options.get("lr"), torch.Tensor):
            continue  # torch refuses it but when captured on a GPU
        net = w.net(FORMLESS.get(make.__name__, S0))
        params = [p for p in net.parameters() if p.ndim == 2 or make is not torch.optim.Muon]
        if make.__name__ not in FORMLESS:
            params += [nn.Parameter(w.put(randn(7, 5), S1)), nn.Parameter(randn(6, seed=9))]
        # In float32, more iterations turn one rounding into 1e-3; in float64 they agree to 1e-16.
        few = {"max_iter": 2 if options.get("maximize") else 3} if make is torch.optim.LBFGS else {}
        optimizer = make(params, **{"lr": 0.1, **copy.deepcopy(options), **form, **few})

        def closure(net: Any = net, params: Any = params, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            for p in params[4:]:
                p.sin().square().sum().backward()
            loss = net(w.rows(R)).square().mean()
            loss.backward()
            return loss

        for _ in range(1 if few else 2):  # more steps of LBFGS turn one rounding into 1e-3
            optimizer.step(closure)
        results.append(params)
    return results


@pytest.mark.parametrize(
    ("info", "form"),
    [
        pytest.param(info, form, id=f"{info.optim_cls.__name__}-{form}")
        for info in optim_db
        if info.optim_cls is not torch.optim.SparseAdam
        for form in (["default"] if info.optim_cls.__name__ in FORMLESS else ["loop", "foreach"])
    ],
)
@on_ranks
def test_optimizers_of_torchs_database(info: Any, form: str) -> None:
    _assert_same(form, lambda w: _optimizer(w, info, FORMS[form]))


# ---- training ----


def _scaled(w: Side) -> Any:
    """Takes a step, one that is skipped because a gradient is infinite, and another."""
    net = w.net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((net(w.rows(R)) * factor).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), list(net.parameters())


def _stepped_in_backward(w: Side) -> Any:
    net = w.net()
    for p in net.parameters():
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[0])
    net(w.rows(R)).square().mean().backward()
    return list(net.parameters())


# ---- autograd ----


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(t: Any, factor: float) -> Any:
        return t * factor, t.argmax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor * 3, None


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def _through(fn: Callable[[Any], Any], power: int = 2) -> Program:
    """Returns a program that runs forward and backward through the function."""

    def run(w: Side) -> Any:
        x = w.rows().requires_grad_()
        out = fn(x)
        out.pow(power).sum().backward()
        return out, x.grad

    return run


def _hooked(w: Side) -> Any:
    """Hooks of tensors, nodes and modules, some of which replace values."""
    x, seen = w.rows().requires_grad_(), []
    y = x.sin()
    y.retain_grad()
    y.register_hook(lambda g: g * 3)
    y.grad_fn.register_prehook(lambda g: (g[0] * 2,))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad * 2))
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gs: seen.extend(gs))
    net = w.linear()
    net.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net.register_forward_hook(lambda m, a, out: out + 1)
    net.register_full_backward_pre_hook(lambda m, g: (g[0] * 3,))
    net.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    net(y).square().sum().backward()
    return x.grad, y.grad, seen, [p.grad for p in net.parameters()]


def _packed(x: Any) -> Any:
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2),
        torch.autograd.graph.save_on_cpu(),
    ):
        return x.sin().softmax(0)


# ---- what is done to modules ----


def _init(fill: Callable[[Any], object]) -> Program:
    def run(w: Side) -> Any:
        torch.manual_seed(2)
        weights = [nn.Parameter(w.put(torch.zeros(8, 6), placement)) for placement in (S0, S1, R)]
        for weight in weights:
            fill(weight)
        return weights

    return run


def _pruned(w: Side) -> Any:
    net = w.linear()
    prune.ln_structured(net, "weight", 2, n=2, dim=0)
    out = net(w.rows(R))
    out.square().sum().backward()
    mask, grad = net.weight_mask, net.weight_orig.grad
    prune.remove(net, "weight")
    return out, mask, grad, net.weight


@torch.library.custom_op("dtbench_tests::flipped", mutates_args=())
def _flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0) * 2


_flipped.register_fake(torch.empty_like)
_flipped.register_autograd(lambda ctx, g: g.flip(0) * 2)


# ---- values ----


def _flops(w: Side) -> Any:
    a, b = w.rows(R), w.put(randn(4, 8, seed=1))
    with FlopCounterMode(display=False) as counted:
        out = a @ b
    return out, counted.get_total_flops()


PROGRAMS: dict[str, Program] = {
    "grad scaler": _scaled,
    "optimizers in the backward pass": _stepped_in_backward,
    "hooks": _hooked,
    "custom function with setup_context": _through(lambda x: _Scaled.apply(x, 2.0)[0]),
    "custom function that writes": _through(lambda x: _Written.apply(x * 1)),
    "saved tensors packed": _through(_packed),
    "checkpoint with a selective policy": _through(
        lambda x: checkpoint(
            lambda t: (t @ t.t()).relu(),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]),
        )
    ),
    "initial values, truncated": _init(lambda p: nn.init.trunc_normal_(p, std=0.3)),
    "initial values, orthogonal": _init(nn.init.orthogonal_),
    "pruned by rows": _pruned,
    "custom operator": _through(lambda x: _flipped(x)),
    "fake quantization": _through(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)),
    "batches of a dataset": lambda w: list(
        DataLoader(TensorDataset(w.rows(), w.put(torch.arange(8), S0)), batch_size=3)
    ),
    "flops": _flops,
    "padded sequences": lambda w: nn.utils.rnn.pad_sequence([w.put(randn(n, 4), S1) for n in (3, 5, 2)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks
def test_programs_equal_those_on_plain_tensors(name: str) -> None:
    _assert_same(name, PROGRAMS[name])


# ---- optimizers ----


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw with a tensor as step size": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
}
# ---- parameters of several kinds in one optimizer ----


def _mixed() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns plain parameters with gradients, and the same on two meshes and plain."""
    generator = torch.Generator().manual_seed(3)
    plain, mixed = [], []
    layouts: list[Any] = [
        ((4,), [S0]),
        None,
        ((2, 2), [R, S1]),
        ((4,), [R]),
        None,
        ((2, 2), [S0, S1]),
    ]
    for layout in layouts:
        values = [torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
        for parameters, here in ((plain, None), (mixed, layout)):
            value, grad = (place(t, *here[1], mesh=here[0]) if here else t.clone() for t in values)
            parameters.append(nn.Parameter(value))
            parameters[-1].grad = grad
    return plain, mixed


@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        (optimizer, form)
        for optimizer in OPTIMIZERS
        for form in FORMS
        if not (form == "foreach" and "tensor" in optimizer)  # torch expects a number
    ],
)
@on_worlds
def test_optimizers_of_plain_and_distributed_parameters(optimizer: str, form: str) -> None:
    make, arguments = OPTIMIZERS[optimizer]
    clips: list[dict[str, Any]] = [{}, {"norm_type": 1.0}, {"norm_type": float("inf")}]
    for clip in clips if form == "default" else clips[:1]:
        plain, mixed = _mixed()
        norms = []
        for parameters in (plain, mixed):
            stepper = make(parameters, **arguments, **FORMS[form])
            for _ in range(3):
                norms.append(nn.utils.clip_grad_norm_(parameters, 0.5, **clip))
                stepper.step()
        torch.testing.assert_close(full(norms[3:]), norms[:3])
        torch.testing.assert_close(*(full([(p.detach(), p.grad) for p in ps]) for ps in (mixed, plain)))
        assert all(isinstance(p.grad, DTensor) == isinstance(p, DTensor) for p in mixed)


@on_worlds
def test_clipping_without_foreach_beside_plain_parameters() -> None:
    """On one mesh, which clipping without foreach requires."""
    these, those = ([parameters[i] for i in (0, 1, 3, 4)] for parameters in _mixed())
    expected, got = (
        [nn.utils.clip_grad_norm_(ps, 0.3, foreach=False), *(p.grad for p in ps)] for ps in (these, those)
    )
    torch.testing.assert_close(full(got), expected)
    those[1].grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(those, 0.3, error_if_nonfinite=True)


@on_worlds
def test_plain_tensor_is_scaled_by_a_distributed_scalar() -> None:
    factor = place(torch.tensor(2.0), R)
    written = torch.ones(3)
    assert written.mul_(factor) is written and torch.equal(written, torch.full((3,), 2.0))
    with pytest.raises(MixedTensorError, match=r"mul got a plain torch\.Tensor"):
        torch.mul(torch.ones(3), factor)
    _, (spread, plain, *_) = _mixed()
    with pytest.raises(MixedTensorError, match=r"_foreach_add_ got a plain torch\.Tensor"):
        torch._foreach_add_([spread.detach(), plain.detach()], [plain.detach(), spread.detach()])


@on_worlds
def test_optimizer_loads_a_state_of_plain_tensors() -> None:
    values = torch.arange(20.0).view(5, 4)
    plain = nn.Parameter(values.clone())
    spread = nn.Parameter(place(values, S0))
    first, second = (torch.optim.Adam([p], 0.1) for p in (plain, spread))
    plain.sin().sum().backward()
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    spread.detach().copy_(plain.detach())
    for optimizer, p in ((first, plain), (second, spread)):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert isinstance(second.state[spread]["exp_avg"], DTensor)
    torch.testing.assert_close(full(spread.detach()), plain.detach())


@pytest.mark.parametrize(("sizes", "placed"), (((4,), [S0]), ((2, 2), [S0, R]), ((2, 2), [R, S0])))
@on_ranks
def test_gradients_are_unscaled(sizes: Any, placed: Any) -> None:
    """DTensors of two meshes and plain tensors, by plain or distributed scale factors."""

    def spread(t: torch.Tensor) -> torch.Tensor:
        return place(t, *placed, mesh=sizes)

    for bad, plain_numbers in itertools.product((1.0, float("inf")), (False, True)):
        outcomes = []
        for put in (torch.clone, spread):
            grads = [put(torch.tensor([1.0, 2, bad])), put(torch.ones(5)), torch.ones(3)]
            if plain_numbers:
                other = torch.ones(6, 5)
                grads.append(place(other, S0, S1, mesh=(2, 2)) if put is spread else other)
            numbers = [torch.zeros(1), torch.full((1,), 0.5)]
            infinite, scale = numbers if plain_numbers else map(put, numbers)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, infinite, scale)
            outcomes.append([full(t) for t in (*grads, infinite)])
        torch.testing.assert_close(*outcomes)


@on_ranks
def test_gradients_are_assigned_like_those_of_plain_parameters() -> None:
    x = nn.Parameter(place(torch.ones(8, 2), S0))
    (x * x).sum().backward()
    assert isinstance(x.grad, DTensor) and bool((x.grad.full_tensor() == 2).all())
    with pytest.raises(RuntimeError, match="size"):
        x.grad = torch.ones(3)
    x.grad = other = torch.zeros_like(x)
    assert x.grad is other
    del x.grad
    assert x.grad is None
