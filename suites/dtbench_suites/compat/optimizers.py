"""Optimizers, clipping, scaling, schedules, averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dtbench_suites.compat.program import Given, program, randn


def small_net(w: Given, places: str = "S(0)") -> nn.Module:
    torch.manual_seed(1)
    return w.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), places)


def batch(w: Given, number: int = 0) -> torch.Tensor:
    return w.place(randn(8, 4, seed=number), "R")


def train(w: Given, net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Any:
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = net(batch(w, number)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(net.parameters())


def _optimizer(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def run(w: Given) -> Any:
        net = small_net(w)
        return train(w, net, make(net.parameters()))

    run.__name__ = name
    program("optimizers")(run)


_optimizer("sgd_with_momentum", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True))
_optimizer("sgd_foreach", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True))
_optimizer("sgd_fused", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True))
_optimizer("adam_one_by_one", lambda p: torch.optim.Adam(p, 0.1, foreach=False))
_optimizer("adam_foreach", lambda p: torch.optim.Adam(p, 0.1, foreach=True))
_optimizer("adam_fused", lambda p: torch.optim.Adam(p, 0.1, fused=True))
_optimizer("adamw_foreach_amsgrad", lambda p: torch.optim.AdamW(p, 0.1, foreach=True, amsgrad=True))
_optimizer("adamw_fused", lambda p: torch.optim.AdamW(p, 0.1, fused=True))
_optimizer("adagrad", lambda p: torch.optim.Adagrad(p, 0.1))
_optimizer("adagrad_fused", lambda p: torch.optim.Adagrad(p, 0.1, fused=True))
_optimizer("rmsprop", lambda p: torch.optim.RMSprop(p, 0.1))
_optimizer("rmsprop_foreach", lambda p: torch.optim.RMSprop(p, 0.1, foreach=True))
_optimizer("adadelta", lambda p: torch.optim.Adadelta(p, 0.1))
_optimizer("nadam_foreach", lambda p: torch.optim.NAdam(p, 0.1, foreach=True))
_optimizer("radam", lambda p: torch.optim.RAdam(p, 0.1))
_optimizer("adamax", lambda p: torch.optim.Adamax(p, 0.1))
_optimizer("adafactor", lambda p: torch.optim.Adafactor(p, 0.1))
_optimizer("rprop", lambda p: torch.optim.Rprop(p, 0.1))
_optimizer("asgd", lambda p: torch.optim.ASGD(p, 0.1))
_optimizer(
    "adam_capturable_with_a_tensor_rate", lambda p: torch.optim.Adam(p, torch.tensor(0.1), foreach=False)
)


def _mixed(w: Given, meshes: int = 2) -> list[nn.Parameter]:
    """Parameters placed in many ways, on one mesh or two, with plain ones between them."""
    places = (("S(0)",), ("S(1)",), ("R",), *((("S(0)", "S(1)"), ("S(0)", "S(0)")) if meshes == 2 else ()))
    params = [nn.Parameter(w.place(randn(7, 5, seed=i), *place)) for i, place in enumerate(places)]
    return [*params[:2], nn.Parameter(randn(6, seed=9)), *params[2:], nn.Parameter(randn(3, 2, seed=10))]


def _optimizer_of_mixed(name: str, *makes: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Steps of each optimizer of parameters that are placed in many ways, some of them plain."""

    def run(w: Given) -> Any:
        found = []
        for make in makes:
            params = _mixed(w)
            optimizer = make(params)
            for _ in range(3):
                for p in params:
                    p.grad = None
                    p.sin().pow(2).sum().backward()
                optimizer.step()
            found.append(params)
        return found

    run.__name__ = f"{name}_of_mixed_parameters"
    program("optimizers")(run)


for _form in ("foreach", "fused", "one_by_one"):
    _way: dict[str, Any] = {"foreach": _form == "foreach", **({"fused": True} if _form == "fused" else {})}
    _optimizer_of_mixed(f"sgd_{_form}", partial(torch.optim.SGD, lr=0.1, momentum=0.9, **_way))
    _optimizer_of_mixed(f"adam_{_form}", partial(torch.optim.Adam, lr=0.1, amsgrad=True, **_way))
    _optimizer_of_mixed(f"adamw_{_form}", partial(torch.optim.AdamW, lr=0.1, maximize=True, **_way))
    _optimizer_of_mixed(f"adagrad_{_form}", partial(torch.optim.Adagrad, lr=0.1, **_way))
for _class in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
    _ways = [partial(getattr(torch.optim, _class), lr=0.1, foreach=foreach) for foreach in (True, False)]
    _optimizer_of_mixed(_class.lower(), *_ways)


@program("optimizers")
def muon(w: Given) -> Any:
    net = small_net(w, "R")
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return train(w, net, torch.optim.Muon(matrices, 0.1))


@program("optimizers")
def optimizers_of_pending_gradients(w: Given) -> Any:
    found = []
    for form in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        weight = w.place(randn(4, 3), "R", grad=True)
        optimizer = torch.optim.AdamW([weight], 0.1, **form)  # type: ignore[arg-type]
        for number in range(2):
            optimizer.zero_grad()
            (w.place(randn(8, 4, seed=number), "S(0)") @ weight).pow(2).sum().backward()
            optimizer.step()
        found.append(weight)
    return found


@program("optimizers")
def lbfgs(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(batch(w)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return list(net.parameters())


def _with_gradients(w: Given, places: str = "S(0)") -> nn.Module:
    net = small_net(w, places)
    (net(batch(w)) * 50).pow(2).sum().backward()
    return net


def gradients(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters()]


@program("optimizers")
def clip_grad_norm(w: Given) -> Any:
    net = _with_gradients(w)
    return nn.utils.clip_grad_norm_(net.parameters(), 1.0), gradients(net)


@program("optimizers")
def clip_grad_norm_of_the_largest(w: Given) -> Any:
    net = _with_gradients(w)
    return nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=float("inf")), gradients(net)


@program("optimizers")
def clip_grad_norm_of_mixed_parameters(w: Given) -> Any:
    net, plain = _with_gradients(w), nn.Parameter(randn(4))
    plain.grad = randn(4, seed=5)
    both = [*net.parameters(), plain]
    return nn.utils.clip_grad_norm_(both, 1.0), [p.grad for p in both]


@program("optimizers")
def clip_grad_value(w: Given) -> Any:
    net = _with_gradients(w)
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    return gradients(net)


@program("optimizers")
def clip_grad_norm_one_by_one(w: Given) -> Any:
    found: list[Any] = []
    for order in (2.0, 1.0, float("inf")):
        params = _mixed(w, meshes=1)
        for p in params:
            (p * 20).sin().sum().backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0, norm_type=order, foreach=False)
        found.append((norm, [p.grad for p in params]))
    return found


@program("optimizers")
def clip_grads_of_mixed_parameters(w: Given) -> Any:
    params = _mixed(w)
    for p in params:
        (p * 20).sin().sum().backward()
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, 1.0, norm)
    nn.utils.clip_grad_value_(params, 0.01)
    return norm, [p.grad for p in params]


@program("optimizers")
def clip_grad_norm_tells_what_is_not_finite(w: Given) -> Any:
    net = _with_gradients(w)
    net[0].weight.grad.mul_(float("inf"))  # type: ignore[index]
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


@program("optimizers")
def total_norm(w: Given) -> Any:
    return nn.utils.get_total_norm(gradients(_with_gradients(w)))


@program("optimizers")
def grad_scaler(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(2):
        optimizer.zero_grad()
        scaler.scale(net(batch(w, number)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), list(net.parameters())


@program("optimizers")
def grad_scaler_skips_an_infinite_step(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rows = torch.ones(8, 1)
    rows[0] = float("inf")
    scaler.scale((net(batch(w)) * w.place(rows, "R")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), list(net.parameters())


@program("optimizers")
def grad_scaler_of_mixed_parameters_and_fused_steps(w: Given) -> Any:
    found: list[Any] = []
    for form in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        params = _mixed(w)
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


@program("optimizers")
def learning_rate_schedules(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        [2],
    )
    found = []
    for _ in range(3):
        found.append(train(w, net, optimizer, 1))
        schedule.step()
    return found[-1], optimizer.param_groups[0]["lr"]


_schedules = torch.optim.lr_scheduler


def _schedule(name: str, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def run(w: Given) -> Any:
        net = small_net(w)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        schedule, rates = make(optimizer), []
        for number in range(4):
            losses, _ = train(w, net, optimizer, 1)
            by_loss = isinstance(schedule, _schedules.ReduceLROnPlateau)
            schedule.step(*([losses[0] * (1 + number)] if by_loss else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, list(net.parameters())

    run.__name__ = f"rate_{name}"
    program("optimizers")(run)


_schedule("by_plateau", lambda o: _schedules.ReduceLROnPlateau(o, factor=0.5, patience=0))
_schedule("of_one_cycle", lambda o: _schedules.OneCycleLR(o, 0.2, total_steps=6))
_schedule(
    "by_lambda_and_warm_restarts",
    lambda o: _schedules.ChainedScheduler(
        [_schedules.LambdaLR(o, lambda n: 0.9**n), _schedules.CosineAnnealingWarmRestarts(o, 2)]
    ),
)


@program("optimizers")
def rate_held_in_a_tensor(w: Given) -> Any:
    net, rate = small_net(w), torch.tensor(0.1)
    optimizer = torch.optim.AdamW(net.parameters(), rate, fused=True)
    train(w, net, optimizer, 1)
    rate.mul_(0.5)
    return train(w, net, optimizer, 2)


@program("optimizers")
def gradients_zeroed_in_place(w: Given) -> Any:
    net = _with_gradients(w)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    kept = [p.grad for p in net.parameters()]
    optimizer.zero_grad(set_to_none=False)
    return kept, all(a is p.grad for a, p in zip(kept, net.parameters(), strict=True))


@program("optimizers")
def parameters_added_to_an_optimizer(w: Given) -> Any:
    net: Any = small_net(w)
    optimizer = torch.optim.Adam(net[0].parameters(), 0.1)
    train(w, net, optimizer, 1)
    optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.3})
    return train(w, net, optimizer, 2)


@program("optimizers")
def step_hooks_and_closure(w: Given) -> Any:
    net, seen = small_net(w), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def clip(*given: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(1))
    return train(w, net, optimizer, 2), seen


@program("optimizers")
def optimizer_state_loaded_from_whole_tensors(w: Given) -> Any:
    plain = small_net(Given("plain"))
    first = torch.optim.Adam(plain.parameters(), 0.1)
    train(Given("plain"), plain, first, 2)
    net = small_net(w)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    return train(w, net, optimizer, 2)


@program("optimizers")
def optimizer_state_placed_like_the_parameters(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    train(w, net, optimizer, 2)
    state, rows = optimizer.state[net[0].weight], net[0].weight  # type: ignore[index]
    alike = True if w.plain else state["exp_avg"].placements == rows.placements
    return alike, state["exp_avg"], state["exp_avg_sq"], state["step"]


@program("optimizers")
def averages_by_hand(w: Given) -> Any:
    net, kept = small_net(w), [p.detach().clone() for p in small_net(w).parameters()]
    for number in range(2):
        train(w, net, torch.optim.SGD(net.parameters(), 0.1), 1)
        torch._foreach_lerp_(kept, [p.detach() for p in net.parameters()], 0.1 * (number + 1))
    for one, p in zip(kept, net.parameters(), strict=True):
        one.mul_(0.9).add_(p.data, alpha=0.1)
    return kept


@program("optimizers")
def batch_norm_of_an_averaged_model(w: Given) -> Any:
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(8)
    net = w.shard(nn.Sequential(nn.Linear(4, 8), norm), "R")
    for name, buffer in list(norm.named_buffers()):
        setattr(norm, name, w.place(buffer, "R"))
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    torch.optim.swa_utils.update_bn([w.place(randn(8, 4, seed=i), "S(0)") for i in range(2)], average)
    return list(average.buffers()), average(w.place(randn(8, 4), "S(0)"))


@program("optimizers")
def averaged_model(w: Given) -> Any:
    net = small_net(w)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        train(w, net, optimizer, 1)
        average.update_parameters(net)
    return list(average.parameters())


@program("optimizers")
def parameter_groups(w: Given) -> Any:
    net = small_net(w)
    groups = [
        {"params": [p for p in net.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.5},
    ]
    return train(w, net, torch.optim.AdamW(groups, 0.1))


@program("optimizers")
def optimizer_of_mixed_parameters(w: Given) -> Any:
    net = small_net(w)
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*net.parameters(), scale], 0.1, foreach=True)
    loss = net(batch(w)).pow(2).mean()
    loss.backward()
    scale.grad = torch.ones(())
    optimizer.step()
    return list(net.parameters()), scale


@program("optimizers")
def optimizer_state_saved_and_loaded(w: Given) -> Any:
    net = small_net(w)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    train(w, net, optimizer, 2)
    other = torch.optim.Adam(net.parameters(), 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return train(w, net, other, 2)


@program("optimizers")
def optimizer_hooks(w: Given) -> Any:
    net = small_net(w)
    optimizers: dict[Any, torch.optim.SGD] = {}
    for p in net.parameters():
        optimizers[p] = torch.optim.SGD([p], 0.1)

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        p.register_post_accumulate_grad_hook(step)
    net(batch(w)).pow(2).mean().backward()
    return list(net.parameters())
