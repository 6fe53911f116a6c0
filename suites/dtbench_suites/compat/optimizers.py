"""Optimizers, clipping, scaling, schedules, averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.testing._internal.common_optimizers import OptimizerInput, optim_db

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, grads_of, randn


def small_net(w: Given, places: str = "S(0)") -> Any:
    return w.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), places)


def batch(w: Given, number: int = 0) -> torch.Tensor:
    return w.place(randn(8, 4, seed=number), "R")


def train(w: Given, net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> AnyTensor:
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = net(batch(w, number)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(net.parameters())


def _mixed(w: Given, meshes: int = 2) -> list[nn.Parameter]:
    """Parameters placed in many ways, on one mesh or two, with plain ones between them."""
    places = (("S(0)",), ("S(1)",), ("R",), *((("S(0)", "S(1)"), ("S(0)", "S(0)")) if meshes == 2 else ()))
    params = [nn.Parameter(w.place(randn(7, 5, seed=i), *place)) for i, place in enumerate(places)]
    plain = [nn.Parameter(randn(6, seed=9)), nn.Parameter(randn(3, 2, seed=10)), nn.Parameter(torch.ones(()))]
    return [*params[:2], plain[0], *params[2:], *plain[1:]]


# ---- torch's database of optimizers ----

# How an optimizer steps: over lists of parameters, in one kernel, or one after the other.
FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {"foreach": False}}
# They flatten all parameters into one vector, or take whole matrices: of the network alone, placed so.
Inputs = Callable[[str], list[OptimizerInput]]
_OF_A_NETWORK = {"LBFGS": "S(0)", "Muon": "R"}


def _of_database(
    make: type[torch.optim.Optimizer], inputs: Inputs, form: Mapping[str, bool]
) -> Callable[[Given], object]:
    """Three steps with each of the database's sets of options; parameters of a network and mixed ones."""

    def run(w: Given) -> object:
        found = []
        for options in (given.kwargs for given in inputs("cpu")):
            if "foreach" in form and form["foreach"] and isinstance(options.get("lr"), torch.Tensor):
                continue  # torch refuses it but when captured on a GPU
            net = small_net(w, _OF_A_NETWORK.get(make.__name__, "S(0)"))
            mixed = [] if make.__name__ in _OF_A_NETWORK else _mixed(w)
            params = [p for p in net.parameters() if p.ndim == 2 or make is not torch.optim.Muon]
            few = {"max_iter": 3} if make is torch.optim.LBFGS else {}
            optimizer = make([*params, *mixed], **{"lr": 0.1, **copy.deepcopy(options), **form, **few})

            def closure(net: nn.Module = net, mixed: Any = mixed, optimizer: Any = optimizer) -> AnyTensor:
                optimizer.zero_grad()
                for p in mixed:
                    p.sin().pow(2).sum().backward()
                loss = net(batch(w)).pow(2).mean()
                loss.backward()
                return loss

            # In more steps LBFGS turns one rounding of a parameter into 1e-3, of plain tensors too.
            for _ in range(1 if few else 3):
                optimizer.step(closure)
            found.append([*params, *mixed])
        return found

    return run


def _database() -> dict[str, Callable[[Given], object]]:
    """Every optimizer in each of its forms; of SparseAdam there is `sparse embedding gradients`."""
    found = {}
    for info in optim_db:
        make: Any = info.optim_cls
        name, inputs = make.__name__, info.optim_inputs_func
        forms = [form for form in ("foreach", "fused") if form in info.supported_impls]
        if name in _OF_A_NETWORK:
            found[name.lower()] = _of_database(make, inputs, {})
        elif name != "SparseAdam":
            for form in [*forms, "one by one"]:
                found[f"{name.lower()} {form} of mixed parameters"] = _of_database(make, inputs, FORMS[form])
    return found


def _with_gradients(w: Given, places: str = "S(0)") -> Any:
    net = small_net(w, places)
    (net(batch(w)) * 50).pow(2).sum().backward()
    return net


def _clipped(w: Given, clip: Callable[..., object], *limits: float) -> object:
    net = _with_gradients(w)
    return clip(net.parameters(), *limits), grads_of(net)


def _schedule(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[Given], object]:
    """Four steps at the rates of a schedule."""

    def run(w: Given) -> object:
        net = small_net(w)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        schedule, rates = make(optimizer), []
        for number in range(4):
            losses, _ = train(w, net, optimizer, 1)
            by_loss = isinstance(schedule, schedules.ReduceLROnPlateau)
            schedule.step(*([losses[0] * (1 + number)] if by_loss else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, list(net.parameters())

    return run


SCHEDULES: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "rate by plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "rate of one cycle": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=6),
    "rate by lambda and warm restarts": lambda o: schedules.ChainedScheduler(
        [schedules.LambdaLR(o, lambda n: 0.9**n), schedules.CosineAnnealingWarmRestarts(o, 2)]
    ),
    "learning rate schedules": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.CosineAnnealingLR(o, 4)], [2]
    ),
}


class Optimizers(Programs):
    topic = "optimizers"
    cases: ClassVar[Cases] = {
        **_database(),
        **{name: _schedule(make) for name, make in SCHEDULES.items()},
        "clip grad norm": lambda w: _clipped(w, nn.utils.clip_grad_norm_, 1.0),
        "clip grad norm of the largest": lambda w: _clipped(w, nn.utils.clip_grad_norm_, 1.0, float("inf")),
        "clip grad value": lambda w: _clipped(w, nn.utils.clip_grad_value_, 0.5),
        "total norm": lambda w: nn.utils.get_total_norm(grads_of(_with_gradients(w))),
    }

    def optimizers_of_pending_gradients(self) -> object:
        found = []
        for form in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            weight = self.place(randn(4, 3), "R", grad=True)
            optimizer = torch.optim.AdamW([weight], 0.1, **form)  # type: ignore[arg-type]
            for number in range(2):
                optimizer.zero_grad()
                (self.place(randn(8, 4, seed=number), "S(0)") @ weight).pow(2).sum().backward()
                optimizer.step()
            found.append(weight)
        return found

    def clip_grad_norm_of_mixed_parameters(self) -> object:
        net, plain = _with_gradients(self), nn.Parameter(randn(4))
        plain.grad = randn(4, seed=5)
        both = [*net.parameters(), plain]
        return nn.utils.clip_grad_norm_(both, 1.0), [p.grad for p in both]

    def clip_grad_norm_one_by_one(self) -> object:
        found: list[AnyTensor] = []
        for order in (2.0, 1.0, float("inf")):
            params = _mixed(self, meshes=1)
            for p in params:
                (p * 20).sin().sum().backward()
            norm = nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, foreach=False)
            found.append((norm, [p.grad for p in params]))
        return found

    def clip_grads_of_mixed_parameters(self) -> object:
        params = _mixed(self)
        for p in params:
            (p * 20).sin().sum().backward()
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        nn.utils.clip_grads_with_norm_(params, 1.0, norm)
        nn.utils.clip_grad_value_(params, 0.01)
        return norm, [p.grad for p in params]

    def clip_grad_norm_tells_what_is_not_finite(self) -> object:
        net = _with_gradients(self)
        net[0].weight.grad.mul_(float("inf"))
        return nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)

    def grad_scaler(self) -> object:
        net = small_net(self)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(2):
            optimizer.zero_grad()
            scaler.scale(net(batch(self, number)).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), list(net.parameters())

    def grad_scaler_skips_an_infinite_step(self) -> object:
        net = small_net(self)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        rows = torch.ones(8, 1)
        rows[0] = float("inf")
        scaler.scale((net(batch(self)) * self.place(rows, "R")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), list(net.parameters())

    def grad_scaler_of_mixed_parameters_and_fused_steps(self) -> object:
        found: list[AnyTensor] = []
        for form in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            params = _mixed(self)
            optimizer = torch.optim.Adam(params, 0.1, **form)  # type: ignore[arg-type]
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
            for number in range(3):
                optimizer.zero_grad()
                bad = float("inf") if number == 1 else 1.0  # the second step is skipped
                for p in params:
                    scaler.scale((p.sin().pow(2) * bad).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            found.append((params, scaler.get_scale()))
        return found

    def rate_held_in_a_tensor(self) -> object:
        net, rate = small_net(self), torch.tensor(0.1)
        optimizer = torch.optim.AdamW(net.parameters(), rate, fused=True)
        train(self, net, optimizer, 1)
        rate.mul_(0.5)
        return train(self, net, optimizer, 2)

    def gradients_zeroed_in_place(self) -> object:
        net = _with_gradients(self)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        kept = grads_of(net)
        optimizer.zero_grad(set_to_none=False)
        return kept, all(a is p.grad for a, p in zip(kept, net.parameters(), strict=True))

    def parameters_added_to_an_optimizer(self) -> object:
        net: Any = small_net(self)
        optimizer = torch.optim.Adam(net[0].parameters(), 0.1)
        train(self, net, optimizer, 1)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.3})
        return train(self, net, optimizer, 2)

    def step_hooks_and_closure(self) -> object:
        net, seen = small_net(self), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def clip(*given: AnyTensor) -> None:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(1))
        return train(self, net, optimizer, 2), seen

    def optimizer_state_loaded_from_whole_tensors(self) -> object:
        plain = small_net(Given("plain"))
        first = torch.optim.Adam(plain.parameters(), 0.1)
        train(Given("plain"), plain, first, 2)
        net = small_net(self)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
        return train(self, net, optimizer, 2)

    def optimizer_state_placed_like_the_parameters(self) -> object:
        net = small_net(self)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        train(self, net, optimizer, 2)
        state, rows = optimizer.state[net[0].weight], net[0].weight
        alike = True if self.plain else state["exp_avg"].placements == rows.placements
        return alike, state["exp_avg"], state["exp_avg_sq"], state["step"]

    def averages_by_hand(self) -> object:
        net, kept = small_net(self), [p.detach().clone() for p in small_net(self).parameters()]
        for number in range(2):
            train(self, net, torch.optim.SGD(net.parameters(), 0.1), 1)
            torch._foreach_lerp_(kept, [p.detach() for p in net.parameters()], 0.1 * (number + 1))
        for one, p in zip(kept, net.parameters(), strict=True):
            one.mul_(0.9).add_(p.data, alpha=0.1)
        return kept

    def batch_norm_of_an_averaged_model(self) -> object:
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(8)
        net = self.shard(nn.Sequential(nn.Linear(4, 8), norm), "R")
        self.replicate_buffers(norm)
        average = torch.optim.swa_utils.AveragedModel(net)
        average.update_parameters(net)
        torch.optim.swa_utils.update_bn([self.place(randn(8, 4, seed=i), "S(0)") for i in range(2)], average)
        return list(average.buffers()), average(self.rows())

    def averaged_model(self) -> object:
        net = small_net(self)
        average = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            train(self, net, optimizer, 1)
            average.update_parameters(net)
        return list(average.parameters())

    def parameter_groups(self) -> object:
        net = small_net(self)
        groups = [
            {"params": [p for p in net.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.5},
        ]
        return train(self, net, torch.optim.AdamW(groups, 0.1))

    def optimizer_state_saved_and_loaded(self) -> object:
        net = small_net(self)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        train(self, net, optimizer, 2)
        other = torch.optim.Adam(net.parameters(), 0.1)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return train(self, net, other, 2)

    def optimizer_hooks(self) -> object:
        net = small_net(self)
        optimizers: dict[Any, torch.optim.SGD] = {}
        for p in net.parameters():
            optimizers[p] = torch.optim.SGD([p], 0.1)

            def step(p: torch.Tensor) -> None:
                optimizers[p].step()
                optimizers[p].zero_grad()

            p.register_post_accumulate_grad_hook(step)
        net(batch(self)).pow(2).mean().backward()
        return list(net.parameters())
