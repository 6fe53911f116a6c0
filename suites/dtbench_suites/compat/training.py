"""Training code: optimizers, clipping, scaling, schedules, tied and frozen parameters, recurrent nets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.program import Given, program, randn


def _net(w: Given, places: str = "S(0)") -> nn.Module:
    torch.manual_seed(1)
    return w.shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), places)


def _batch(w: Given, number: int = 0) -> torch.Tensor:
    return w.place(randn(8, 4, seed=number), "R")


def _train(w: Given, net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Any:
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = net(_batch(w, number)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(net.parameters())


def _optimizer(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def run(w: Given) -> Any:
        net = _net(w)
        return _train(w, net, make(net.parameters()))

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


@program("optimizers")
def lbfgs(w: Given) -> Any:
    net = _net(w)
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = net(_batch(w)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return list(net.parameters())


def _with_gradients(w: Given, places: str = "S(0)") -> nn.Module:
    net = _net(w, places)
    (net(_batch(w)) * 50).pow(2).sum().backward()
    return net


def _gradients(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters()]


@program("optimizers")
def clip_grad_norm(w: Given) -> Any:
    net = _with_gradients(w)
    return nn.utils.clip_grad_norm_(net.parameters(), 1.0), _gradients(net)


@program("optimizers")
def clip_grad_norm_of_the_largest(w: Given) -> Any:
    net = _with_gradients(w)
    return nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=float("inf")), _gradients(net)


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
    return _gradients(net)


@program("optimizers")
def total_norm(w: Given) -> Any:
    return nn.utils.get_total_norm(_gradients(_with_gradients(w)))


@program("optimizers")
def grad_scaler(w: Given) -> Any:
    net = _net(w)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(2):
        optimizer.zero_grad()
        scaler.scale(net(_batch(w, number)).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), list(net.parameters())


@program("optimizers")
def grad_scaler_skips_an_infinite_step(w: Given) -> Any:
    net = _net(w)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rows = torch.ones(8, 1)
    rows[0] = float("inf")
    scaler.scale((net(_batch(w)) * w.place(rows, "R")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), list(net.parameters())


@program("optimizers")
def learning_rate_schedules(w: Given) -> Any:
    net = _net(w)
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
        found.append(_train(w, net, optimizer, 1))
        schedule.step()
    return found[-1], optimizer.param_groups[0]["lr"]


@program("optimizers")
def averaged_model(w: Given) -> Any:
    net = _net(w)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        _train(w, net, optimizer, 1)
        average.update_parameters(net)
    return list(average.parameters())


@program("optimizers")
def parameter_groups(w: Given) -> Any:
    net = _net(w)
    groups = [
        {"params": [p for p in net.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.5},
    ]
    return _train(w, net, torch.optim.AdamW(groups, 0.1))


@program("optimizers")
def optimizer_of_mixed_parameters(w: Given) -> Any:
    net = _net(w)
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*net.parameters(), scale], 0.1, foreach=True)
    loss = net(_batch(w)).pow(2).mean()
    loss.backward()
    scale.grad = torch.ones(())
    optimizer.step()
    return list(net.parameters()), scale


@program("optimizers")
def optimizer_state_saved_and_loaded(w: Given) -> Any:
    net = _net(w)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    _train(w, net, optimizer, 2)
    other = torch.optim.Adam(net.parameters(), 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return _train(w, net, other, 2)


@program("optimizers")
def optimizer_hooks(w: Given) -> Any:
    net = _net(w)
    optimizers: dict[Any, torch.optim.SGD] = {}
    for p in net.parameters():
        optimizers[p] = torch.optim.SGD([p], 0.1)

        def step(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        p.register_post_accumulate_grad_hook(step)
    net(_batch(w)).pow(2).mean().backward()
    return list(net.parameters())


@program("training")
def gradients_accumulated(w: Given) -> Any:
    net = _net(w)
    for number in range(3):
        (net(_batch(w, number)).pow(2).mean() / 3).backward()
    return _gradients(net)


@program("training")
def frozen_parameters(w: Given) -> Any:
    net = _net(w)
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    return _train(w, net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.1))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embedding(tokens))


@program("training")
def tied_weights(w: Given) -> Any:
    torch.manual_seed(1)
    net: Any = w.shard(_Tied(), "S(0)")
    net.head.weight = net.embedding.weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    logits = net(w.place(torch.arange(8), "R"))
    F.cross_entropy(logits, w.place(torch.arange(8), "R")).backward()
    optimizer.step()
    return list(net.parameters())


@program("training")
def batch_sharded_and_weights_replicated(w: Given) -> Any:
    net = _net(w, "R")
    x = w.place(randn(8, 4), "S(0)")
    net(x).pow(2).mean().backward()
    return _gradients(net)


@program("training")
def backward_with_changing_batch_sizes(w: Given) -> Any:
    net, found = _net(w), []
    for rows in (8, 5, 3, 8):
        net.zero_grad()
        net(w.place(randn(rows, 4), "S(0)")).pow(2).sum().backward()
        found.append(copy.deepcopy(_gradients(net)))
    return found


@program("training")
def parallel_block_trained(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), {"0": "col", "2": "row"})
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        net(randn(8, 4, seed=number)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return list(net.parameters())


@program("training")
def lstm_with_default_state(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.LSTM(4, 6, batch_first=True), "R")
    x = w.place(randn(8, 3, 4), "S(0)", grad=True)
    out, state = net(x)
    out.pow(2).sum().backward()
    return out, state, x.grad, _gradients(net)


@program("training")
def gru_with_default_state(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.GRU(4, 6, num_layers=2), "R")
    x = w.place(randn(3, 8, 4), "S(1)", grad=True)
    out, state = net(x)
    out.pow(2).sum().backward()
    return out, state, x.grad


@program("training")
def rnn_cells(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.LSTMCell(4, 6), "R")
    h, c = net(w.place(randn(8, 4), "S(0)"))
    return h, c


@program("training")
def multihead_attention(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.MultiheadAttention(8, 2, batch_first=True), "R")
    x = w.place(randn(4, 6, 8), "S(0)", grad=True)
    out, weights = net(x, x, x)
    out.pow(2).sum().backward()
    return out, weights, x.grad


@program("training")
def batch_norm_statistics(w: Given) -> Any:
    net = w.shard(nn.BatchNorm1d(4), "R")
    if not w.plain:
        for name, buffer in list(net.named_buffers()):
            setattr(net, name, w.place(buffer, "R"))
    out = net(w.place(randn(8, 4), "S(0)"))
    return out, net.running_mean, net.running_var


@program("training")
def sparse_embedding_gradients(w: Given) -> Any:
    table = w.place(randn(8, 4), "R", grad=True)
    F.embedding(w.place(torch.tensor([1, 2, 2]), "R"), table, sparse=True).sum().backward()
    grad = table.grad
    return grad.to_dense() if grad is not None else None


@program("training")
def loss_of_ignored_targets(w: Given) -> Any:
    logits = w.place(randn(8, 12), "S(0)", grad=True)
    target = w.place(torch.tensor([0, 1, -100, 3, -100, 5, 6, 7]), "S(0)")
    loss = F.cross_entropy(logits, target)
    loss.backward()
    return loss, logits.grad
