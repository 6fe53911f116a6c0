"""Full state dicts of models and optimizers: gathered, broadcast by rank 0, loaded; by functions of core and torch.

Also checkpoints that are exchanged between the core's DTensors and torch's.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks
from core.tests.local_world import ThreadWorlds
from core.tests.parallel_models import WIDTH, Block, seeded
from core.tests.placing import full as gathered
from dtbench_core import (
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    full_state_dict,
    sharded_state_dict,
    to_torch,
)
from dtbench_core.errors import ArgumentError
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, shard_parameters

COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "mlp.up")
ROWS = ("attention.wo", "mlp.down")
KINDS = ("tp", "tp and dp", "mixed")


def _model(kind: str, seed: int = 0) -> nn.Module:
    """Returns a model with plain parameters beside DTensors, on two mesh dims, or with mixed placements."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"block": Block(), "norm": nn.BatchNorm1d(WIDTH)})
    plan: dict[str, Any] = {f"block.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"block.{name}": RowwiseParallel() for name in ROWS}
    if kind == "tp":
        parallelize_module(model, mesh_of((4,)), plan)
    elif kind == "tp and dp":
        parallelize_module(model, mesh_of((2, 2), ("dp", "tp")), plan, "tp")
        shard_parameters(model, mesh_of((2, 2), ("dp", "tp")), "dp")
    elif kind == "mixed":
        mesh = mesh_of((4,))
        layouts = [Shard(0), RaggedShard(0, (0, 5, 1, 2)), Replicate(), StridedShard(0, split_factor=2)]
        for module in (model["block"].norm1, model["norm"]):
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), mesh, [layouts.pop()])
                module.register_parameter(name, nn.Parameter(placed))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, distribute_tensor(buffer, mesh))
    return model


def _trained(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model(kind, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = parameter.detach() * (i + 1)
        optimizer.step()
    return model, optimizer


def _same(got: Any, expected: Any, message: object = "") -> None:
    """Asserts that two states are equal leaf by leaf, as full tensors."""
    for a, b in zip(*(tree_leaves(dict(state)) for state in (got, expected)), strict=True):
        assert torch.equal(*gathered([a, b])) if isinstance(a, torch.Tensor) else a == b, message


def _has_dtensors(state: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in tree_leaves(state))


# ---- ours ----


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_full_states_round_trip(kind: Any) -> None:
    model, optimizer = _trained(kind)
    for one in (model, optimizer):
        state = one.state_dict()
        full = full_state_dict(state)
        assert not _has_dtensors(full), kind
        _same(full, state, kind)
        alone = full_state_dict(state, cpu_offload=True, rank0_only=True)
        _same(alone, full if dist.get_rank() == 0 else {}, kind)
    fresh, other = _trained(kind, seed=1)
    for one, source in ((fresh, model), (other, optimizer)):
        full = full_state_dict(source.state_dict(), cpu_offload=True, rank0_only=True)
        one.load_state_dict(sharded_state_dict(full, one.state_dict(), broadcast_from_rank0=True))
        _same(one.state_dict(), source.state_dict(), kind)
    _same(sharded_state_dict(full_state_dict(model.state_dict()), fresh.state_dict()), model.state_dict())
    placements = ([getattr(p, "placements", None) for p in net.parameters()] for net in (fresh, model))
    assert next(placements) == next(placements)


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("full", "like", "message"),
    [
        (
            {"a": ONES, "c": 1},
            {"a": ONES, "b": ONES},
            r"without the keys \[\"\['b'\]\"\] and with the additional keys \[\"\['c'\]\"\], expected the keys",
        ),
        (
            {"a": [torch.ones(3)]},
            {"a": [ONES]},
            r"got a tensor of shape \[3\] as \['a'\]\[0\], expected a tensor of shape \[2\]",
        ),
    ],
)
@on_ranks
def test_other_states_are_refused_on_every_rank(full: Any, like: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sharded_state_dict(full if dist.get_rank() == 0 else None, like, broadcast_from_rank0=True)


# ---- torch.distributed.checkpoint.state_dict ----


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_torchs_functions_get_full_states(kind: str) -> None:
    model, optimizer = _trained(kind)
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        states, expected = (
            get_state_dict(model, optimizer, options=options),
            full_state_dict(model.state_dict()),
        )
        if offload and dist.get_rank() != 0:
            assert states == ({}, {})
            continue
        assert not _has_dtensors(states)
        _same(states[0], expected)
        assert list(states[0]) == list(expected)
        assert list(states[1]["state"]) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_gloo_ranks
def test_torchs_functions_load_full_states(kind: str, broadcast: bool) -> None:
    model, optimizer = _trained(kind)
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    state, moments = get_state_dict(model, optimizer, options=options)
    fresh = _model(kind, seed=1)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    before = dict(fresh.named_parameters())
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(fresh, copy.deepcopy(state), options=loading)
    set_optimizer_state_dict(fresh, other, copy.deepcopy(moments), options=loading)
    assert all(before[name] is parameter for name, parameter in fresh.named_parameters())
    _same(fresh.state_dict(), model.state_dict(), "model")
    _same(other.state_dict(), optimizer.state_dict(), "optimizer")
    for parameter, held in other.state.items():
        assert type(held["exp_avg"]) in (type(parameter.data), DTensor)
        if isinstance(parameter, DTensor):
            assert held["exp_avg"].placements == parameter.placements
    for net, optim in ((model, optimizer), (fresh, other)):  # trains on alike
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optim.step()
    _same(fresh.state_dict(), model.state_dict(), "trained on")


def _partly_trained(kind: str, optimizer: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Every third parameter is frozen after a first step; the last three are never stepped."""
    model = _model(kind, seed)
    parameters = list(model.parameters())
    optim = optimizer(parameters)
    for step in range(2):
        for i, parameter in enumerate(parameters[:-3]):
            parameter.requires_grad_(step == 0 or i % 3 > 0)
            parameter.grad = parameter.detach() * (i + 1) if parameter.requires_grad else None
        optim.step()
    return model, optim


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
TARGETS = ["new", "frozen", "partly trained", "with gradients"]


# Flat and full at once torch cannot load, frozen parameters or not.
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("full", "offload", "flat"),
    [(False, False, False), (False, True, False), (True, False, False), (False, False, True)],
)
@pytest.mark.parametrize("target", TARGETS)
@on_ranks
def test_states_of_frozen_parameters_are_kept(
    optimizer: str, full: bool, offload: bool, flat: bool, target: str
) -> None:
    _keep_states("mixed", optimizer, full, offload, False, flat, target)


@pytest.mark.parametrize("target", TARGETS)
@on_gloo_ranks
def test_states_of_frozen_parameters_are_sent_by_rank_0(target: str) -> None:
    _keep_states("tp", "AdamW", True, True, True, False, target)


def _keep_states(
    kind: str, optimizer: str, full: bool, offload: bool, broadcast: bool, flat: bool, target: str
) -> None:
    """Loads an optimizer's state into one that is new, or whose parameters are partly frozen or without a state."""
    make = OPTIMIZERS[optimizer]
    model, optim = _partly_trained(kind, make)
    options = StateDictOptions(full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flat)
    for parameter in list(model.parameters())[-3:]:  # those without a state are refused by name, below
        parameter.requires_grad_(False)
    saved = get_optimizer_state_dict(model, optim, options=options)
    if target == "partly trained":
        fresh, other = _partly_trained(kind, make, seed=1)
        for parameter in list(fresh.parameters())[-6:-3]:
            del other.state[parameter]
    else:
        fresh = _model(kind, seed=1)
        other = make(fresh.parameters())
    for parameter, source in zip(fresh.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(source.requires_grad or target == "new")
        if target == "with gradients" and parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    for parameter in list(fresh.parameters())[-3:]:
        parameter.requires_grad_(False)
    flags = [(p.requires_grad, p.grad) for p in fresh.parameters()]
    values = copy.deepcopy(fresh.state_dict())
    loading = StateDictOptions(
        full_state_dict=full, broadcast_from_rank0=broadcast, flatten_optimizer_state_dict=flat
    )
    set_optimizer_state_dict(fresh, other, copy.deepcopy(saved), options=loading)
    _same(other.state_dict(), optim.state_dict())
    assert len(other.state) == len(list(model.parameters())) - 3
    assert [(p.requires_grad, p.grad) for p in fresh.parameters()] == flags
    _same(fresh.state_dict(), values, "parameters stay")
    for parameter, held in other.state.items():
        for moment in ("exp_avg", "momentum_buffer"):
            if isinstance(parameter, DTensor) and moment in held:
                assert held[moment].placements == parameter.placements


@on_ranks
def test_parameter_without_a_saved_state_needs_strict_false() -> None:
    model, optim = _partly_trained("tp", OPTIMIZERS["AdamW"])
    fresh, other = _trained("tp", seed=1)
    before = {parameter: dict(state) for parameter, state in other.state.items()}
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optim, options=options)
    with pytest.raises(Exception, match=r"Missing optimizer state for parameter 'block\.\S+'.*strict=False"):
        set_optimizer_state_dict(fresh, other, saved, options=options)
    assert before == {parameter: dict(state) for parameter, state in other.state.items()}
    saved = get_optimizer_state_dict(model, optim)
    set_optimizer_state_dict(fresh, other, saved, options=StateDictOptions(strict=False))
    _same(other.state_dict(), optim.state_dict())


@on_ranks
def test_states_with_other_keys_are_refused() -> None:
    _, optim = _partly_trained("tp", OPTIMIZERS["AdamW"])
    full, like = full_state_dict(optim.state_dict()), _trained("tp")[1].state_dict()
    for one, other in ((full, like), (full_state_dict(like), optim.state_dict())):
        with pytest.raises(ArgumentError, match=r"exp_avg.*expected the keys of the state to load"):
            sharded_state_dict(one, other)


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup")
@on_gloo_ranks
def test_full_state_is_loaded_into_a_model_on_meta() -> None:
    mesh = mesh_of((4,))
    source = seeded(nn.Linear, 6, 8)
    with torch.device("meta"):
        model = nn.Linear(6, 8)
    parallelize_module(model, mesh, ColwiseParallel())
    full = source.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    _same(model.state_dict(), source.state_dict())
    assert model.weight.placements == (Shard(0),) and isinstance(model.weight, nn.Parameter)


@on_gloo_ranks
def test_torchs_functions_still_handle_torchs_dtensors() -> None:
    mesh = mesh_of((4,))
    model = seeded(nn.Linear, 6, 8)
    source = copy.deepcopy(model.state_dict())
    for name, parameter in list(model.named_parameters()):
        placed = theirs.distribute_tensor(parameter.detach(), mesh, [theirs.Shard(0)])
        model.register_parameter(name, nn.Parameter(placed))
    _same(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), source)
    for broadcast in (True, False):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, {n: v * 2 for n, v in source.items()}, options=options)
        assert all(torch.equal(p.full_tensor(), source[n] * 2) for n, p in model.named_parameters())


# ---- files ----


@on_ranks
def test_checkpoints_are_exchanged_with_torchs_dtensors(tmp_path: Path) -> None:
    full = torch.arange(35.0).reshape(7, 5)
    layouts = [
        ((4,), [Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ]
    for i, (shape, placements) in enumerate(layouts):
        ours = distribute_tensor(full, mesh_of(shape), placements)
        dcp.save({"x": ours}, checkpoint_id=tmp_path / f"ours{i}")
        dcp.save({"x": to_torch(ours)}, checkpoint_id=tmp_path / f"torchs{i}")
    for i in range(len(layouts)):
        for shape, placements in layouts:
            for kind in ("ours", "torchs"):
                blank = distribute_tensor(torch.zeros(7, 5), mesh_of(shape), placements)
                state: dict[str, Any] = {"x": blank if kind == "torchs" else to_torch(blank)}
                dcp.load(state, checkpoint_id=tmp_path / f"{kind}{i}")
                assert torch.equal(blank.full_tensor(), full), (i, shape, kind)


def _save(path: str) -> None:
    model, optimizer = _trained("tp and dp")
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path)
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, f"{path}/full.pt")


def _load_smaller(path: str) -> None:
    """Loads on two ranks what four ranks have saved."""
    model = _model("plain", seed=1)
    plan: dict[str, Any] = {f"block.{name}": RowwiseParallel() for name in (*COLUMNS, *ROWS)}
    parallelize_module(model, mesh_of((2,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path)
    model.load_state_dict(state)
    set_optimizer_state_dict(model, optimizer, moments)
    expected, steps = torch.load(f"{path}/full.pt", weights_only=True)
    _same(model.state_dict(), expected)
    _same(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)), steps)


def test_checkpoint_loads_on_fewer_ranks(ranks: ThreadWorlds, tmp_path: Path) -> None:
    ranks(_save, str(tmp_path))
    ranks(_load_smaller, str(tmp_path), world_size=2)


@on_ranks
def test_full_state_of_a_partial_is_its_sum() -> None:
    terms = DTensor.from_local(torch.ones(3), mesh_of((4,)), [Partial()])
    assert full_state_dict({"x": terms})["x"].tolist() == [4.0] * 3
