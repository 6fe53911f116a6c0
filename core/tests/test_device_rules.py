"""Rules of ops that only run on other devices: every row is tried on meta tensors of each rank's shards.

That shows shapes, order and number of results; values need the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

from core.tests.op_case import DEVICE_ONLY
from core.tests.torch_version import BEFORE_213
from dtbench_core import Replicate, Shard, distribute_tensor
from dtbench_core.dispatch import rank_check
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.rules.base import OpCall, rules_by_op

aten = torch.ops.aten
BATCH, HEADS, LENGTH, WIDTH = 7, 5, 32, 16  # uneven on 4 and on 2 ranks, and nowhere empty on 2

QUERY = (BATCH, HEADS, LENGTH, WIDTH)


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def _attention_calls() -> Iterator[tuple[Any, tuple[Any, ...], int]]:
    """(op, arguments, how many rows are expected): forward, then backward with forward's results."""
    q, k, v, grad = (_half(*QUERY) for _ in range(4))
    for bias in (_half(BATCH, HEADS, LENGTH, LENGTH), _half(BATCH, 1, LENGTH, LENGTH)):
        op = aten._scaled_dot_product_efficient_attention.default
        out, logsumexp, seed, offset = op(q, k, v, bias, True)
        yield op, (q, k, v, bias, True), 2
        given = (grad, q, k, v, bias, out, logsumexp, seed, offset, 0.0, [True] * 4)
        yield aten._scaled_dot_product_efficient_attention_backward.default, given, 2
        op = aten._scaled_dot_product_cudnn_attention.default
        made = op(q, k, v, bias, True)
        yield op, (q, k, v, bias, True), 2
        given = (grad, q, k, v, made[0], made[1], made[6], made[7], bias, *made[2:6], 0.0, False)
        yield aten._scaled_dot_product_cudnn_attention_backward.default, given, 2
        op = aten._scaled_dot_product_fused_attention_overrideable.default
        made = op(q, k, v, bias)
        yield op, (q, k, v, bias), 2
        given = (grad, q, k, v, bias, [True] * 4, *made[:6], 0.0, False, made[6], made[7])
        yield aten._scaled_dot_product_fused_attention_overrideable_backward.default, given, 2
    op = aten._scaled_dot_product_flash_attention.default
    made = op(q, k, v)
    yield op, (q, k, v), 2
    yield op, (q, k, v, 0.5), 0  # dropout
    given = (grad, q, k, v, *made[:6], 0.0, False, made[6], made[7])
    yield aten._scaled_dot_product_flash_attention_backward.default, given, 2
    x, weight = _half(BATCH, LENGTH, WIDTH), _half(WIDTH)
    op = aten._fused_rms_norm.default
    yield op, (x, [WIDTH], weight, None), 2
    rstd = op(x, [WIDTH], weight, None)[1]
    yield aten._fused_rms_norm_backward.default, (x, x, [WIDTH], rstd, weight, [True, True]), 2


def _call(op: Any, args: tuple[Any, ...], mesh: MeshInfo) -> OpCall:
    replicated = (REPLICATE,) * mesh.ndim
    specs: list[DTensorSpec] = []

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        specs.append(DTensorSpec.of(mesh, replicated, leaf.shape, leaf.stride(), leaf.dtype))
        return specs[-1]

    stated = tree_map(described, args)
    made = op(*args)
    metas = tuple(
        TensorMeta(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else None for t in made
    )
    return OpCall(op, stated, {}, tuple(specs), metas)


@pytest.fixture
def mesh(fake_world: Any) -> MeshInfo:
    fake_world(2)
    return mesh_info(init_device_mesh("cpu", (2,)))


def test_every_row_gives_each_rank_its_shard(mesh: MeshInfo) -> None:
    seen = set()
    for op, args, count in _attention_calls():
        seen.add(op)
        try:
            call = _call(op, args, mesh)
        except NotImplementedError:  # torch 2.11 has no meta kernel for one of them
            assert BEFORE_213
            continue
        rule = rules_by_op.get(op)
        strategy = rule(call)
        assert len(strategy.rows) == count, op
        for row in strategy.rows:
            inputs, outputs = [(p,) for p in row.inputs], [(p,) for p in row.outputs]
            assert rank_check.every_rank_can(call, strategy, inputs, outputs), (op, row)
    assert seen == DEVICE_ONLY


def _norms() -> Iterator[tuple[str, Any]]:
    """(name, op of (data, weight, bias, running mean, running var))."""
    none = None, None  # running statistics: torch without CUDA cannot write to those
    yield "native, training", lambda x, w, b, *_: aten.native_batch_norm(x, w, b, *none, True, 0.1, 1e-5)
    yield "native", lambda *given: aten.native_batch_norm(*given, False, 0.1, 1e-5)
    yield "legit", lambda x, w, b, *_: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    yield "no training", lambda *given: aten._native_batch_norm_legit_no_training(*given, 0.1, 1e-5)
    yield "cudnn", lambda x, w, b, *_: aten.cudnn_batch_norm(x, w, b, *none, True, 0.1, 1e-5)
    yield "layer_norm", lambda x, w, *_: aten.native_layer_norm(x, w.shape, w, w, 1e-5)
    yield "rms_norm", lambda x, w, *_: aten._fused_rms_norm(x, w.shape, w, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters", ["as the data", "float32"])
def test_norms_on_gpus_save_what_torch_saves(fake_world: Any, dtype: torch.dtype, parameters: str) -> None:
    """Sizes and dtypes of results on a mesh of GPUs that are not there: a CPU's statistics have other dtypes."""
    fake_world(2)
    mesh = DeviceMesh("cuda", [0, 1])
    of_channels = dtype if parameters == "as the data" else torch.float32

    def described(results: Any) -> list[tuple[Any, ...]]:
        return [(one.shape, one.dtype, one.device.type) for one in results]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        whole = torch.empty(8, 8, 4, 8, dtype=dtype, device="cuda")
        four = [torch.empty(8, dtype=of_channels, device="cuda") for _ in range(4)]
        given = [distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in four]
        for name, op in _norms():
            for dim in (0, 2):
                x = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
                assert described(op(x, *given)) == described(op(whole, *four)), (name, dim)
