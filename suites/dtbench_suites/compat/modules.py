"""What is done to modules: initial values, hooks, parametrizations, pruning, quantization, other wrappers of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune

from dtbench_suites.compat.program import Given, program, randn


def _linear(w: Given, places: str = "S(0)") -> Any:
    torch.manual_seed(1)
    return w.shard(nn.Linear(4, 8), places)


def _trained(w: Given, net: nn.Module) -> Any:
    """Output and gradients of a batch of eight."""
    out = net(w.place(randn(8, 4), "R"))
    out.pow(2).sum().backward()
    return out, [p.grad for p in net.parameters()]


# ---- initial values: those of one device ----


def _init(name: str, fill: Callable[[torch.Tensor], Any]) -> None:
    def run(w: Given) -> Any:
        torch.manual_seed(2)
        weights = [nn.Parameter(w.place(torch.zeros(8, 6), place)) for place in ("S(0)", "S(1)", "R")]
        for weight in weights:
            fill(weight)
        return weights

    run.__name__ = f"init_{name}"
    program("init")(run)


_init("uniform", lambda p: nn.init.uniform_(p, -1, 1))
_init("normal", lambda p: nn.init.normal_(p, 0.5, 2.0))
_init("truncated_normal", lambda p: nn.init.trunc_normal_(p, std=0.3))
_init("kaiming_uniform", lambda p: nn.init.kaiming_uniform_(p, a=5**0.5))
_init("xavier_normal", nn.init.xavier_normal_)
_init("orthogonal", nn.init.orthogonal_)
_init("eye", nn.init.eye_)
_init("sparse", lambda p: nn.init.sparse_(p, 0.5))


@program("init")
def reset_parameters_of_modules(w: Given) -> Any:
    torch.manual_seed(2)
    made: list[Any] = [nn.Linear(4, 8), nn.Embedding(8, 4), nn.LayerNorm(4), nn.Conv1d(4, 8, 3)]
    nets: list[Any] = [w.shard(net, "S(0)") for net in made]
    for net in nets:
        net.reset_parameters()
    return [list(net.parameters()) for net in nets]


@program("init")
def skip_init_and_apply(w: Given) -> Any:
    net = w.shard(nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 8), nn.Linear(8, 4)), "S(0)")

    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    net.apply(fill)
    return _trained(w, net)


# ---- hooks ----


@program("hooks")
def hooks_of_all_modules(w: Given) -> Any:
    net = _linear(w)
    hooks: Any = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda m, a: (a[0] * 2,)),
        hooks.register_module_forward_hook(lambda m, a, out: out + 1),
        hooks.register_module_full_backward_hook(lambda m, i, o: None),
    ]
    try:
        return _trained(w, net)
    finally:
        for handle in handles:
            handle.remove()


@program("hooks")
def backward_pre_hook_of_a_module(w: Given) -> Any:
    net = _linear(w)
    net.register_full_backward_pre_hook(lambda m, g: (g[0] * 3,))
    return _trained(w, net)


@program("hooks")
def forward_hook_with_keywords(w: Given) -> Any:
    class Scaled(nn.Module):
        def forward(self, x: Any, *, scale: Any) -> Any:
            return x * scale

    net = Scaled()
    net.register_forward_pre_hook(lambda m, a, k: (a, {"scale": k["scale"] * 2}), with_kwargs=True)
    net.register_forward_hook(lambda m, a, k, out: out + k["scale"], with_kwargs=True, always_call=True)
    return net(w.place(randn(8, 4), "S(0)"), scale=w.place(randn(4, seed=1), "R"))


@program("hooks")
def state_dict_hooks(w: Given) -> Any:
    net, other = _linear(w), _linear(w)
    net.register_state_dict_post_hook(lambda m, s, p, meta: s.update(weight=s["weight"] * 2))
    other.register_load_state_dict_pre_hook(lambda m, s, *rest: s.update(bias=s["bias"] + 1))
    other.load_state_dict(net.state_dict())
    return other.state_dict()


@program("hooks")
def hook_of_a_node(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    y = x.sin()
    node: Any = y.grad_fn
    node.register_prehook(lambda g: (g[0] * 2,))
    node.register_hook(lambda i, o: (i[0] + 1,))
    y.softmax(0).pow(2).sum().backward()
    return x.grad, node.name()


@program("hooks")
def hook_removed(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    handle = x.register_hook(lambda g: g * 3)
    handle.remove()
    x.exp().sum().backward()
    return x.grad


@program("hooks")
def hook_that_moves_the_gradient(w: Given) -> Any:
    x, move = w.place(randn(8, 4), "S(0)", grad=True), w.move("R")
    y = x * 2
    y.register_hook(lambda g: move(g) * 3)
    y.pow(2).sum().backward()
    return x.grad


# ---- parametrizations and pruning ----


@program("parametrizations")
def spectral_norm(w: Given) -> Any:
    net = _linear(w)
    torch.manual_seed(3)
    parametrizations.spectral_norm(net)
    return _trained(w, net)


@program("parametrizations")
def spectral_norm_by_hooks(w: Given) -> Any:
    net = _linear(w)
    torch.manual_seed(3)
    nn.utils.spectral_norm(net)
    return _trained(w, net)


@program("parametrizations")
def weight_norm_by_hooks(w: Given) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and used
        net = nn.utils.weight_norm(_linear(w))
    return _trained(w, net)


@program("parametrizations")
def weight_norm_trained_and_removed(w: Given) -> Any:
    net = _linear(w)
    parametrizations.weight_norm(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _trained(w, net)
    optimizer.step()
    parametrize.remove_parametrizations(net, "weight")
    return list(net.parameters()), net(w.place(randn(8, 4), "R"))


@program("parametrizations")
def orthogonal_by_householder(w: Given) -> Any:
    torch.manual_seed(1)
    net: Any = w.shard(nn.Linear(4, 8), "R")
    parametrizations.orthogonal(net, orthogonal_map="householder")
    return net.weight.t() @ net.weight


@program("parametrizations")
def parametrization_cached(w: Given) -> Any:
    net = _linear(w)
    parametrizations.weight_norm(net)
    with parametrize.cached():
        return net(net.weight), net.weight is net.weight


def _pruned(name: str, prune_: Callable[[Any], Any]) -> None:
    def run(w: Given) -> Any:
        net = _linear(w)
        torch.manual_seed(4)
        prune_(net)
        out, _ = _trained(w, net)
        mask, grad = net.weight_mask, net.weight_orig.grad
        prune.remove(net, "weight")
        return out, mask, grad, net.weight

    run.__name__ = f"pruned_{name}"
    program("parametrizations")(run)


_pruned("by_size", lambda net: prune.l1_unstructured(net, "weight", 5))
_pruned("by_rows", lambda net: prune.ln_structured(net, "weight", 2, n=2, dim=0))
_pruned("at_random", lambda net: prune.random_unstructured(net, "weight", 0.3))
_pruned("over_all", lambda net: prune.global_unstructured([(net, "weight")], prune.L1Unstructured, amount=7))


# ---- kinds of modules ----


@program("modules")
def containers_of_parameters(w: Given) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(w.place(randn(4, seed=i), "S(0)")) for i in range(2))
            self.named = nn.ParameterDict({"scale": nn.Parameter(w.place(randn(4, seed=5), "R"))})
            self.register_buffer("shift", w.place(randn(8, 4, seed=6), "S(0)"))

        def forward(self, x: Any) -> Any:
            return {"out": [x * self.rows[0] + self.shift, (x * self.named["scale"], self.rows[1])]}

    net = Net()
    found = net(w.place(randn(8, 4), "S(0)"))
    sum(t.pow(2).sum() for t in (found["out"][0], *found["out"][1])).backward()
    return found, [p.grad for p in net.parameters()], net.state_dict()


@program("modules")
def ensemble_of_stacked_modules(w: Given) -> Any:
    nets = [w.shard(nn.Linear(4, 8), "R") for _ in range(3)]
    for number, net in enumerate(nets):
        for p in net.parameters():
            nn.init.constant_(p, number + 0.5)
    params, buffers = stack_module_state(nets)
    x = w.place(randn(8, 4), "S(0)")
    return vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(params, buffers)


@program("modules")
def functional_call_of_tied_weights(w: Given) -> Any:
    torch.manual_seed(1)
    net: Any = w.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "S(0)")
    net[1].weight = net[0].weight
    given = {"0.weight": w.place(randn(4, 4, seed=3), "S(0)")}
    return functional_call(net, given, (w.place(randn(8, 4), "R"),))


@program("modules")
def encoder_and_decoder(w: Given) -> Any:
    torch.manual_seed(1)
    net: Any = w.shard(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), "R")
    mask = None if w.plain else w.place(net.generate_square_subsequent_mask(4), "R")
    mask = net.generate_square_subsequent_mask(4) if mask is None else mask
    source, target = w.place(randn(4, 6, 8), "S(0)"), w.place(randn(4, 4, 8, seed=1), "S(0)")
    out = net(source, target, tgt_mask=mask, tgt_is_causal=False)
    out.pow(3).sum().backward()
    return out, [p.grad for p in net.parameters()]


@program("modules")
def attention_with_masks(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.MultiheadAttention(8, 2, batch_first=True), "S(0)")
    x = w.place(randn(4, 6, 8), "S(0)")
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[1, 3:] = True
    return net(x, x, x, key_padding_mask=w.place(hidden, "S(0)"), need_weights=True)


@program("modules")
def lstm_of_two_directions(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True), "R")
    return net(w.place(randn(8, 3, 4), "S(0)"))


@program("modules")
def convolution_fused_with_batch_norm(w: Given) -> Any:
    torch.manual_seed(1)
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    norm.running_mean.fill_(0.5), norm.running_var.fill_(2.0)  # type: ignore[union-attr]
    for module in (conv, norm):
        w.shard(module, "R")
        for name, buffer in list(module.named_buffers()):
            setattr(module, name, w.place(buffer, "R"))
    fused = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
    return fused(w.place(randn(4, 3, 6, 6), "S(0)"))


@program("modules")
def lazy_linear(w: Given) -> Any:
    torch.manual_seed(1)
    net = nn.LazyLinear(8)
    net(randn(8, 4))  # learns its size from a plain batch
    return w.shard(net, "S(0)")(w.place(randn(8, 4), "R"))


@program("modules")
def padded_sequences(w: Given) -> Any:
    rows = [w.place(randn(n, 4, seed=n), "S(1)") for n in (3, 5, 2)]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


@program("modules")
def embedding_bag_and_padding(w: Given) -> Any:
    table = w.place(randn(8, 4), "S(1)", grad=True)
    tokens = w.place(torch.tensor([[1, 2, 0], [4, 0, 0]]), "R")
    out = F.embedding(tokens, table, padding_idx=0)
    bag = F.embedding_bag(tokens, table, mode="mean")
    (out.pow(2).sum() + bag.pow(2).sum()).backward()
    return out, bag, table.grad


@program("modules")
def symbolic_trace(w: Given) -> Any:
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    return _trained(w, w.shard(net, "S(0)"))


@program("modules")
def scripted(w: Given) -> Any:
    @torch.jit.script
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, 0)

    return fn(w.place(randn(8, 4), "S(0)"))


@program("modules")
def custom_operator(w: Given) -> Any:
    name = "dtbench_compat::doubled_rows"

    @torch.library.custom_op(name, mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0) * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, g: g.flip(0) * 2)
    x = w.place(randn(8, 4), "S(0)", grad=True)
    out = doubled(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("modules")
def data_parallel_of_torch(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "col", "1": "row"})
    out = nn.parallel.DistributedDataParallel(net)(randn(8, 4))
    out.pow(2).sum().backward()
    return out, [p.grad for p in net.parameters()]


@program("modules")
def fully_sharded_by_flat_parameters(w: Given) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(1)
    net = w.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "col", "1": "row"})
    here = torch.device("cpu")
    return net(randn(8, 4)) if w.plain else FullyShardedDataParallel(net, device_id=here)(randn(8, 4))


@program("modules")
def fully_shard_of_torch(w: Given) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    net = w.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "col", "1": "row"})
    return net(randn(8, 4)) if w.plain else fully_shard(net)(randn(8, 4))  # type: ignore[operator]


# ---- quantization ----


@program("quantization")
def fake_quantized(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    out = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
    out.pow(2).sum().backward()
    return out, x.grad


@program("quantization")
def fake_quantized_by_channel(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    scale, zero = w.place(torch.full((8,), 0.1), "S(0)"), w.place(torch.zeros(8, dtype=torch.int32), "S(0)")
    out = torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)
    out.pow(2).sum().backward()
    return out, x.grad


@program("quantization")
def range_observed(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    low, high = torch.aminmax(x)
    scale = (high - low) / 255
    held = ((x - low) / scale).round().clamp(0, 255).to(torch.uint8)
    return held, held.float() * scale + low


@program("quantization")
def rounding_with_a_straight_through_gradient(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    out = x + ((x * 8).round() / 8 - x).detach()
    out.pow(3).sum().backward()
    return out, x.grad


@program("quantization")
def eight_bit_floats(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    held = x.to(torch.float8_e4m3fn)
    return held.to(torch.float32), w.move("R")(held).to(torch.float32)


@program("quantization")
def eight_bit_weights(w: Given) -> Any:
    weight = w.place(randn(8, 4, seed=1), "S(0)")
    scale = weight.abs().amax(1, keepdim=True) / 127
    held = (weight / scale).round().to(torch.int8)
    return held, F.linear(w.place(randn(8, 4), "R"), held.float() * scale)
