"""Copies, pickles, state dicts, checkpoints on disk, parametrizations."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import parametrizations, parametrize

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, randn


def _net(w: Given, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return w.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), "S(0)")


def _through_file(value: object, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _through_disk(w: Given, state: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """What a distributed checkpoint of `state` loads `into`; plain tensors: `state` itself."""
    if w.plain:
        return state
    folder = _shared_folder()
    save(state, checkpoint_id=folder)
    load(into, checkpoint_id=folder)
    return into


def _loaded(w: Given, state: Mapping[str, Any], without: str = "", **options: bool) -> object:
    """A module after it took the state dict, and what it missed. without: a key to leave out."""
    net = _net(w)
    taken = {name: value for name, value in state.items() if name != without}
    missing = net.load_state_dict(taken, **options).missing_keys
    return missing, net.state_dict()


def _shared_folder() -> str:
    names = [tempfile.mkdtemp(prefix="dtbench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    assert names[0] is not None
    return names[0]


class State(Programs):
    topic = "state"
    cases: ClassVar[Cases] = {
        "torch save and load": lambda w: _through_file(_net(w).state_dict(), weights_only=False),
        "torch load of weights only": lambda w: _through_file(_net(w).state_dict(), weights_only=True),
        "load state dict": lambda w: _loaded(w, _net(w, 2).state_dict()),
        "load state dict from plain tensors": lambda w: _loaded(w, _net(Given("plain"), 2).state_dict()),
        "load state dict by assignment": lambda w: _loaded(w, _net(w, 2).state_dict(), assign=True),
        "load state dict with missing keys is refused": lambda w: _loaded(
            w, _net(w, 2).state_dict(), "0.weight"
        ),
        "load state dict not strict": lambda w: _loaded(w, _net(w, 2).state_dict(), "0.weight", strict=False),
        "load state dict of another shape is refused": lambda w: _loaded(
            w, {**_net(w, 2).state_dict(), "0.weight": w.place(randn(4, 4), "S(0)")}
        ),
        "checkpoint on disk": lambda w: _through_disk(w, _net(w).state_dict(), _net(w, 2).state_dict()),
        "pickle of a tensor": lambda w: pickle.loads(pickle.dumps(w.rows())),
        "printed": lambda w: w.expected(len(repr(w.rows())) > 20, True),
        "deepcopy of an intermediate is refused": lambda w: copy.deepcopy(w.leaf() * 2),
    }

    def deepcopy_of_a_tensor(self) -> object:
        x = self.leaf()
        x.pow(2).sum().backward()
        y = copy.deepcopy(x)
        x.data.zero_()
        return y, y.grad, y.requires_grad

    def deepcopy_of_a_module(self) -> object:
        net = _net(self)
        other = copy.deepcopy(net)
        net[0].weight.data.zero_()
        return list(other.parameters())

    def checkpoint_on_disk_loaded_to_other_placements(self) -> object:
        x = self.place(randn(7, 8), "S(0)")
        other = [self.place(torch.zeros(7, 8), place) for place in ("S(1)", "R")]
        return [_through_disk(self, {"x": x}, {"x": each}) for each in other]

    def parametrized_weight(self) -> object:
        class Double(nn.Module):
            def forward(self, t: AnyTensor) -> AnyTensor:
                return t * 2

        net = _net(self)
        parametrize.register_parametrization(net[0], "weight", Double())
        return self.backward(net(self.rows("R")), net)

    def weight_norm(self) -> object:
        net = _net(self)
        parametrizations.weight_norm(net[0])
        return self.backward(net(self.rows("R")), net)

    def orthogonal_weight(self) -> object:
        net = self.seeded(lambda: nn.Linear(4, 4), "R")
        parametrizations.orthogonal(net)
        weight: Any = net.weight
        return weight @ weight.t()

    def module_moved_to_another_dtype(self) -> object:
        net = _net(self).double()
        return list(net.parameters()), net(self.place(randn(8, 4).double(), "R"))

    def module_built_on_meta_and_filled(self) -> object:
        with torch.device("meta"):
            net: Any = nn.Linear(4, 8)
        if not self.plain:
            for name, parameter in list(net.named_parameters()):
                meta = self.api.DTensor.from_local(
                    torch.empty((2, *parameter.shape[1:]), device="meta"),
                    self.mesh,
                    self.placements(["S(0)"]),
                    run_check=False,
                )
                setattr(net, name, nn.Parameter(meta))
        net.to_empty(device="cpu")
        nn.init.constant_(net.weight, 2.0)
        nn.init.zeros_(net.bias)
        return list(net.parameters())

    def parameters_as_one_vector(self) -> object:
        net = _net(self)
        vector = nn.utils.parameters_to_vector(net.parameters())
        nn.utils.vector_to_parameters(vector * 2, net.parameters())
        return vector, list(net.parameters())

    def swap_of_tensors(self) -> object:
        x, y = self.rows(), self.place(randn(8, 4, seed=1), "S(1)")
        torch.utils.swap_tensors(x, y)
        return x, y

    def type_of_a_parameter(self) -> object:
        p = nn.Parameter(self.rows())
        return isinstance(p, nn.Parameter), p.is_leaf, p.requires_grad

    def numbers_out_of_tensors(self) -> object:
        x = self.rows()
        return torch.tensor(x.sum().item()), float(x.max()), bool((x > -100).all()), self.gather()(x).tolist()

    def checkpoint_on_disk_of_a_trained_model(self) -> object:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            net = _net(self, seed)
            optimizer = torch.optim.AdamW(net.parameters(), 0.1)
            net(self.place(randn(8, 4, seed=seed), "R")).pow(2).sum().backward()
            optimizer.step()
            return net, optimizer

        (net, optimizer), (other, other_optimizer) = trained(1), trained(2)
        if self.plain:
            other.load_state_dict(net.state_dict())
            other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            keys = ("model", "optimizer")
            state, fresh = get_state_dict(net, optimizer), get_state_dict(other, other_optimizer)
            into = _through_disk(
                self, dict(zip(keys, state, strict=True)), dict(zip(keys, fresh, strict=True))
            )
            set_state_dict(
                other, other_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
            )
        other_optimizer.step()
        return list(other.parameters())

    def whole_state_dict(self) -> object:
        from torch.distributed.checkpoint import state_dict as states

        net, other = _net(self), _net(self, 2)
        options = states.StateDictOptions(full_state_dict=True)
        whole = states.get_model_state_dict(net, options=options)
        states.set_model_state_dict(other, whole, options=options)
        return dict(whole), other.state_dict()

    def whole_state_dict_from_rank_0(self) -> object:
        from torch.distributed.checkpoint import state_dict as states

        net = _net(self)
        torch.manual_seed(2)
        whole = (
            nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).state_dict()
            if self.plain or self.rank == 0
            else {}
        )
        options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=not self.plain)
        states.set_model_state_dict(net, whole, options=options)
        return net.state_dict()

    def checkpoint_on_disk_of_plain_and_placed_tensors(self) -> object:
        state = {"x": self.place(randn(7, 5), "S(0)", "S(1)"), "rest": [torch.ones(3), 5, "text"]}
        into = {"x": self.place(torch.zeros(7, 5), "S(1)", "R"), "rest": [torch.zeros(3), 0, ""]}
        return _through_disk(self, state, into)

    def checkpoint_saved_asynchronously(self) -> object:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        x = self.place(randn(7, 4), "S(0)")
        if self.plain:
            return x
        folder, into = _shared_folder(), self.place(torch.zeros(7, 4), "S(0)")
        saving: Any = async_save({"x": x}, checkpoint_id=folder)
        saving.result()
        load({"x": into}, checkpoint_id=folder)
        return into

    def deepcopy_of_nested_containers(self) -> object:
        x = self.rows()
        kept: dict[str, Any] = {"a": [x, (x, {"b": x * 2})], "n": 3}
        other = copy.deepcopy(kept)
        x.zero_()
        return other, other["a"][0] is other["a"][1][0], copy.copy(kept)["a"][0]

    def torch_save_of_parameters_and_views(self) -> object:
        x = self.rows()
        found = _through_file(
            {"p": nn.Parameter(x), "view": x[:, 1:3], "t": x.t(), "twice": [x, x]}, weights_only=True
        )
        return found, isinstance(found["p"], nn.Parameter), found["p"].requires_grad

    def module_pickled(self) -> object:
        net = pickle.loads(pickle.dumps(_net(self)))
        return net.state_dict(), net(self.rows("R"))

    def optimizer_pickled(self) -> object:
        net = _net(self)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        net(self.rows("R")).pow(2).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(_through_file(optimizer.state_dict(), weights_only=True))
        optimizer.step()
        return list(net.parameters())

    def module_in_half_precision_and_back(self) -> object:
        net = _net(self).bfloat16()
        with torch.no_grad():
            out = net(self.place(randn(8, 4).bfloat16(), "R")).float()
        return list(net.float().parameters()), out.dtype is torch.float32, net.requires_grad_(False)[0].weight
