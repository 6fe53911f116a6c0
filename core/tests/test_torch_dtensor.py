"""DTensors handed to torch's own class and back: memory, versions, placements, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import tensor as theirs
from torch.distributed.tensor import placement_types

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    from_torch,
    implicit_replication,
    to_torch,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    *(((4,), [placement]) for placement in (S0, S1, R, Partial(), Partial("max"))),
    ((3,), [S0]),  # rank 3 is outside
    ((2, 2), [S0, S1]),
    ((2, 2), [S0, S0]),
    ((2, 2), [S1, Partial("avg")]),
    ((2, 2), [StridedShard(0, split_factor=2), S0]),
]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1


def _spread(shape: tuple[int, ...], mesh: Any, placements: list[Placement]) -> DTensor:
    return distribute_tensor(_values(shape), mesh, placements)


@on_ranks
def test_there_and_back() -> None:
    """Values, placements and memory; every rank holds what torch would give it."""
    for mesh_shape, placements in LAYOUTS:
        for shape in ((4, 6), (8, 2), (5, 3), (2, 3)):
            if shape[0] % 4 and type(placements[0]) is StridedShard:
                continue
            mesh = mesh_of(mesh_shape)
            ours = _spread(shape, mesh, placements)
            torchs = to_torch(ours)
            message = f"{mesh_shape} {placements} {shape}"
            assert type(torchs) is theirs.DTensor and torchs.shape == shape, message
            assert torchs.device_mesh is mesh and torchs.stride() == ours.stride(), message
            assert torchs.to_local().data_ptr() == ours.to_local().data_ptr(), message
            if mesh.get_coordinate() is not None:
                assert torch.equal(torchs.full_tensor(), _values(shape)), message
            if not any(p.is_partial() for p in placements):
                distributed = theirs.distribute_tensor(_values(shape), mesh, torchs.placements)
                assert torch.equal(distributed.to_local(), ours.to_local()), message
            back = from_torch(torchs)
            assert back._spec is ours._spec and type(back) is DTensor, message
            assert back.to_local().data_ptr() == ours.to_local().data_ptr(), message


@on_ranks
def test_writes_are_seen_and_counted_on_both_sides() -> None:
    ours = _spread((4, 6), mesh_of((4,)), [S0])
    torchs = to_torch(ours)
    back = from_torch(torchs)
    expected, versions = _values((4, 6)), []
    for written in (ours, torchs, back):
        before = [t._version for t in (ours, torchs, back)]
        written.add_(1)
        expected += 1
        versions.append([t._version > v for t, v in zip((ours, torchs, back), before, strict=True)])
        assert all(torch.equal(t.full_tensor(), expected) for t in (ours, torchs, back))
    assert versions == [[True] * 3] * 3, versions


@on_ranks
def test_autograd_notices_a_write_on_the_other_side() -> None:
    for toward_torch in (True, False):
        leaf = _spread((4, 6), mesh_of((4,)), [S0])
        source: Any = (leaf if toward_torch else to_torch(leaf)).requires_grad_()
        result = (source * 2).sin()
        saved = source * 2
        squared = saved * saved
        with torch.no_grad():
            (to_torch(saved) if toward_torch else from_torch(saved)).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward()
        result.sum().backward()
        converted: Any = to_torch(source) if toward_torch else from_torch(source)
        with pytest.raises(RuntimeError, match="a view"):
            converted.mul_(2)


@on_worlds
def test_gradients_cross() -> None:
    for mesh_shape, placements in LAYOUTS:
        if mesh_shape == (3,):
            continue
        x = _spread((8, 4), mesh_of(mesh_shape), placements)
        plain = _values((8, 4)).requires_grad_()
        (plain.square().sin() * plain).sum().backward()
        x.requires_grad_()
        through: Any = from_torch(to_torch(from_torch(to_torch(x))).square().sin())
        assert through.requires_grad and isinstance(through, DTensor)
        (through * x).sum().backward()
        assert isinstance(x.grad, DTensor), placements
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        torchs: Any = to_torch(x.detach()).requires_grad_()
        (from_torch(torchs).square().sin() * from_torch(torchs)).sum().backward()
        assert type(torchs.grad) is theirs.DTensor, placements
        torch.testing.assert_close(torchs.grad.full_tensor(), plain.grad)


@on_ranks
def test_parameters_share_their_memory() -> None:
    """A parameter's values under torch's class, trained by an optimizer there."""
    parameter = nn.Parameter(_spread((4, 2), mesh_of((4,)), [S0]))
    twin = nn.Parameter(to_torch(parameter.detach()))
    twin.sum().backward()
    torch.optim.SGD([twin], lr=1.0).step()
    assert torch.equal(parameter.full_tensor(), _values((4, 2)) - 1)


def _rows() -> DTensor:
    return _spread((4, 2), mesh_of((4,)), [S0])


def _theirs() -> Any:
    return to_torch(_rows())


def _masked() -> None:
    partial = theirs.DTensor.from_local(torch.ones(2), mesh_of((4,)), [theirs.Partial()])
    partial._spec.placements = (placement_types._MaskPartial(offset_shape=torch.Size([8]), offset_dim=0),)
    from_torch(partial)


def _other_order() -> None:
    sharded = theirs.distribute_tensor(_values((8, 2)), mesh_of((2, 2)), [theirs.Shard(0), theirs.Shard(0)])
    entry = type(sharded._spec.shard_order[0])
    sharded._spec.shard_order = (entry(tensor_dim=0, mesh_dims=(1, 0)),)
    from_torch(sharded)


def _dual() -> None:
    x = _spread((4, 6), mesh_of((4,)), [S0])
    with forward_ad.dual_level():
        assert isinstance(to_torch(x), theirs.DTensor)
        to_torch(forward_ad.make_dual(x, x))


def _implicit() -> None:
    with implicit_replication():
        _theirs() + _rows()


def _loaded() -> None:
    module = nn.Linear(2, 4, bias=False)
    module.weight = nn.Parameter(_rows())
    module.load_state_dict({"weight": _theirs()})


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "wrapped": (
        lambda: DTensor.from_local(_theirs(), mesh_of((4,)), [S0]),
        "from_local got a DTensor of torch.distributed.tensor, .* use from_torch",
    ),
    "distributed": (
        lambda: distribute_tensor(_theirs(), mesh_of((4,)), [S0]),
        "distribute_tensor got a DTensor of torch.distributed.tensor, .* use from_torch",
    ),
    "mixed": (
        lambda: _theirs() + _rows(),
        r"add got a DTensor of torch.distributed.tensor of shape \[4, 2\] together",
    ),
    "transformed": (
        lambda: torch.func.grad(lambda x: to_torch(x).sum())(_rows()),
        "inside a transform of torch.func, .* convert before a transform",
    ),
    "dual": (_dual, "with a tangent of forward-mode"),
    "implicit": (_implicit, "expected one class: convert it with from_torch"),
    "loaded": (_loaded, "convert it with from_torch"),
    "ragged": (
        lambda: to_torch(_spread((4, 2), mesh_of((4,)), [RaggedShard(0, (0, 1, 2, 1))])),
        "expected placements that torch has: .* it has no RaggedShard",
    ),
    "copied": (
        lambda: to_torch(_spread((8, 2), mesh_of((4,)), [S0])[:2]),
        "expected a tensor with memory of its own",
    ),
    "plain": (lambda: to_torch(torch.ones(2)), "to_torch got torch.Tensor, expected a dtbench_core.DTensor"),
    "ours": (
        lambda: from_torch(_rows()),
        "from_torch got .*dtensor.DTensor, expected a torch.distributed.tensor.DTensor",
    ),
    "masked": (_masked, "_MaskPartial.* as a placement, expected"),
    "other order": (_other_order, "expected the outer mesh dim first"),
}


def _refused(name: str) -> None:
    REFUSED[name][0]()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_the_other_has_not_is_refused(ranks: ThreadWorlds, name: str) -> None:
    ranks.refuse(_refused, name, message=REFUSED[name][1])


# ---- compiled ----


IN_GRAPHS: dict[str, Callable[[Any], Any]] = {
    "leaves": lambda x: to_torch(x * x).to_local() * 2,
    "goes through": lambda x: (from_torch(to_torch(x * x) + 1) * 3).redistribute(placements=[R]).to_local(),
    "comes": lambda x: (from_torch(x * x) + 1).to_local(),
}


@on_ranks
def test_conversions_stand_in_a_graph() -> None:
    for name, program in IN_GRAPHS.items():
        torch._dynamo.reset()
        inputs: list[Any] = [_spread((8, 2), mesh_of((4,)), [S0]) for _ in range(2)]
        if name == "comes":
            inputs = [to_torch(x) for x in inputs]
        got, expected = (x.requires_grad_() for x in inputs)
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        for result in (one := compiled(got), two := program(expected)):
            result.square().sum().backward()
        assert torch.equal(one, two) and type(got.grad) is type(expected.grad), name
        assert torch.equal(got.grad.to_local(), expected.grad.to_local()), name
