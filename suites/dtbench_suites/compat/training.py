"""Training code: accumulation, tied and frozen parameters, recurrent nets, statistics, losses."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.optimizers import batch, gradients, small_net, train
from dtbench_suites.compat.program import Given, program, randn


@program("training")
def gradients_accumulated(w: Given) -> Any:
    net = small_net(w)
    for number in range(3):
        (net(batch(w, number)).pow(2).mean() / 3).backward()
    return gradients(net)


@program("training")
def frozen_parameters(w: Given) -> Any:
    net = small_net(w)
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    return train(w, net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.1))


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
    net = small_net(w, "R")
    x = w.place(randn(8, 4), "S(0)")
    net(x).pow(2).mean().backward()
    return gradients(net)


@program("training")
def backward_with_changing_batch_sizes(w: Given) -> Any:
    net, found = small_net(w), []
    for rows in (8, 5, 3, 8):
        net.zero_grad()
        net(w.place(randn(rows, 4), "S(0)")).pow(2).sum().backward()
        found.append(copy.deepcopy(gradients(net)))
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
    return out, state, x.grad, gradients(net)


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
