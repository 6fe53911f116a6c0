"""What is done to modules: initial values, hooks, parametrizations, pruning, quantization, other wrappers of them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, grads_of, randn


def _linear(w: Given, places: str = "S(0)") -> Any:
    return w.seeded(lambda: nn.Linear(4, 8), places)


def _trained(w: Given, net: nn.Module) -> AnyTensor:
    """Output and gradients of a batch of eight."""
    out = net(w.rows("R"))
    out.pow(2).sum().backward()
    return out, grads_of(net)


def _init(fill: Callable[[torch.Tensor], object]) -> Callable[[Given], object]:
    def run(w: Given) -> object:
        torch.manual_seed(2)
        weights = [nn.Parameter(w.place(torch.zeros(8, 6), place)) for place in ("S(0)", "S(1)", "R")]
        for weight in weights:
            fill(weight)
        return weights

    return run


def _pruned(prune_: Callable[[AnyTensor], object]) -> Callable[[Given], object]:
    def run(w: Given) -> object:
        net = _linear(w)
        torch.manual_seed(4)
        prune_(net)
        out, _ = _trained(w, net)
        mask, grad = net.weight_mask, net.weight_orig.grad
        prune.remove(net, "weight")
        return out, mask, grad, net.weight

    return run


# ---- torch's database of modules ----

# Of the sets of inputs of a module, so many are tried.
_INPUTS = 8


def _of_database(info: ModuleInfo) -> Callable[[Given], object]:
    """A module's results and gradients for inputs of the database, batch sharded, then parameters sharded."""

    def run(w: Given) -> object:
        torch.manual_seed(1)
        given = list(info.module_inputs_func(info, "cpu", torch.float32, True, True))
        drawn = random.Random(0).sample(given, min(len(given), _INPUTS))  # options alternate: no fixed step
        return [
            _module_run(w, info, one, *places) for one in drawn for places in (("S(0)", "R"), ("R", "S(0)"))
        ]

    return run


def _module_run(w: Given, info: ModuleInfo, given: ModuleInput, batch: str, weights: str) -> object:
    torch.manual_seed(1)
    net = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
    leaves, tree = tree_flatten((given.forward_input.args, given.forward_input.kwargs))
    if isinstance(net, nn.modules.lazy.LazyModuleMixin):
        cast("nn.Module", net)(*leaves)  # learns its sizes from a plain batch
    w.shard(net, weights)
    w.replicate_buffers(net)
    placed = [
        w.place(leaf, batch if leaf.ndim else "R", grad=leaf.requires_grad)
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
    inputs = [leaf.grad for leaf in placed if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return out, inputs, grads_of(net), list(net.buffers())


class Init(Programs):
    topic = "init"
    cases: ClassVar[Cases] = {
        "init uniform": _init(lambda p: nn.init.uniform_(p, -1, 1)),
        "init normal": _init(lambda p: nn.init.normal_(p, 0.5, 2.0)),
        "init truncated normal": _init(lambda p: nn.init.trunc_normal_(p, std=0.3)),
        "init kaiming uniform": _init(lambda p: nn.init.kaiming_uniform_(p, a=5**0.5)),
        "init xavier normal": _init(nn.init.xavier_normal_),
        "init orthogonal": _init(nn.init.orthogonal_),
        "init eye": _init(nn.init.eye_),
        "init sparse": _init(lambda p: nn.init.sparse_(p, 0.5)),
    }

    def reset_parameters_of_modules(self) -> object:
        torch.manual_seed(2)
        made: list[Any] = [nn.Linear(4, 8), nn.Embedding(8, 4), nn.LayerNorm(4), nn.Conv1d(4, 8, 3)]
        nets: list[Any] = [self.shard(net, "S(0)") for net in made]
        for net in nets:
            net.reset_parameters()
        return [list(net.parameters()) for net in nets]

    def skip_init_and_apply(self) -> object:
        net = self.shard(nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 8), nn.Linear(8, 4)), "S(0)")

        def fill(module: nn.Module) -> None:
            for p in module.parameters(recurse=False):
                nn.init.constant_(p, 0.25)

        net.apply(fill)
        return _trained(self, net)


class Hooks(Programs):
    topic = "hooks"

    def hooks_of_all_modules(self) -> object:
        net = _linear(self)
        hooks: Any = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda m, a: (a[0] * 2,)),
            hooks.register_module_forward_hook(lambda m, a, out: out + 1),
            hooks.register_module_full_backward_hook(lambda m, i, o: None),
        ]
        try:
            return _trained(self, net)
        finally:
            for handle in handles:
                handle.remove()

    def backward_pre_hook_of_a_module(self) -> object:
        net = _linear(self)
        net.register_full_backward_pre_hook(lambda m, g: (g[0] * 3,))
        return _trained(self, net)

    def forward_hook_with_keywords(self) -> object:
        class Scaled(nn.Module):
            def forward(self, x: AnyTensor, *, scale: Any) -> AnyTensor:
                return x * scale

        net = Scaled()
        net.register_forward_pre_hook(lambda m, a, k: (a, {"scale": k["scale"] * 2}), with_kwargs=True)
        net.register_forward_hook(lambda m, a, k, out: out + k["scale"], with_kwargs=True, always_call=True)
        return net(self.rows(), scale=self.place(randn(4, seed=1), "R"))

    def state_dict_hooks(self) -> object:
        net, other = _linear(self), _linear(self)
        net.register_state_dict_post_hook(lambda m, s, p, meta: s.update(weight=s["weight"] * 2))
        other.register_load_state_dict_pre_hook(lambda m, s, *rest: s.update(bias=s["bias"] + 1))
        other.load_state_dict(net.state_dict())
        return other.state_dict()

    def hook_of_a_node(self) -> object:
        x = self.leaf()
        y = x.sin()
        node: Any = y.grad_fn
        node.register_prehook(lambda g: (g[0] * 2,))
        node.register_hook(lambda i, o: (i[0] + 1,))
        return self.backward(y.softmax(0), x), node.name()

    def hook_removed(self) -> object:
        x = self.leaf()
        handle = x.register_hook(lambda g: g * 3)
        handle.remove()
        return self.backward(x.exp(), x, power=1)

    def hook_that_moves_the_gradient(self) -> object:
        x, move = self.leaf(), self.move("R")
        y = x * 2
        y.register_hook(lambda g: move(g) * 3)
        return self.backward(y, x)


class Parametrizations(Programs):
    topic = "parametrizations"
    cases: ClassVar[Cases] = {
        "pruned by size": _pruned(lambda net: prune.l1_unstructured(net, "weight", 5)),
        "pruned by rows": _pruned(lambda net: prune.ln_structured(net, "weight", 2, n=2, dim=0)),
        "pruned at random": _pruned(lambda net: prune.random_unstructured(net, "weight", 0.3)),
        "pruned over all": _pruned(
            lambda net: prune.global_unstructured([(net, "weight")], prune.L1Unstructured, amount=7)
        ),
    }

    def spectral_norm(self) -> object:
        net = _linear(self)
        torch.manual_seed(3)
        parametrizations.spectral_norm(net)
        return _trained(self, net)

    def spectral_norm_by_hooks(self) -> object:
        net = _linear(self)
        torch.manual_seed(3)
        nn.utils.spectral_norm(net)
        return _trained(self, net)

    def weight_norm_by_hooks(self) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and used
            net = nn.utils.weight_norm(_linear(self))
        return _trained(self, net)

    def weight_norm_trained_and_removed(self) -> object:
        net = _linear(self)
        parametrizations.weight_norm(net)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        _trained(self, net)
        optimizer.step()
        parametrize.remove_parametrizations(net, "weight")
        return list(net.parameters()), net(self.rows("R"))

    def orthogonal_by_householder(self) -> object:
        net = self.seeded(lambda: nn.Linear(4, 8), "R")
        parametrizations.orthogonal(net, orthogonal_map="householder")
        return net.weight.t() @ net.weight

    def parametrization_cached(self) -> object:
        net = _linear(self)
        parametrizations.weight_norm(net)
        with parametrize.cached():
            return net(net.weight), net.weight is net.weight


class Modules(Programs):
    topic = "modules"
    cases: ClassVar[Cases] = {info.name.replace("_", " "): _of_database(info) for info in module_db}

    def containers_of_parameters(self) -> object:
        w = self

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rows = nn.ParameterList(
                    nn.Parameter(w.place(randn(4, seed=i), "S(0)")) for i in range(2)
                )
                self.named = nn.ParameterDict({"scale": nn.Parameter(w.place(randn(4, seed=5), "R"))})
                self.register_buffer("shift", w.place(randn(8, 4, seed=6), "S(0)"))

            def forward(self, x: AnyTensor) -> AnyTensor:
                return {"out": [x * self.rows[0] + self.shift, (x * self.named["scale"], self.rows[1])]}

        net = Net()
        found = net(self.rows())
        sum(t.pow(2).sum() for t in (found["out"][0], *found["out"][1])).backward()
        return found, grads_of(net), net.state_dict()

    def ensemble_of_stacked_modules(self) -> object:
        nets = [self.shard(nn.Linear(4, 8), "R") for _ in range(3)]
        for number, net in enumerate(nets):
            for p in net.parameters():
                nn.init.constant_(p, number + 0.5)
        params, buffers = stack_module_state(nets)
        x = self.rows()
        return vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(params, buffers)

    def functional_call_of_tied_weights(self) -> object:
        net = self.seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "S(0)")
        net[1].weight = net[0].weight
        given = {"0.weight": self.place(randn(4, 4, seed=3), "S(0)")}
        return functional_call(net, given, (self.rows("R"),))

    def encoder_and_decoder(self) -> object:
        net = self.seeded(lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), "R")
        mask = None if self.plain else self.place(net.generate_square_subsequent_mask(4), "R")
        mask = net.generate_square_subsequent_mask(4) if mask is None else mask
        source, target = self.place(randn(4, 6, 8), "S(0)"), self.place(randn(4, 4, 8, seed=1), "S(0)")
        return self.backward(net(source, target, tgt_mask=mask, tgt_is_causal=False), net, power=3)

    def convolution_fused_with_batch_norm(self) -> object:
        torch.manual_seed(1)
        conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        norm.running_mean.fill_(0.5), norm.running_var.fill_(2.0)  # type: ignore[union-attr]
        for module in (conv, norm):
            self.shard(module, "R")
            self.replicate_buffers(module)
        fused = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
        return fused(self.place(randn(4, 3, 6, 6), "S(0)"))

    def lazy_linear(self) -> object:
        torch.manual_seed(1)
        net = nn.LazyLinear(8)
        net(randn(8, 4))  # learns its size from a plain batch
        return self.shard(net, "S(0)")(self.rows("R"))

    def padded_sequences(self) -> object:
        rows = [self.place(randn(n, 4, seed=n), "S(1)") for n in (3, 5, 2)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def embedding_bag_and_padding(self) -> object:
        table = self.place(randn(8, 4), "S(1)", grad=True)
        tokens = self.place(torch.tensor([[1, 2, 0], [4, 0, 0]]), "R")
        out = F.embedding(tokens, table, padding_idx=0)
        bag = F.embedding_bag(tokens, table, mode="mean")
        (out.pow(2).sum() + bag.pow(2).sum()).backward()
        return out, bag, table.grad

    def symbolic_trace(self) -> object:
        net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        return _trained(self, self.shard(net, "S(0)"))

    def scripted(self) -> object:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x * 2, 0)

        return fn(self.rows())

    def custom_operator(self) -> object:
        name = "dtbench_compat::doubled_rows"

        @torch.library.custom_op(name, mutates_args=())
        def doubled(x: torch.Tensor) -> torch.Tensor:
            return x.flip(0) * 2

        doubled.register_fake(torch.empty_like)
        doubled.register_autograd(lambda ctx, g: g.flip(0) * 2)
        x = self.leaf()
        return self.backward(doubled(x), x)

    def data_parallel_of_torch(self) -> object:
        net = self.block()
        return self.backward(nn.parallel.DistributedDataParallel(net)(randn(8, 4)), net)

    def fully_sharded_by_flat_parameters(self) -> object:
        from torch.distributed.fsdp import FullyShardedDataParallel

        net = self.block()
        here = torch.device("cpu")
        return net(randn(8, 4)) if self.plain else FullyShardedDataParallel(net, device_id=here)(randn(8, 4))

    def fully_shard_of_torch(self) -> object:
        from torch.distributed.fsdp import fully_shard

        net = self.block()
        return net(randn(8, 4)) if self.plain else cast("nn.Module", fully_shard(net))(randn(8, 4))


class Quantization(Programs):
    topic = "quantization"

    def fake_quantized(self) -> object:
        x = self.leaf()
        return self.backward(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7), x)

    def fake_quantized_by_channel(self) -> object:
        x = self.leaf()
        scale, zero = (
            self.place(torch.full((8,), 0.1), "S(0)"),
            self.place(torch.zeros(8, dtype=torch.int32), "S(0)"),
        )
        return self.backward(torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7), x)

    def range_observed(self) -> object:
        x = self.rows()
        low, high = torch.aminmax(x)
        scale = (high - low) / 255
        held = ((x - low) / scale).round().clamp(0, 255).to(torch.uint8)
        return held, held.float() * scale + low

    def rounding_with_a_straight_through_gradient(self) -> object:
        x = self.leaf()
        return self.backward(x + ((x * 8).round() / 8 - x).detach(), x, power=3)

    def eight_bit_floats(self) -> object:
        x = self.rows()
        held = x.to(torch.float8_e4m3fn)
        return held.to(torch.float32), self.move("R")(held).to(torch.float32)

    def eight_bit_weights(self) -> object:
        weight = self.place(randn(8, 4, seed=1), "S(0)")
        scale = weight.abs().amax(1, keepdim=True) / 127
        held = (weight / scale).round().to(torch.int8)
        return held, F.linear(self.rows("R"), held.float() * scale)
