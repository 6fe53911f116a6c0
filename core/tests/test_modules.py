"""Modules with DTensor parameters: training, copies, conversions, state dicts and checkpoints."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations

from core.tests.gloo_world import mesh_of, on_gloo_ranks, on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from core.tests.placing import S0, S1, P, R, full, place, sharded
from dtbench_core import (
    CoreError,
    DTensor,
    LayoutError,
    MeshError,
    MixedTensorError,
    NoRuleError,
    Partial,
    Placement,
    distribute_tensor,
)


def _assert_trains_alike(module: nn.Module, plain: nn.Module, x: DTensor) -> None:
    """Asserts equal outputs and equal gradients of all parameters."""
    results = []
    for one, inputs in ((module, x), (plain, x.full_tensor())):
        one.zero_grad()
        out = one(inputs)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append({"out": out, **{name: p.grad for name, p in one.named_parameters()}})
    assert all(isinstance(result, DTensor) for result in results[0].values())
    torch.testing.assert_close(full(results[0]), results[1])


# ---- recurrent modules, without states given ----

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(4, 6, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(4, 6, batch_first=True),
    "RNN": lambda: nn.RNN(4, 6, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(4, 6),
    "GRUCell": lambda: nn.GRUCell(4, 6),
    "RNNCell": lambda: nn.RNNCell(4, 6),
}


@pytest.mark.parametrize(("placed", "given"), ((R, S0), (S0, R), (R, R)))
@pytest.mark.filterwarnings(
    "ignore::dtbench_core.dispatch.fallback.FallbackWarning", "ignore:LSTM with projections:UserWarning"
)
@pytest.mark.parametrize("name", RECURRENT)
@on_ranks
def test_recurrent_modules_start_from_zeros(name: str, placed: Any, given: Any) -> None:
    torch.manual_seed(0)
    plain = RECURRENT[name]()
    shape = (8, 4) if name.endswith("Cell") else (8, 3, 4)
    _assert_trains_alike(sharded(plain, placed), plain, place(torch.randn(shape), given))


@on_ranks
def test_plain_input_of_a_recurrent_module_is_refused() -> None:
    module = sharded(nn.GRU(4, 6))
    with pytest.raises(MixedTensorError, match=r"gru got a plain torch\.Tensor of shape \[5, 2, 4\]"):
        module(torch.ones(5, 2, 4))
    with pytest.raises(MixedTensorError, match=r"gru got a plain torch\.Tensor of shape \[18, 4\]"):
        nn.GRU(4, 6)(place(torch.ones(5, 2, 4)))


# ---- loading plain tensors ----


@on_worlds
def test_modules_load_plain_tensors() -> None:
    """Every rank has the full plain tensor and takes its shard."""
    torch.manual_seed(0)
    plain, other = nn.Linear(3, 5), nn.Linear(3, 5)
    for placement in (S0, R):
        module = sharded(other, placement)
        module.load_state_dict(plain.state_dict())
        assert all(p.placements == (placement,) and p.requires_grad for p in module.parameters())
        torch.testing.assert_close(full([*module.parameters()]), [*plain.parameters()], rtol=0, atol=0)
    for placement in (P, Partial("avg"), Partial("max"), S1):
        tensor = place(torch.zeros(2, 3), placement)
        for values in (torch.arange(6.0).reshape(2, 3), torch.arange(3)):  # the second is broadcast, and cast
            tensor.copy_(values)
            assert tensor.placements == (placement,) and (tensor.full_tensor() == values).all(), placement


@on_worlds
def test_copy_of_a_plain_tensor_passes_the_gradient() -> None:
    source = torch.ones(5, requires_grad=True)
    tensor = place(torch.zeros(5), S0).copy_(source)
    (tensor * place(torch.arange(5.0), S0)).sum().full_tensor().backward()
    assert (source.grad == torch.arange(5.0)).all()
    with pytest.raises(MixedTensorError, match="copy_ got a plain"):
        torch.zeros(5).copy_(tensor.detach())


# ---- gradients that DTensors do not have ----


@pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")
@on_ranks
def test_sparse_gradients_are_refused() -> None:
    for placement in (R, S0, S1):
        out = sharded(nn.Embedding(8, 4, sparse=True), placement)(place(torch.tensor([1, 2, 1])))
        with pytest.raises(NoRuleError, match="set sparse=False"):
            out.sum().backward()


# ---- parametrizations, conversions ----

NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": lambda module: torch.nn.utils.weight_norm(module),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::dtbench_core.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize("name", NORMED)
@on_ranks
def test_parametrized_weights(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 8)
    for placement in (S0, R):
        torch.manual_seed(1)
        plain = NORMED[name](copy.deepcopy(linear))
        torch.manual_seed(1)
        _assert_trains_alike(NORMED[name](sharded(linear, placement)), plain, place(torch.randn(5, 4)))
    if not name.startswith("old"):  # whose weight is no leaf, which no module copies
        _assert_trains_alike(sharded(plain.eval()), plain, place(torch.randn(5, 4)))


@on_ranks
def test_conversions_keep_the_parameter_object() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    module = sharded(plain)
    weight = module[0].weight
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        module.to(dtype)
        assert module[0].weight is weight and isinstance(weight, nn.Parameter), "an optimizer holds it"
        assert weight.dtype == weight.to_local().dtype == weight.full_tensor().dtype == dtype
        assert weight.placements == (S0,) and weight.requires_grad
    module.requires_grad_(False)
    assert not any(p.requires_grad for p in module.parameters())
    assert module.requires_grad_()(place(torch.ones(2, 4))).requires_grad
    module.to("meta").to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert module[0].weight.placements == (S0,)
    torch.testing.assert_close(module(place(torch.ones(2, 4))).full_tensor(), plain(torch.ones(2, 4)))


# ---- norms of half-precision tensors, with weights of their own precision and in float32 ----

NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, weight, _: F.layer_norm(x, (4,), weight, weight),
    "layer_norm without weight": lambda x, *_: F.layer_norm(x, (4,)),
    "group_norm": lambda x, _, channels: F.group_norm(x, 2, channels, channels),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("precision", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks
def test_half_precision(dtype: torch.dtype, precision: torch.dtype | None, name: str) -> None:
    rng = torch.Generator().manual_seed(2)
    x, *weights = (torch.randn(shape, generator=rng) for shape in ((5, 8, 4), (4,), (8,)))
    plain = [x.to(dtype), *(weight.to(precision or dtype) for weight in weights)]
    placed = [place(plain[0], S0), place(plain[1], R), place(plain[2], R)]
    assert NORMS[name](*placed).dtype == NORMS[name](*plain).dtype
    plain[0].requires_grad_()
    placed[0].requires_grad_()
    results = []
    for inputs in (plain, placed):
        out = NORMS[name](*inputs)
        out.float().square().sum().backward()
        results.append(full([out, inputs[0].grad]))
    torch.testing.assert_close(*results)


# ---- copies and checkpoints ----


Layout = tuple[tuple[int, ...], list[Placement]]
LAYOUTS: list[Layout] = [
    ((4,), [S0]),
    ((4,), [S1]),
    ((4,), [R]),
    ((2, 2), [S0, S1]),
    ((2, 2), [S1, R]),
    ((2, 2), [S0, S0]),
]


def _tensor(layout: Layout, shape: tuple[int, ...] = (5, 3)) -> DTensor:
    return place(
        torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape),
        *layout[1],
        mesh=layout[0],
    )


def _same(a: DTensor, b: DTensor) -> bool:
    """Returns whether two DTensors are equal without sharing memory."""
    one, other = a.to_local(), b.to_local()
    apart = one.numel() == 0 or one.data_ptr() != other.data_ptr()
    return a._spec is b._spec and type(a) is type(b) and bool((one == other).all()) and apart


# ---- copies ----


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks
def test_copies_are_equal_and_own_their_memory(layout: Any) -> None:
    tensor = _tensor(layout)
    assert _same(copy.deepcopy(tensor), tensor)
    assert _same(pickle.loads(pickle.dumps(tensor)), tensor)
    saved = io.BytesIO()
    torch.save({"x": [tensor]}, saved)
    for weights_only in (True, False):
        saved.seek(0)
        assert _same(torch.load(saved, weights_only=weights_only)["x"][0], tensor)


@on_ranks
def test_unpickling_finds_the_mesh_among_equal_ones() -> None:
    """Equal meshes have different process groups; a loaded tensor uses those of its original mesh."""
    one, other = (
        distribute_tensor(torch.arange(15.0).view(5, 3), init_device_mesh("cpu", (2, 2)), [S0, S1])
        for _ in range(2)
    )
    assert _same(pickle.loads(pickle.dumps(one)), one) and _same(pickle.loads(pickle.dumps(other)), other)
    assert one._spec is not other._spec


@on_ranks
def test_copied_parameters_are_parameters() -> None:
    parameter = nn.Parameter(_tensor(LAYOUTS[0]))
    (parameter * 2).redistribute(placements=[R]).sum().backward()
    twice = copy.deepcopy([parameter, parameter])
    loaded = pickle.loads(pickle.dumps(parameter))
    frozen = copy.deepcopy(nn.Parameter(_tensor(LAYOUTS[0]), requires_grad=False))
    assert parameter.grad is not None and twice[0].grad is None, "as the copy of a plain parameter"
    assert all(isinstance(t, nn.Parameter) and isinstance(t, DTensor) for t in (*twice, loaded, frozen))
    assert all(t.is_leaf and t.requires_grad for t in (*twice, loaded)) and not frozen.requires_grad, "leaf"
    assert twice[0] is twice[1], "one"
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(parameter * 2)
    assert _same(loaded, parameter) and _same(twice[0], parameter), "equal"


@on_ranks
@pytest.mark.parametrize("leaf", [True, False])
def test_data_of_a_from_local_result_counts_its_writes_separately(leaf: bool) -> None:
    """Writes through `.data` count for the plain tensor, but not for autograd."""
    source = _tensor(LAYOUTS[0], (4, 2)).double()
    plain = source.to_local().clone().requires_grad_()
    x = DTensor.from_local(plain if leaf else plain * 1, source.device_mesh, source.placements)
    y, of_view = x**2, x[:, :1] ** 3
    x.data.mul_(2)
    x[:, :1].data.add_(1)
    (y.sum() + of_view.sum()).backward()
    with torch.no_grad():  # both saved what x holds since
        wanted = 2 * x
        wanted[:, :1].add_(3 * x[:, :1] ** 2)
    assert plain.grad is not None and torch.equal(plain.grad, wanted.to_local())
    z = x * x
    with torch.no_grad():
        x.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        z.sum().backward()


@on_ranks
def test_data_may_be_read_and_assigned() -> None:
    leaf, other = _tensor(LAYOUTS[0]).requires_grad_(), _tensor(LAYOUTS[3], (4, 2)).double()
    shared = leaf.data
    shared.add_(1)
    leaf.data = other
    assert not shared.requires_grad and float(shared.sum().full_tensor()) == sum(range(15)) + 15
    assert leaf._spec is other._spec and leaf.dtype == torch.float64 and tuple(leaf.size()) == (4, 2)
    assert float((leaf * 1).detach().sum().full_tensor()) == sum(range(8)) and leaf.requires_grad
    with pytest.raises(CoreError, match="expected a DTensor"):
        leaf.data = torch.ones(4, 2)


@on_ranks
def test_copy_of_a_view_may_be_written() -> None:
    window = _tensor(LAYOUTS[0])[:1]  # gathered before it was cut: not to be written to
    assert copy.deepcopy(window).fill_(1).full_tensor().flatten().tolist() == [1.0] * 3


def _save_and_load_that_of_another_rank(path: str) -> None:
    torch.save(_tensor(LAYOUTS[0]), f"{path}/{dist.get_rank()}.pt")
    dist.barrier()
    # The ranks have 2, 2, 1 and 0 rows, so that rank 3 - r never has as many as rank r.
    with pytest.raises(LayoutError, match="every rank must load the part that it saved"):
        torch.load(f"{path}/{3 - dist.get_rank()}.pt")


def test_saved_shard_is_loaded_by_its_own_rank_only(ranks: ThreadWorlds, tmp_path: Path) -> None:
    ranks(_save_and_load_that_of_another_rank, str(tmp_path))
    with pytest.raises(MeshError, match="no process group, expected the world that saved it"):
        torch.load(tmp_path / "0.pt")


# ---- modules ----


def _sharded_module() -> nn.Module:
    torch.manual_seed(3)
    return sharded(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)))


@on_ranks
def test_modules_load_states_in_place_and_by_assignment() -> None:
    module, twin = _sharded_module(), _sharded_module()
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    state = copy.deepcopy(module.state_dict())
    before = dict(twin.named_parameters())
    twin.load_state_dict(state)
    assert all(before[name] is parameter for name, parameter in twin.named_parameters())
    assert all(_same(a, b) for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    twin.load_state_dict(state, assign=True)
    assert all(
        p.to_local().data_ptr() == state[name].to_local().data_ptr() and p.requires_grad
        for name, p in twin.named_parameters()
    )


# ---- torch.distributed.checkpoint ----


@pytest.mark.parametrize("shape", [(5, 3), (8, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
@on_ranks
def test_checkpoints_reshard(tmp_path: Path, saved: Layout, shape: tuple[int, ...]) -> None:
    """Saves one layout and loads it into every other."""
    dcp.save({"x": _tensor(saved, shape), "step": 7}, checkpoint_id=tmp_path)
    for layout in LAYOUTS:
        state: dict[str, Any] = {"x": _tensor(layout, shape).fill_(-1), "step": 0}
        dcp.load(state, checkpoint_id=tmp_path)
        assert state["step"] == 7 and _same(state["x"], _tensor(layout, shape)), layout


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
@on_gloo_ranks
def test_asynchronous_checkpoints(tmp_path: Path, layout: Layout) -> None:
    """The file has the values at the time of saving, although the tensor changes before it is written."""
    tensor = _tensor(layout)
    saving = dcp.async_save({"x": tensor}, checkpoint_id=tmp_path)
    tensor.fill_(-1)
    saving.result()
    loaded = torch.zeros(5, 3)
    dcp.load({"x": loaded}, checkpoint_id=tmp_path)
    assert loaded.flatten().tolist() == [float(i) for i in range(15)]


@on_ranks
def test_partial_cannot_be_saved(tmp_path: Path) -> None:
    terms = DTensor.from_local(torch.ones(3), mesh_of((4,)), [Partial()])
    with pytest.raises(BaseException, match="expected Shard or Replicate: redistribute it first"):
        dcp.save({"x": terms}, checkpoint_id=tmp_path)
