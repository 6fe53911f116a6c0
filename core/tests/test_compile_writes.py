"""In-place writes around compiled functions: to arguments, in the function, and to what it returned.

Each program also runs on plain tensors. A DTensor shows the same values, or the write or the read is refused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.compiling import (
    RANKS,
    assert_equal,
    compiled,
    mesh_in_graphs,
    numbers,
    placed,
    quiet,
    ranks_for,
)
from core.tests.gloo_world import on_ranks
from dtbench_core import DTensor, PlacementError, Replicate, Shard

pytestmark = [mesh_in_graphs, quiet]
S0, R = Shard(0), Replicate()
Program = Callable[..., Any]


def _of_sum(views: Program) -> Program:
    return lambda x: views(x + 1)


def _read_inside(x: Any) -> Any:
    y = x + 1
    return y * y[1:].sum(), y


def _of_both(x: Any) -> Any:
    y = x * 2
    return x[1:], y.t(), y[1:]


# name -> (function, for each result whether a write to it is refused where x is sharded by rows)
RETURNED: dict[str, tuple[Program, str]] = {
    "window on the argument": (lambda x: (x.t(), x[:, 1:3]), "nn"),
    "copied view of the argument": (lambda x: (x[1:3], x * 2), "yn"),
    "window on an argument after a write to it": (lambda x: (x.mul_(2), x.t())[1:], "y"),
    "argument after a write to it": (lambda x: (x.mul_(2), x)[1:], "n"),
    "new tensor after a write to the argument": (lambda x: (x.mul_(2), (x + 1).t())[1:], "n"),
    "base and copied view": (_of_sum(lambda y: (y, y[1:])), "yy"),
    "window and copied view": (_of_sum(lambda y: (y[1:], y.t())), "yy"),
    "two copied views": (_of_sum(lambda y: y.chunk(2)), "yy"),
    "views of the argument and of another tensor": (_of_both, "yyy"),
    "one copied view": (_of_sum(lambda y: (y[1:],)), "n"),
    "copied view that is not returned": (_read_inside, "nn"),
    "base and window": (_of_sum(lambda y: (y.t(), y)), "nn"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", RETURNED)
@on_ranks(world_size=RANKS)
def test_write_to_a_result_shows_in_shared_memory_or_is_refused(name: str, requires_grad: bool) -> None:
    fn, refused = RETURNED[name]
    if requires_grad and "write" in name:
        return  # a leaf must not be written to
    torch._dynamo.reset()
    fast = compiled(fn)
    for placement in (S0, R):
        for index, letter in enumerate(refused):
            plain = numbers(requires_grad)
            x = placed(plain, placement)
            results, expected = fast(x), fn(plain)
            with torch.no_grad():
                if letter == "y" and (placement == S0 or "window on an argument after" in name):
                    with pytest.raises(
                        PlacementError,
                        match=r"in-place write .* compiled function.* returned",
                    ):
                        results[index].add_(1)
                else:
                    results[index].add_(1)
                    expected[index].add_(1)
            assert_equal((*results, x), (*expected, plain), (placement, index))


def _loss_of_concatenated(first: Any, second: Any) -> Any:
    return torch.cat([first, second]).sin().sum()


@on_ranks(world_size=RANKS)
def test_compiled_gradients_accept_in_place_writes() -> None:
    torch._dynamo.reset()
    plain = [numbers(True), numbers(True)]
    parameters = [placed(full) for full in plain]
    for arguments, run in ((plain, _loss_of_concatenated), (parameters, compiled(_loss_of_concatenated))):
        for _ in range(2):  # the second is added to the first
            run(*arguments).backward()
        torch.nn.utils.clip_grad_norm_(arguments, 1e-3)
        arguments[0].grad[1:].mul_(2)
    for parameter, full in zip(parameters, plain, strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), full.grad)


# ---- reading a result after a write ----

WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda x: x.add_(1),
    "to data": lambda x: x.data.mul_(2),
    "to a view": lambda x: x.t().mul_(2),
    "to a copied view": lambda x: x[2:].mul_(2),
    "to a list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(x.clone(), 1, out=x),
    "by index": lambda x: x.__setitem__(slice(3, 5), 7.0),
    "to a window that a graph returned": lambda x: compiled(lambda a: a.t())(x).mul_(2),
    "in a graph": lambda x: compiled(lambda a: a.mul_(2))(x),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(world_size=RANKS)
def test_copied_view_refuses_reads_after_a_write_to_its_argument(requires_grad: bool) -> None:
    reads: list[Program] = [lambda v: v.full_tensor(), lambda v: (v + 1).full_tensor() - 1]
    torch._dynamo.reset()
    view: Program = lambda x: x.t()[:, 2:].t()[1:]  # noqa: E731 - compiled as such
    fast = compiled(view)
    for name, write in WRITES.items():
        for placement in (S0, R):
            plain = numbers(requires_grad)
            x = placed(plain, placement)
            other = x.clone()
            with torch.no_grad():
                returned, expected = fast(x), view(plain)
                other.add_(1)
                assert_equal([returned], [expected], name)
                write(x)
                write(plain)
                for read in reads:
                    if placement == R:  # a window shows the write
                        assert torch.equal(read(returned), expected), name
                        continue
                    with pytest.raises(PlacementError, match=r"a compiled function returned.*old values"):
                        read(returned)
                assert_equal([fast(x), x], [expected, plain], name)


# name -> functions that each take a view of the previous one's result, and whether they are compiled
CHAINS: dict[str, list[tuple[bool, Program]]] = {
    "two graphs": [(True, lambda x: x[1:6]), (True, lambda r: r[1:3])],
    "a write and a view in one graph": [(True, lambda x: (x.mul_(2), x[1:3])[1])],
    "a copied view, a graph": [(False, lambda x: x[1:6]), (True, lambda r: r.t())],
    "a graph, a copied view": [(True, lambda x: x[1:6]), (False, lambda r: r[1:3])],
    "a graph, a copied view, a graph": [
        (True, lambda x: x[1:7]),
        (False, lambda r: r[1:6]),
        (True, lambda r: r[1:3]),
    ],
}


def _chains_read_after_a_write(backend: str) -> list[tuple[str, str, bool]]:
    """(chain, write, whether the read was refused). Values that can be read are compared here."""
    outcomes = []
    for name, steps in CHAINS.items():
        torch._dynamo.reset()
        for write in ("none", "in place", "to data", "in a graph"):
            plain = numbers()
            x = placed(plain)
            returned, expected = x, plain
            for in_graph, view in steps:
                returned = (compiled(view, backend=backend) if in_graph else view)(returned)
                expected = view(expected)
            if write != "none":
                WRITES[write](x)
                WRITES[write](plain)
            assert_equal([x], [plain], (name, write))
            try:
                assert_equal([returned], [expected], (name, write))
                outcomes.append((name, write, False))
            except PlacementError:
                outcomes.append((name, write, True))
    return outcomes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_chained_views_refuse_reads_after_a_write(request: pytest.FixtureRequest, backend: str) -> None:
    outcomes_by_rank = ranks_for(request, backend)(
        _chains_read_after_a_write, backend, world_size=RANKS, timeout_s=240.0
    )
    for outcomes in outcomes_by_rank:
        assert len(outcomes) == 4 * len(CHAINS)
        assert all(refused == (write != "none") for _, write, refused in outcomes), outcomes


@on_ranks(world_size=RANKS)
def test_eager_copied_view_shows_writes_to_a_compiled_view() -> None:
    orders: list[Callable[..., tuple[Any, Any]]] = [
        lambda x, compiled: (x[1:3], compiled(lambda a: a.t())(x)),
        lambda x, compiled: (lambda r: (r[:, 1:3].t(), r))(compiled(lambda a: a.t())(x)),
        lambda x, compiled: (lambda r: (r[1:3], x[2:4], r)[1:])(compiled(lambda a: a.detach())(x)),
    ]
    writes: list[Program] = [
        lambda x, copy, window: window.add_(1),
        lambda x, copy, window: x.mul_(2),
        lambda x, copy, window: copy.fill_(3),
        lambda x, copy, window: window.t()[:2].mul_(5),
    ]
    for order in orders:
        for write in writes:
            torch._dynamo.reset()
            plain = numbers()
            x = placed(plain)
            got, expected = (x, *order(x, compiled)), (plain, *order(plain, lambda fn: fn))
            for _ in range(2):
                write(*got)
                write(*expected)
                assert_equal(got, expected)


# ---- writes in a graph ----


@on_ranks(world_size=RANKS)
def test_autograd_refuses_a_returned_view_of_a_written_argument() -> None:
    for name in ("rows after a write", "rows before a write", "columns after a write"):
        torch._dynamo.reset()
        leaf = placed(numbers(True))
        with pytest.raises(RuntimeError, match=r"recorded by autograd.* return a clone"):  # raised by Dynamo
            compiled(WRITTEN_AND_VIEWED[name])(leaf * 1)
        if name == "rows after a write":
            with torch.no_grad():
                expected = WRITTEN_AND_VIEWED[name](numbers())
                assert_equal([compiled(WRITTEN_AND_VIEWED[name])(leaf)], [expected])


WRITTEN_AND_VIEWED: dict[str, Program] = {
    "rows after a write": lambda x: (x.mul_(2), x[1:3])[1],
    "rows before a write": lambda x: (x[1:5], x.t().mul_(2))[0],
    "columns after a write": lambda x: (x.mul_(2), x.t())[1],
}


COPIED: dict[str, Program] = {
    "rows": lambda x: x[1:3],
    "returned by a graph": lambda x: compiled(lambda a: a[1:])(x),
    "returned by a graph that got rows": lambda x: compiled(lambda a: a[1:])(x[2:]),
}


@pytest.mark.parametrize("name", COPIED)
@on_ranks(world_size=RANKS)
def test_write_in_a_graph_to_a_copied_argument_is_refused(name: str) -> None:
    for write in (lambda v: v.fill_(0), lambda v: v.t()[1:].mul_(3)):
        for placement in (S0, R):
            torch._dynamo.reset()
            plain = numbers()
            x = placed(plain, placement)
            taken, expected, fast = COPIED[name](x), COPIED[name](plain), compiled(write)
            assert_equal([compiled(lambda v: v + 1)(taken)], [expected + 1])
            if placement == S0:
                with pytest.raises(RuntimeError, match=r"its base outside would not show the write"):
                    fast(taken)
            else:
                assert_equal([fast(taken)], [write(expected)])
            assert_equal((x, taken), (plain, expected))


VIEWS: dict[str, Program] = {
    "detached": lambda x: x.detach(),
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:3],
}


@pytest.mark.parametrize("name", VIEWS)
@on_ranks(world_size=RANKS)
def test_write_to_one_of_two_arguments_that_share_memory_is_refused(name: str) -> None:
    view = VIEWS[name]
    for placement in (S0, R):
        torch._dynamo.reset()
        x = placed(torch.ones(8, 4), placement)
        with pytest.raises(RuntimeError, match="shares memory with another argument"):
            compiled(lambda a, b: (a.mul_(2), b + 1)[1])(x, view(x))
        assert_equal([x], [torch.ones(8, 4)])
        assert compiled(lambda a, b: (a.mul_(2), b + 1)[1])(x, x[:, :0]).shape == (8, 0)
        assert_equal([x], [torch.full((8, 4), 2.0)])
        # Without a write both may be given.
        both = compiled(lambda a, b: a.sum() + b.sum())(x, view(x))
        assert_equal([both], [x.full_tensor().sum() + view(x.full_tensor()).sum()])


def _written_after_view(x: Any) -> Any:
    rows, columns = x[1:], x[:, 1:3]
    x.cumsum_(0)
    return rows, columns, rows.sum(0)


def _view_written(x: Any) -> Any:
    rows, columns = x[1:], x[:, 1:3]
    rows[2:].mul_(3)
    return columns, rows


VIEWS_AND_WRITES: dict[str, Program] = {
    "views, then a write": _written_after_view,
    "views, one written to": _view_written,
    "of another tensor": _of_sum(_written_after_view),
    "chain": lambda x: (x[1:].t()[:, 2:], x.add_(1)),
}


@pytest.mark.parametrize("name", VIEWS_AND_WRITES)
@on_ranks(world_size=RANKS)
def test_returned_copied_views_include_later_writes(name: str) -> None:
    for shape in ((8, 4), (2, 0)):
        for placement in (S0, R):
            torch._dynamo.reset()
            plain, fn = torch.arange(float(torch.Size(shape).numel())).view(shape), VIEWS_AND_WRITES[name]
            x = placed(plain, placement)
            got, expected = compiled(fn, fullgraph=True)(x), fn(plain)
            assert_equal((*got, x), (*expected, plain), (shape, placement))


# ---- what autograd saved, and results that are arguments ----

SAVED_AND_WRITTEN: dict[str, Callable[[Any], object]] = {
    "not written": lambda t: t,
    "in place": lambda t: t.mul_(2),
    "by a view": lambda t: t.detach().t()[1:].add_(1),
    "out": lambda t: torch.add(t.detach().clone(), 1, out=t.detach()),
    "by data, which does not count": lambda t: t.data.mul_(2),
}


@pytest.mark.parametrize("name", SAVED_AND_WRITTEN)
@on_ranks(world_size=RANKS)
def test_compiled_backward_refuses_overwritten_saved_tensors(name: str) -> None:
    def outcome(x: Any, compiled: Program, which: str) -> Any:
        y = x * 1
        z = compiled(torch.exp if which == "result" else torch.sin)(y.t() if which == "view" else y)
        SAVED_AND_WRITTEN[name](z if which == "result" else y)
        try:
            z.sum().backward()
        except RuntimeError as error:
            return str(error)[:80]
        return x.grad.full_tensor() if hasattr(x, "full_tensor") else x.grad

    for which in ("result", "input", "view"):
        torch._dynamo.reset()
        plain = numbers().div(8).requires_grad_()
        got, expected = outcome(placed(plain), compiled, which), outcome(plain, lambda fn: fn, which)
        if isinstance(expected, str):
            assert got == expected, which
        else:
            torch.testing.assert_close(got, expected)


@on_ranks(world_size=RANKS)
def test_graph_returns_a_tensor_and_its_no_op_conversions() -> None:
    functions: list[Program] = [
        lambda v: (lambda a: (a, a.contiguous()))(v.squeeze()),
        lambda v: (lambda a: (a, a.float(), a.contiguous().contiguous()))(v.t()),
        lambda v: (lambda a: (a, a.to(torch.float32), a * 2))(v.view(-1)),
    ]
    for fn in functions:
        for shape in ((8, 4), (0, 3)):
            for placement in (S0, Shard(1), R):
                torch._dynamo.reset()
                plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
                x = placed(plain, placement)
                results, expected = compiled(fn)(x * 1), fn(plain * 1)
                assert_equal(results, expected)
                sum(result.sum() for result in results).backward()
                sum(result.sum() for result in expected).backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
