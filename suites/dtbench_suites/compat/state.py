"""Copies, pickles, state dicts, checkpoints on disk, parametrizations."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import parametrizations, parametrize

from dtbench_suites.compat.program import Given, program, randn


def _net(w: Given, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return w.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), "S(0)")


def _shared_folder() -> str:
    names = [tempfile.mkdtemp(prefix="dtbench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    assert names[0] is not None
    return names[0]


@program("state")
def deepcopy_of_a_tensor(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)", grad=True)
    x.pow(2).sum().backward()
    y = copy.deepcopy(x)
    x.data.zero_()
    return y, y.grad, y.requires_grad


@program("state")
def deepcopy_of_a_module(w: Given) -> Any:
    net = _net(w)
    other = copy.deepcopy(net)
    net[0].weight.data.zero_()  # type: ignore[index]
    return list(other.parameters())


@program("state")
def deepcopy_of_an_intermediate_is_refused(w: Given) -> Any:
    return copy.deepcopy(w.place(randn(8, 4), "S(0)", grad=True) * 2)


@program("state")
def pickle_of_a_tensor(w: Given) -> Any:
    return pickle.loads(pickle.dumps(w.place(randn(8, 4), "S(0)")))


@program("state")
def torch_save_and_load(w: Given) -> Any:
    file = io.BytesIO()
    torch.save(_net(w).state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@program("state")
def torch_load_of_weights_only(w: Given) -> Any:
    file = io.BytesIO()
    torch.save(_net(w).state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@program("state")
def load_state_dict(w: Given) -> Any:
    net = _net(w)
    net.load_state_dict(_net(w, 2).state_dict())
    return net.state_dict()


@program("state")
def load_state_dict_from_plain_tensors(w: Given) -> Any:
    net = _net(w)
    torch.manual_seed(2)
    net.load_state_dict(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).state_dict())
    return net.state_dict()


@program("state")
def load_state_dict_by_assignment(w: Given) -> Any:
    net = _net(w)
    net.load_state_dict(_net(w, 2).state_dict(), assign=True)
    return net.state_dict()


@program("state")
def load_state_dict_with_missing_keys_is_refused(w: Given) -> Any:
    net, given = _net(w), _net(w, 2).state_dict()
    del given["0.weight"]
    net.load_state_dict(given, strict=True)


@program("state")
def load_state_dict_not_strict(w: Given) -> Any:
    net, given = _net(w), _net(w, 2).state_dict()
    del given["0.weight"]
    missing = net.load_state_dict(given, strict=False).missing_keys
    return missing, net.state_dict()


@program("state")
def load_state_dict_of_another_shape_is_refused(w: Given) -> Any:
    net, given = _net(w), _net(w, 2).state_dict()
    given["0.weight"] = w.place(randn(4, 4), "S(0)")
    net.load_state_dict(given)


@program("state")
def checkpoint_on_disk(w: Given) -> Any:
    net = _net(w)
    wanted = copy.deepcopy(net.state_dict())
    if w.plain:
        return wanted
    folder, into = _shared_folder(), _net(w, 2).state_dict()
    save(net.state_dict(), checkpoint_id=folder)
    load(into, checkpoint_id=folder)
    return into


@program("state")
def checkpoint_on_disk_loaded_to_other_placements(w: Given) -> Any:
    x = w.place(randn(7, 8), "S(0)")
    if w.plain:
        return [x, x]
    folder, into = _shared_folder(), [w.place(torch.zeros(7, 8), place) for place in ("S(1)", "R")]
    for each in into:
        state = {"x": x}
        save(state, checkpoint_id=folder)
        load({"x": each}, checkpoint_id=folder)
    return into


@program("state")
def parametrized_weight(w: Given) -> Any:
    class Double(nn.Module):
        def forward(self, t: Any) -> Any:
            return t * 2

    net = _net(w)
    parametrize.register_parametrization(net[0], "weight", Double())  # type: ignore[index]
    net(w.place(randn(8, 4), "R")).pow(2).sum().backward()
    return [p.grad for p in net.parameters()]


@program("state")
def weight_norm(w: Given) -> Any:
    net = _net(w)
    parametrizations.weight_norm(net[0])  # type: ignore[index]
    net(w.place(randn(8, 4), "R")).pow(2).sum().backward()
    return [p.grad for p in net.parameters()]


@program("state")
def orthogonal_weight(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.Linear(4, 4), "R")
    parametrizations.orthogonal(net)
    weight: Any = net.weight
    return weight @ weight.t()


@program("state")
def module_moved_to_another_dtype(w: Given) -> Any:
    net = _net(w).double()
    return list(net.parameters()), net(w.place(randn(8, 4).double(), "R"))


@program("state")
def module_built_on_meta_and_filled(w: Given) -> Any:
    with torch.device("meta"):
        net: Any = nn.Linear(4, 8)
    if not w.plain:
        for name, parameter in list(net.named_parameters()):
            meta = w.api.DTensor.from_local(
                torch.empty((2, *parameter.shape[1:]), device="meta"),
                w.mesh,
                w.placements(["S(0)"]),
                run_check=False,
            )
            setattr(net, name, nn.Parameter(meta))
    net.to_empty(device="cpu")
    nn.init.constant_(net.weight, 2.0)
    nn.init.zeros_(net.bias)
    return list(net.parameters())


@program("state")
def parameters_as_one_vector(w: Given) -> Any:
    net = _net(w)
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 2, net.parameters())
    return vector, list(net.parameters())


@program("state")
def swap_of_tensors(w: Given) -> Any:
    x, y = w.place(randn(8, 4), "S(0)"), w.place(randn(8, 4, seed=1), "S(1)")
    torch.utils.swap_tensors(x, y)
    return x, y


@program("state")
def printed(w: Given) -> Any:
    return w.known(len(repr(w.place(randn(8, 4), "S(0)"))) > 20, True)


@program("state")
def type_of_a_parameter(w: Given) -> Any:
    p = nn.Parameter(w.place(randn(8, 4), "S(0)"))
    return isinstance(p, nn.Parameter), p.is_leaf, p.requires_grad


@program("state")
def numbers_out_of_tensors(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    return torch.tensor(x.sum().item()), float(x.max()), bool((x > -100).all()), w.gather()(x).tolist()


@program("state")
def checkpoint_on_disk_of_a_trained_model(w: Given) -> Any:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = _net(w, seed)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        net(w.place(randn(8, 4, seed=seed), "R")).pow(2).sum().backward()
        optimizer.step()
        return net, optimizer

    (net, optimizer), (other, other_optimizer) = trained(1), trained(2)
    if w.plain:
        other.load_state_dict(net.state_dict())
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        folder, keys = _shared_folder(), ("model", "optimizer")
        save(dict(zip(keys, get_state_dict(net, optimizer), strict=True)), checkpoint_id=folder)
        into: dict[str, Any] = dict(zip(keys, get_state_dict(other, other_optimizer), strict=True))
        load(into, checkpoint_id=folder)
        set_state_dict(
            other, other_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
        )
    other_optimizer.step()
    return list(other.parameters())


@program("state")
def whole_state_dict(w: Given) -> Any:
    from torch.distributed.checkpoint import state_dict as states

    net, other = _net(w), _net(w, 2)
    options = states.StateDictOptions(full_state_dict=True)
    whole = states.get_model_state_dict(net, options=options)
    states.set_model_state_dict(other, whole, options=options)
    return dict(whole), other.state_dict()


@program("state")
def whole_state_dict_from_rank_0(w: Given) -> Any:
    from torch.distributed.checkpoint import state_dict as states

    net = _net(w)
    torch.manual_seed(2)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).state_dict() if w.plain or w.rank == 0 else {}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=not w.plain)
    states.set_model_state_dict(net, whole, options=options)
    return net.state_dict()


@program("state")
def checkpoint_on_disk_of_plain_and_placed_tensors(w: Given) -> Any:
    state: dict[str, Any] = {"x": w.place(randn(7, 5), "S(0)", "S(1)"), "rest": [torch.ones(3), 5, "text"]}
    if w.plain:
        return state
    folder = _shared_folder()
    save(state, checkpoint_id=folder)
    into: dict[str, Any] = {"x": w.place(torch.zeros(7, 5), "S(1)", "R"), "rest": [torch.zeros(3), 0, ""]}
    load(into, checkpoint_id=folder)
    return into


@program("state")
def checkpoint_saved_asynchronously(w: Given) -> Any:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    x = w.place(randn(7, 4), "S(0)")
    if w.plain:
        return x
    folder, into = _shared_folder(), w.place(torch.zeros(7, 4), "S(0)")
    saving: Any = async_save({"x": x}, checkpoint_id=folder)
    saving.result()
    load({"x": into}, checkpoint_id=folder)
    return into


@program("state")
def deepcopy_of_nested_containers(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    kept = {"a": [x, (x, {"b": x * 2})], "n": 3}
    other = copy.deepcopy(kept)
    x.zero_()
    return other, other["a"][0] is other["a"][1][0], copy.copy(kept)["a"][0]  # type: ignore[index]


@program("state")
def torch_save_of_parameters_and_views(w: Given) -> Any:
    x = w.place(randn(8, 4), "S(0)")
    file = io.BytesIO()
    torch.save({"p": nn.Parameter(x), "view": x[:, 1:3], "t": x.t(), "twice": [x, x]}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    return found, isinstance(found["p"], nn.Parameter), found["p"].requires_grad


@program("state")
def module_pickled(w: Given) -> Any:
    net = pickle.loads(pickle.dumps(_net(w)))
    return net.state_dict(), net(w.place(randn(8, 4), "R"))


@program("state")
def optimizer_pickled(w: Given) -> Any:
    net = _net(w)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net(w.place(randn(8, 4), "R")).pow(2).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    optimizer.step()
    return list(net.parameters())


@program("state")
def module_in_half_precision_and_back(w: Given) -> Any:
    net = _net(w).bfloat16()
    with torch.no_grad():
        out = net(w.place(randn(8, 4).bfloat16(), "R")).float()
    return list(net.float().parameters()), out.dtype is torch.float32, net.requires_grad_(False)[0].weight  # type: ignore[index]
