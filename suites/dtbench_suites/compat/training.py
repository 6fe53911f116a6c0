"""Training code: accumulation, tied and frozen parameters, recurrent nets, statistics, losses."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.optimizers import batch, small_net, train
from dtbench_suites.compat.program import AnyTensor, Programs, grads_of, randn


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, tokens: AnyTensor) -> AnyTensor:
        return self.head(self.embedding(tokens))


class Training(Programs):
    topic = "training"

    def gradients_accumulated(self) -> object:
        net = small_net(self)
        for number in range(3):
            (net(batch(self, number)).pow(2).mean() / 3).backward()
        return grads_of(net)

    def frozen_parameters(self) -> object:
        net = small_net(self)
        for p in net[0].parameters():
            p.requires_grad_(False)
        return train(self, net, torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.1))

    def tied_weights(self) -> object:
        net = self.seeded(lambda: _Tied(), "S(0)")
        net.head.weight = net.embedding.weight
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        logits = net(self.place(torch.arange(8), "R"))
        F.cross_entropy(logits, self.place(torch.arange(8), "R")).backward()
        optimizer.step()
        return list(net.parameters())

    def batch_sharded_and_weights_replicated(self) -> object:
        net = small_net(self, "R")
        x = self.rows()
        net(x).pow(2).mean().backward()
        return grads_of(net)

    def backward_with_changing_batch_sizes(self) -> object:
        net, found = small_net(self), []
        for rows in (8, 5, 3, 8):
            net.zero_grad()
            net(self.place(randn(rows, 4), "S(0)")).pow(2).sum().backward()
            found.append(copy.deepcopy(grads_of(net)))
        return found

    def parallel_block_trained(self) -> object:
        net = self.block()
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        for number in range(3):
            optimizer.zero_grad()
            net(randn(8, 4, seed=number)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return list(net.parameters())

    def lstm_with_default_state(self) -> object:
        net = self.seeded(lambda: nn.LSTM(4, 6, batch_first=True), "R")
        x = self.place(randn(8, 3, 4), "S(0)", grad=True)
        out, state = net(x)
        return self.backward(out, x, net), state

    def sparse_embedding_gradients(self) -> object:
        table = self.place(randn(8, 4), "R", grad=True)
        F.embedding(self.place(torch.tensor([1, 2, 2]), "R"), table, sparse=True).sum().backward()
        grad = table.grad
        return grad.to_dense() if grad is not None else None

    def loss_of_ignored_targets(self) -> object:
        logits = self.place(randn(8, 12), "S(0)", grad=True)
        target = self.place(torch.tensor([0, 1, -100, 3, -100, 5, 6, 7]), "S(0)")
        loss = F.cross_entropy(logits, target)
        loss.backward()
        return loss, logits.grad
