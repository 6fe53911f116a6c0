"""Writes to what a compiled function returned, or was given twice: who shares the memory follows, or it is refused."""

from __future__ import annotations

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
    slow_but,
)
from core.tests.gloo_world import on_ranks
from dtbench_core import PlacementError, Replicate, Shard

pytestmark = [mesh_in_graphs, quiet]
slow = pytest.mark.slow
S0, R = Shard(0), Replicate()
Program = Callable[..., Any]


# The first result of each is written to, which must be refused of "rows" where x is sharded by rows.
RETURNED: dict[str, Program] = {
    "view": lambda x: x.t(),
    "columns": lambda x: (x[:, 1:3], x * 2),
    "rows": lambda x: (x[1:3], x * 2),
    "view after a write": lambda x: (x.mul_(2), x.t())[1],
    "two views after a write": lambda x: (x.add_(1), (x[:, :1], x.view(2, 4, 4)))[1],
    "the same after a write": lambda x: (x.mul_(2), x)[1],
    "new after a write": lambda x: (x.mul_(2), (x + 1).t())[1],
}


@pytest.mark.parametrize("name", slow_but(RETURNED, "rows", "view after a write"))
@on_ranks(world_size=RANKS)
def test_an_input_follows_a_write_to_its_view(name: str) -> None:
    writes = (lambda x, view: view.add_(1), lambda x, view: x.mul_(3), lambda x, view: x[2:].mul_(3))
    for placement in (S0, R):
        torch._dynamo.reset()
        plain = numbers()
        x = placed(plain, placement)
        first, expected = (
            result[0] if isinstance(result, tuple) else result
            for result in (compiled(RETURNED[name])(x), RETURNED[name](plain))
        )
        assert_equal([first], [expected])
        if name == "rows" and placement == S0:
            with pytest.raises(
                PlacementError, match=r"a view of its input that a compiled .* return a clone"
            ):
                first.add_(1)
            continue
        for write in writes:
            write(x, first)
            write(plain, expected)
            assert_equal((first, x), (expected, plain))


def _after_a_write_apart_from_autograd(x: Any) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x.t(), x.detach()


@slow
@on_ranks(world_size=RANKS)
def test_views_of_a_parameter_that_a_graph_wrote_to_show_later_writes() -> None:
    for values in (numbers().t().clone().t(), numbers()[:, 1:3]):  # strides and an offset of its own
        torch._dynamo.reset()
        plain = values.clone(memory_format=torch.preserve_format).requires_grad_()
        x, shown = placed(plain), []
        fn = _after_a_write_apart_from_autograd
        for run, tensor in ((compiled(fn), x), (fn, plain)):
            view, detached = run(tensor)
            with torch.no_grad():
                tensor.add_(1)
                detached.mul_(2)
            (view * view).sum().backward()
            shown.append((view.detach(), detached, tensor.detach(), tensor.grad))
        assert_equal(*shown)


@slow
@on_ranks(world_size=RANKS)
def test_copied_views_see_writes_to_windows_that_graphs_returned() -> None:
    """A graph's window does not know of the others of its memory."""
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


SAVED_AND_WRITTEN: dict[str, Callable[[Any], object]] = {
    "not": lambda t: t,
    "in place": lambda t: t.mul_(2),
    "by a detached": lambda t: t.detach().mul_(2),
    "by a view": lambda t: t.detach().t()[1:].add_(1),
    "by a chunk": lambda t: t.detach().chunk(2, 1)[1].add_(1),
    "out": lambda t: torch.add(t.detach().clone(), 1, out=t.detach()),
    "of data, which does not count": lambda t: t.data.mul_(2),
}


@pytest.mark.parametrize("name", slow_but(SAVED_AND_WRITTEN, "by a view"))
@on_ranks(world_size=RANKS)
def test_a_compiled_backward_pass_refuses_saved_tensors_that_were_written_to(name: str) -> None:
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


def _of_sum(views: Program) -> Program:
    return lambda x: views(x + 1)


def _of_both(x: Any) -> Any:
    y = x * 2
    return x[1:], y.t(), y[1:], x.t()


def _read_inside(x: Any) -> Any:
    y = x + 1
    return y * y[1:].sum(), y


# name -> (compiled function, whether a write to each of its results must be refused where x is sharded by rows)
SHARING: dict[str, tuple[Program, str]] = {
    "rows, transposed": (_of_sum(lambda y: (y[1:], y.t())), "yy"),
    "base, rows": (_of_sum(lambda y: (y, y[1:])), "yy"),
    "two copies": (_of_sum(lambda y: (y[1:], y[:3])), "yy"),
    "views of an input and of another tensor": (_of_both, "yyyy"),
    "chunks": (_of_sum(lambda y: y.chunk(2)), "nn"),
    "rows that do not meet": (_of_sum(lambda y: (y[:3], y[3:], y[4])), "nyy"),
    "transposed, base": (_of_sum(lambda y: (y.t(), y)), "nn"),
    "one": (_of_sum(lambda y: (y[1:],)), "n"),
    "read inside": (_read_inside, "nn"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", slow_but(SHARING, "rows that do not meet"))
@on_ranks(world_size=RANKS)
def test_results_of_one_memory_follow_a_write_or_it_is_refused(name: str, requires_grad: bool) -> None:
    fn, refused = SHARING[name]
    torch._dynamo.reset()
    fast = compiled(fn)
    for at, which in enumerate(refused):
        plain = numbers(requires_grad)
        x = placed(plain)
        results, expected = fast(x), fn(plain)
        with torch.no_grad():
            if which == "y":
                with pytest.raises(PlacementError, match=r"a compiled function returned.* a clone"):
                    results[at].add_(1)
            elif not requires_grad or name != "chunks":  # autograd keeps writes from several views of one op
                results[at].add_(1)
                expected[at].add_(1)
        assert_equal((*results, x), (*expected, plain), at)


VIEWS: dict[str, Program] = {
    "detached": lambda x: x.detach(),
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 1:3],
    "rows": lambda x: x[1:3],
}


@pytest.mark.parametrize("name", slow_but(VIEWS, "rows"))
@on_ranks(world_size=RANKS)
def test_a_write_to_one_of_two_inputs_of_one_memory_is_refused(name: str) -> None:
    view = VIEWS[name]
    for placement in (S0, R):
        torch._dynamo.reset()
        x = placed(torch.ones(8, 4), placement)
        with pytest.raises(RuntimeError, match="shares memory with another argument"):
            compiled(lambda a, b: (a.mul_(2), b + 1)[1])(x, view(x))
        assert_equal([x], [torch.ones(8, 4)])
        empty = compiled(lambda a, b: (a.mul_(2), b + 1)[1])(x, x[:, :0])
        assert empty.shape == (8, 0)
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
    "split": lambda x: (x.tensor_split(2, -2)[1], x.add_(1))[:1],
    "chain": lambda x: (x[1:].t()[:, 2:], x.add_(1)),
}


@slow
@pytest.mark.parametrize("name", VIEWS_AND_WRITES)
@on_ranks(world_size=RANKS)
def test_a_graph_returns_copied_views_as_later_writes_in_it_left_them(name: str) -> None:
    for shape in ((8, 4), (2, 3), (2, 0)):
        for placement in (S0, R):
            torch._dynamo.reset()
            plain, fn = torch.arange(float(torch.Size(shape).numel())).view(shape), VIEWS_AND_WRITES[name]
            x = placed(plain, placement)
            got, expected = compiled(fn, fullgraph=True)(x), fn(plain)
            assert_equal((*got, x), (*expected, plain), (shape, placement))


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda x: x.add_(1),
    "to data": lambda x: x.data.mul_(2),
    "to a view": lambda x: x.t().mul_(2),
    "to a copied view": lambda x: x[2:].mul_(2),
    "to a list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(x.clone(), 1, out=x),
    "by index": lambda x: x.__setitem__(slice(3, 5), 7.0),
    "compiled": lambda x: compiled(lambda a: a.mul_(2))(x),
}


@slow
@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(world_size=RANKS)
def test_a_copied_view_that_a_graph_returned_is_not_read_after_a_write_to_its_input(
    requires_grad: bool,
) -> None:
    views: list[Program] = [lambda x: x[1:], lambda x: x.t()[:, 2:].t()[1:]]
    reads: list[Program] = [lambda v: v.full_tensor(), lambda v: (v + 1).full_tensor() - 1]
    for view in views:
        torch._dynamo.reset()
        fast = compiled(view)
        for name, write in WRITES.items():
            for placement in (S0, R):
                plain = numbers(requires_grad)
                x = placed(plain, placement)
                other = x.clone()
                before, expected = fast(x), view(plain)
                with torch.no_grad():
                    other.add_(1)
                    assert_equal([before], [expected], name)
                    write(x)
                    write(plain)
                    for read in reads:
                        if placement == R:  # a window follows
                            assert torch.equal(read(before), expected), name
                            continue
                        with pytest.raises(PlacementError, match=r"a compiled function returned.*old values"):
                            read(before)
                    assert_equal([fast(x)], [expected], name)


def _rows_after_a_write(x: Any) -> Any:
    x.mul_(2)
    return x[1:3]


def _rows_before_a_write(x: Any) -> Any:
    rows = x[1:5]
    x.t().mul_(2)
    return rows


def _rows_of_several(x: Any) -> Any:
    x[0:2].add_(1)
    return x[3:5], x[2:4], x * 2


# name -> the functions by way of which a view is taken: compiled ones are marked g, others c
VIEWS_OF_VIEWS: dict[str, tuple[str, list[Program]]] = {
    "of several": ("g", [lambda x: _rows_of_several(x)[1]]),
    "two graphs": ("gg", [lambda x: x[1:6], lambda r: r[1:3]]),
    "three graphs": ("ggg", [lambda x: x[1:6], lambda r: r[1:4], lambda r: r.detach()[1:]]),
    "a copy, a graph": ("cg", [lambda x: x[1:6], lambda r: r[1:3]]),
    "a graph, a copy": ("gc", [lambda x: x[1:6], lambda r: r[1:3]]),
    "a graph, a copy, a graph": ("gcg", [lambda x: x[1:7], lambda r: r[1:6], lambda r: r[1:3]]),
}


def _views_of_views(backend: str) -> list[tuple[str, str, bool]]:
    """(views, write, whether reading the result was refused) of each; what is read is compared here."""
    outcomes = []
    for name, (kinds, views) in VIEWS_OF_VIEWS.items():
        torch._dynamo.reset()
        for write in ("none", "in place", "to a view", "compiled"):
            plain = numbers()
            x = placed(plain)
            taken, expected = x, plain
            for kind, view in zip(kinds, views, strict=True):
                taken = (compiled(view, backend=backend) if kind == "g" else view)(taken)
                expected = view(expected)
            for written in (x, plain):
                if write == "compiled":
                    compiled(lambda a: a.mul_(2), backend=backend)(written)
                elif write != "none":
                    WRITES[write](written)
            assert_equal([x], [plain], (name, write))
            try:
                assert_equal([taken], [expected], (name, write))
                outcomes.append((name, write, False))
            except PlacementError:
                outcomes.append((name, write, True))
    return outcomes


@slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_views_by_way_of_graphs_are_not_read_after_a_write(ranks: Any, backend: str) -> None:
    for outcomes in ranks(_views_of_views, backend, world_size=RANKS, timeout_s=240.0):
        assert len(outcomes) == 4 * len(VIEWS_OF_VIEWS)
        assert all(refused == (write != "none") for _, write, refused in outcomes), outcomes


@slow
@on_ranks(world_size=RANKS)
def test_a_graph_with_a_recorded_write_and_a_copied_view_is_refused() -> None:
    for fn in (_rows_after_a_write, _rows_before_a_write):
        torch._dynamo.reset()
        leaf = placed(numbers(True))
        with pytest.raises(RuntimeError, match=r"recorded by autograd.* return a clone"):  # of Dynamo
            compiled(fn)(leaf * 1)
    with torch.no_grad():
        assert_equal([compiled(_rows_after_a_write)(leaf)], [_rows_after_a_write(numbers())])


COPIED: dict[str, Program] = {
    "rows": lambda x: x[1:3],
    "of a graph": lambda x: compiled(lambda a: a[1:])(x),
    "of a graph of rows": lambda x: compiled(lambda a: a[1:])(x[2:]),
}


@slow
@pytest.mark.parametrize("name", COPIED)
@on_ranks(world_size=RANKS)
def test_a_write_in_a_graph_to_a_copied_view_is_refused(name: str) -> None:
    writes: list[Program] = [
        lambda v: v.fill_(0),
        lambda v: v.t()[1:].mul_(3),
        lambda v: (v.add_(1), v * 2)[1],
    ]
    for write in writes:
        for placement in (S0, R):
            torch._dynamo.reset()
            plain = numbers()
            x = placed(plain, placement)
            taken, expected, fast = COPIED[name](x), COPIED[name](plain), compiled(write)
            assert_equal([compiled(lambda v: v + 1)(taken)], [expected + 1])
            if placement == S0:
                with pytest.raises(RuntimeError, match=r"a view.* would not follow"):  # of Dynamo
                    fast(taken)
            else:
                assert_equal([fast(taken)], [write(expected)])
            assert_equal((x, taken), (plain, expected))


@slow
@on_ranks(world_size=RANKS)
def test_what_a_function_gave_back_as_it_was_is_given_out_beside_it() -> None:
    functions: list[Program] = [
        lambda v: (lambda a: (a, a.contiguous()))(v.squeeze()),
        lambda v: (lambda a: (a, a.float(), a.contiguous().contiguous()))(v.t()),
        lambda v: (lambda a: (a, a.to(torch.float32), a * 2))(v.view(-1)),
    ]
    for fn in functions:
        for shape in ((8, 4), (0, 3), (4, 0)):
            for placement in (S0, Shard(1), R):
                torch._dynamo.reset()
                plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
                x = placed(plain, placement)
                results, expected = compiled(fn)(x * 1), fn(plain * 1)
                assert_equal(results, expected)
                sum(one.sum() for one in results).backward()
                sum(one.sum() for one in expected).backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
