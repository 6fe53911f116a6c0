"""Writes to what a compiled function returned, or was given twice: who shares the memory follows, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.torch_version import needs_213
from dtbench_core import PlacementError, Replicate, Shard, distribute_tensor

RANKS = 2


def _view_after_write(x: Any) -> Any:
    x.mul_(2)
    return x.t()


def _same_after_write(x: Any) -> Any:
    x.mul_(2)
    return x


def _two_after_write(x: Any) -> Any:
    x.add_(1)
    return x[:, :1], x.view(2, 4, 4)


def _detached_after_write(x: Any) -> Any:
    x.mul_(2)
    return x.detach()


def _new_after_write(x: Any) -> Any:
    x.mul_(2)
    return (x + 1).t()


def _views_around_a_write(x: Any) -> Any:
    columns = x[:, 1:]
    x.t().mul_(2)
    columns[:, 1:].add_(1)
    return columns.t(), x


# A write to the first result of "rows" must be refused where x is sharded by rows.
RETURNED: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.t(),
    "columns": lambda x: (x[:, 1:3], x * 2),
    "rows": lambda x: (x[1:3], x * 2),
    "view after a write": _view_after_write,
    "two views after a write": _two_after_write,
    "views around a write": _views_around_a_write,
    "detached after a write": _detached_after_write,
    "the same after a write": _same_after_write,
    "new after a write": _new_after_write,
}


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_an_input_follows_a_write_to_its_view() -> None:
    for name, fn in RETURNED.items():
        for placement in (Shard(0), Replicate()):
            torch._dynamo.reset()
            plain = torch.arange(32.0).view(8, 4)
            x = distribute_tensor(plain, mesh_of((RANKS,)), [placement], src_data_rank=None)
            first, wanted = (
                result[0] if isinstance(result, tuple) else result
                for result in (torch.compile(fn, backend="aot_eager")(x), fn(plain))
            )
            assert torch.equal(first.full_tensor(), wanted), name
            if name == "rows" and placement == Shard(0):
                with pytest.raises(
                    PlacementError, match=r"a view of its input that a compiled .* return a clone"
                ):
                    first.add_(1)
                continue
            for write in (
                lambda x, view: view.add_(1),
                lambda x, view: x.mul_(3),
                lambda x, view: x[2:].mul_(3),
            ):
                write(x, first)
                write(plain, wanted)
                assert torch.equal(first.full_tensor(), wanted), name
                assert torch.equal(x.full_tensor(), plain), name


def _after_a_write_apart_from_autograd(x: Any) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x.t(), x.detach()


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_views_of_a_parameter_that_a_graph_wrote_to_show_later_writes() -> None:
    plain = torch.arange(32.0).view(8, 4)
    for given in (plain.t().clone().t(), plain[:, 1:3]):  # strides and an offset of its own
        torch._dynamo.reset()
        full = given.clone(memory_format=torch.preserve_format).requires_grad_()
        x = distribute_tensor(
            full.detach(), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None
        ).requires_grad_()
        fast = torch.compile(_after_a_write_apart_from_autograd, backend="aot_eager")
        for run, tensor in ((fast, x), (_after_a_write_apart_from_autograd, full)):
            view, detached = run(tensor)
            with torch.no_grad():
                tensor.add_(1)
                detached.mul_(2)
            (view * view).sum().backward()
            shown = view.detach(), detached, tensor.detach(), tensor.grad
            if tensor is x:
                found = [one.full_tensor() for one in shown]
        assert all(torch.equal(one, other) for one, other in zip(found, shown, strict=True))


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_copied_views_see_writes_to_windows_that_graphs_returned() -> None:
    """A graph's window does not know of the others of its memory."""
    orders: list[Callable[..., tuple[Any, Any]]] = [
        lambda x, compiled: (x[1:3], compiled(lambda a: a.t())(x)),
        lambda x, compiled: (lambda r: (r[:, 1:3].t(), r))(compiled(lambda a: a.t())(x)),
        lambda x, compiled: (lambda r: (r[1:3], x[2:4], r)[1:])(compiled(lambda a: a.detach())(x)),
    ]
    writes: list[Callable[..., Any]] = [
        lambda x, copy, window: window.add_(1),
        lambda x, copy, window: x.mul_(2),
        lambda x, copy, window: copy.fill_(3),
        lambda x, copy, window: window.t()[:2].mul_(5),
    ]
    for order in orders:
        for write in writes:
            torch._dynamo.reset()
            plain = torch.arange(32.0).view(8, 4)
            x = distribute_tensor(plain, mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
            got = x, *order(x, lambda fn: torch.compile(fn, backend="aot_eager"))
            wanted = plain, *order(plain, lambda fn: fn)
            for _ in range(2):
                write(*got)
                write(*wanted)
                for one, other in zip(got, wanted, strict=True):
                    assert torch.equal(one.full_tensor(), other)


SAVED_AND_WRITTEN: dict[str, Callable[[Any], object]] = {
    "not": lambda t: t,
    "in place": lambda t: t.mul_(2),
    "by a detached": lambda t: t.detach().mul_(2),
    "by a view": lambda t: t.detach().t()[1:].add_(1),
    "by a chunk": lambda t: t.detach().chunk(2, 1)[1].add_(1),
    "in a list": lambda t: torch._foreach_add_([t.detach()], 1.0),
    "out": lambda t: torch.add(t.detach().clone(), 1, out=t.detach()),
    "of data, which does not count": lambda t: t.data.mul_(2),
}


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_compiled_backward_pass_refuses_saved_tensors_that_were_written_to() -> None:
    def outcome(x: Any, compiled: Callable[..., Any], which: str, write: Callable[[Any], object]) -> Any:
        y = x * 1
        given = y.t() if which == "view" else y
        z = compiled(torch.exp if which == "result" else torch.sin)(given)
        write(z if which == "result" else y)
        try:
            z.sum().backward()
        except RuntimeError as error:
            return str(error)[:80]
        return x.grad.full_tensor() if hasattr(x, "full_tensor") else x.grad

    for name, write in SAVED_AND_WRITTEN.items():
        for which in ("result", "input", "view"):
            torch._dynamo.reset()
            plain = torch.arange(32.0).view(8, 4).div(8).requires_grad_()
            x = distribute_tensor(plain.detach(), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
            got = outcome(x.requires_grad_(), lambda fn: torch.compile(fn, backend="aot_eager"), which, write)
            wanted = outcome(plain, lambda fn: fn, which, write)
            if isinstance(wanted, str):
                assert got == wanted, (name, which)
            else:
                torch.testing.assert_close(got, wanted)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_no_rank_alone_refuses_saved_tensors_that_were_written_to() -> None:
    """A rank without a part saves others than those with one."""
    torch._dynamo.reset()
    x = distribute_tensor(torch.ones(1, 4), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
    y = x.requires_grad_() * 1
    z = torch.compile(lambda t: t.sin().softmax(0), backend="aot_eager")(y)
    y.detach().mul_(2)
    z.sum().backward()
    assert x.grad is not None and x.grad.full_tensor().shape == (1, 4)


def _of_sum(views: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: views(x + 1)


def _of_both(x: Any) -> Any:
    y = x * 2
    return x[1:], y.t(), y[1:], x.t()


def _read_inside(x: Any) -> Any:
    y = x + 1
    return y * y[1:].sum(), y


# name -> (compiled function, whether writes to its results must be refused where x is sharded by rows: to which)
SHARING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows, transposed": (_of_sum(lambda y: (y[1:], y.t())), "yy"),
    "base, rows": (_of_sum(lambda y: (y, y[1:])), "yy"),
    "two copies": (_of_sum(lambda y: (y[1:], y[:3])), "yy"),
    "chains": (_of_sum(lambda y: (y[1:].t(), y[1:][1:])), "yy"),
    "windows beside a copy": (_of_sum(lambda y: (y[2:], y[:, 1:], y.t(), y[5])), "yyyy"),
    "views of an input and of another tensor": (_of_both, "yyyy"),
    "chunks": (_of_sum(lambda y: y.chunk(2)), "nn"),
    "rows that do not meet": (_of_sum(lambda y: (y[:3], y[3:], y[4])), "nyy"),
    "transposed, base": (_of_sum(lambda y: (y.t(), y)), "nn"),
    "one": (_of_sum(lambda y: (y[1:],)), "n"),
    "read inside": (_read_inside, "nn"),
}


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(world_size=RANKS)
def test_results_of_one_memory_follow_a_write_or_it_is_refused(requires_grad: bool) -> None:
    for name, (fn, refused) in SHARING.items():
        torch._dynamo.reset()
        fast = torch.compile(fn, backend="aot_eager")
        for at, which in enumerate(refused):
            plain = torch.arange(32.0).view(8, 4).requires_grad_(requires_grad)
            x = distribute_tensor(plain.detach(), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
            results, wanted = fast(x.requires_grad_(requires_grad)), fn(plain)
            with torch.no_grad():
                if which == "y":
                    with pytest.raises(PlacementError, match=r"a compiled function returned.* a clone"):
                        results[at].add_(1)
                elif (
                    not requires_grad or name != "chunks"
                ):  # autograd keeps writes from several views of one op
                    results[at].add_(1)
                    wanted[at].add_(1)
            for one, other in zip((*results, x), (*wanted, plain), strict=True):
                assert torch.equal(one.full_tensor(), other), (name, at)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_result_whose_others_are_gone_is_written_to() -> None:
    fast = torch.compile(_of_sum(lambda y: (y[1:], y.t())), backend="aot_eager")
    again = torch.compile(lambda a: a.mul_(3), backend="aot_eager")
    plain = torch.arange(32.0).view(8, 4)
    x = distribute_tensor(plain, mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
    rows, transposed = fast(x)
    with pytest.raises(RuntimeError, match="what another of its results holds that a compiled"):  # of Dynamo
        again(rows)
    others = fast(x)  # of another call
    del transposed
    rows.add_(1)
    rows.t()[1:].mul_(2)
    again(rows)
    wanted = (plain + 1)[1:] + 1
    wanted[:, 1:] *= 2
    assert torch.equal(rows.full_tensor(), wanted * 3)
    assert torch.equal(others[1].full_tensor(), (plain + 1).t())


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_gradients_pass_copied_views_that_a_graph_returns() -> None:
    functions: list[Callable[[Any], Any]] = [lambda x: (x[1:],), lambda x: (x[1:], x.t()), _of_both]
    for fn in functions:
        torch._dynamo.reset()
        plain = torch.arange(32.0).view(8, 4).requires_grad_()
        x = distribute_tensor(plain.detach(), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
        x.requires_grad_()
        fast = torch.compile(fn, backend="aot_eager")
        for given, run in ((x, fast), (plain, fn)):
            sum((one * one).sum() for one in run(given)).backward()
        assert torch.equal(x.grad.full_tensor(), plain.grad)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_write_to_one_of_two_inputs_of_one_memory_is_refused() -> None:
    views: dict[str, Callable[[Any], Any]] = {
        "detached": lambda x: x.detach(),
        "transposed": lambda x: x.t(),
        "columns": lambda x: x[:, 1:3],
        "rows": lambda x: x[1:3],
    }
    for name, view in views.items():
        for placement in (Shard(0), Replicate()):
            torch._dynamo.reset()
            x = distribute_tensor(torch.ones(8, 4), mesh_of((RANKS,)), [placement], src_data_rank=None)
            with pytest.raises(RuntimeError, match="shares memory with another argument"):
                torch.compile(lambda a, b: (a.mul_(2), b + 1)[1], backend="aot_eager")(x, view(x))
            assert torch.equal(x.full_tensor(), torch.ones(8, 4)), name
            empty = torch.compile(lambda a, b: (a.mul_(2), b + 1)[1], backend="aot_eager")(x, x[:, :0])
            assert empty.shape == (8, 0) and torch.equal(x.full_tensor(), torch.full((8, 4), 2.0))
            # Without a write both may be given.
            both = torch.compile(lambda a, b: a.sum() + b.sum(), backend="aot_eager")(x, view(x))
            assert torch.equal(both.full_tensor(), x.full_tensor().sum() + view(x.full_tensor()).sum()), name


def _written_after_view(x: Any) -> Any:
    rows, columns = x[1:], x[:, 1:3]
    x.cumsum_(0)
    return rows, columns, rows.sum(0)


def _view_written(x: Any) -> Any:
    rows, columns = x[1:], x[:, 1:3]
    rows[2:].mul_(3)
    return columns, rows


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_graph_returns_copied_views_as_later_writes_in_it_left_them() -> None:
    functions = [
        _written_after_view,
        _view_written,
        _of_sum(_written_after_view),
        lambda x: (x.tensor_split(2, -2)[1], x.add_(1))[0],
        lambda x: (x[1:].t()[:, 2:], x.add_(1)),
    ]
    for fn in functions:
        for shape in ((8, 4), (2, 3), (2, 0)):
            for placement in (Shard(0), Replicate()):
                torch._dynamo.reset()
                plain = torch.arange(float(torch.Size(shape).numel())).view(shape)
                x = distribute_tensor(plain, mesh_of((RANKS,)), [placement], src_data_rank=None)
                got, wanted = torch.compile(fn, backend="aot_eager", fullgraph=True)(x), fn(plain)
                results = (got, wanted) if isinstance(got, tuple) else ((got,), (wanted,))
                for one, other in zip((*results[0], x), (*results[1], plain), strict=True):
                    assert torch.equal(one.full_tensor(), other), (shape, placement)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_views_without_elements_are_given_to_graphs() -> None:
    for shape in ((1, 2), (3, 2)):
        for placement in (Shard(0), Shard(1), Replicate()):
            torch._dynamo.reset()
            fast = torch.compile(lambda a: (a * 2).sum(0), backend="aot_eager", fullgraph=True)
            plain = torch.ones(shape)
            x = distribute_tensor(plain, mesh_of((RANKS,)), [placement], src_data_rank=None)
            for view in (lambda t: t[3:], lambda t: t[:, :0], lambda t: t.tensor_split(4)[-1]):
                assert torch.equal(fast(view(x)).full_tensor(), (view(plain) * 2).sum(0)), (shape, placement)


def _compiled_write(x: Any) -> None:
    torch.compile(lambda a: a.mul_(2), backend="aot_eager")(x)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda x: x.add_(1),
    "to data": lambda x: x.data.mul_(2),
    "to a view": lambda x: x.t().mul_(2),
    "to a copied view": lambda x: x[2:].mul_(2),
    "to a list": lambda x: torch._foreach_add_([x], 1.0),
    "out": lambda x: torch.add(x.clone(), 1, out=x),
    "by index": lambda x: x.__setitem__(slice(3, 5), 7.0),
    "compiled": _compiled_write,
}


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(world_size=RANKS)
def test_a_copied_view_that_a_graph_returned_is_not_read_after_a_write_to_its_input(
    requires_grad: bool,
) -> None:
    views: dict[str, Callable[[Any], Any]] = {
        "rows": lambda x: x[1:],
        "chain": lambda x: x.t()[:, 2:].t()[1:],
    }
    for view in views.values():
        torch._dynamo.reset()
        fast = torch.compile(view, backend="aot_eager")
        for name, write in WRITES.items():
            for placement in (Shard(0), Replicate()):
                plain = torch.arange(32.0).view(8, 4).requires_grad_(requires_grad)
                x = distribute_tensor(plain.detach(), mesh_of((RANKS,)), [placement], src_data_rank=None)
                other = x.clone()
                before, wanted = fast(x.requires_grad_(requires_grad)), view(plain)
                with torch.no_grad():
                    other.add_(1)
                    assert torch.equal(before.full_tensor(), wanted), name
                    write(x)
                    write(plain)
                    # A window follows.
                    for read in (lambda v: v.full_tensor(), lambda v: (v + 1).full_tensor() - 1):
                        if placement == Shard(0):
                            with pytest.raises(
                                PlacementError, match=r"a compiled function returned.*old values"
                            ):
                                read(before)
                        else:
                            assert torch.equal(read(before), wanted), name
                    assert torch.equal(fast(x).full_tensor(), wanted), name


def _rows_after_a_write(x: Any) -> Any:
    x.mul_(2)
    return x[1:3]


def _rows_before_a_write(x: Any) -> Any:
    rows = x[1:5]
    x.t().mul_(2)
    return rows


def _rows_and_more(x: Any) -> Any:
    x[0:2].add_(1)
    return x[3:5], x[2:4], x * 2


Views = list[tuple[Callable[[Any], Any], bool]]

# name -> the functions by way of which a view is taken, and whether each is compiled
VIEWS_OF_VIEWS: dict[str, Views] = {
    "after a write": [(_rows_after_a_write, True)],
    "before a write": [(_rows_before_a_write, True)],
    "of several": [(lambda x: _rows_and_more(x)[1], True)],
    "two graphs": [(lambda x: x[1:6], True), (lambda r: r[1:3], True)],
    "two graphs, a window": [(lambda x: x[1:6], True), (lambda r: r.t(), True)],
    "three graphs": [(lambda x: x[1:6], True), (lambda r: r[1:4], True), (lambda r: r.detach()[1:], True)],
    "a graph after a write, a graph": [(_rows_after_a_write, True), (lambda r: r[1:], True)],
    "a copy, a graph": [(lambda x: x[1:6], False), (lambda r: r[1:3], True)],
    "a copy, a graph with a window": [(lambda x: x[1:6], False), (lambda r: r.t(), True)],
    "a window, a graph": [(lambda x: x.t(), False), (lambda r: r[:, 1:3], True)],
    "a graph, a copy": [(lambda x: x[1:6], True), (lambda r: r[1:3], False)],
    "a graph, a copy, a graph": [
        (lambda x: x[1:7], True),
        (lambda r: r[1:6], False),
        (lambda r: r[1:3], True),
    ],
}


def _views_of_views(backend: str) -> list[tuple[str, str, bool]]:
    """(views, write, whether reading the result was refused) of each; what is read is compared here."""
    seen = []
    for name, views in VIEWS_OF_VIEWS.items():
        torch._dynamo.reset()
        for write in ("none", "in place", "to a view", "compiled"):
            plain = torch.arange(32.0).view(8, 4)
            x = distribute_tensor(plain, mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
            taken, wanted = x, plain
            for view, compiled in views:
                taken = (torch.compile(view, backend=backend) if compiled else view)(taken)
                wanted = view(wanted)
            for written in (x, plain):
                if write == "compiled":
                    torch.compile(lambda a: a.mul_(2), backend=backend)(written)
                elif write != "none":
                    WRITES[write](written)
            assert torch.equal(x.full_tensor(), plain), (name, write)
            try:
                assert torch.equal(taken.full_tensor(), wanted), (name, write)
                seen.append((name, write, False))
            except PlacementError:
                seen.append((name, write, True))
    return seen


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_views_of_views_by_way_of_graphs_are_not_read_after_a_write(ranks: Any, backend: str) -> None:
    for seen in ranks(_views_of_views, backend, world_size=RANKS, timeout_s=240.0):
        assert len(seen) == 4 * len(VIEWS_OF_VIEWS)
        assert all(refused == (write != "none") for _, write, refused in seen), seen


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_graph_with_a_recorded_write_and_a_copied_view_is_refused() -> None:
    for fn in (_rows_after_a_write, _rows_before_a_write):
        torch._dynamo.reset()
        plain = torch.arange(32.0).view(8, 4)
        leaf = distribute_tensor(plain, mesh_of((RANKS,)), [Shard(0)]).requires_grad_()
        with pytest.raises(RuntimeError, match=r"recorded by autograd.* return a clone"):  # of Dynamo
            torch.compile(fn, backend="aot_eager")(leaf * 1)
    with torch.no_grad():
        taken = torch.compile(_rows_after_a_write, backend="aot_eager")(leaf)
        assert torch.equal(taken.full_tensor(), _rows_after_a_write(plain))


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_a_write_in_a_graph_to_a_copied_view_is_refused() -> None:
    views: list[Callable[[Any], Any]] = [
        lambda x: x[1:3],
        lambda x: x.chunk(2)[0].t(),
        lambda x: torch.compile(lambda a: a[1:], backend="aot_eager")(x),
        lambda x: torch.compile(lambda a: a[1:], backend="aot_eager")(x[2:]),
    ]
    writes: list[Callable[[Any], Any]] = [
        lambda v: v.fill_(0),
        lambda v: v.t()[1:].mul_(3),
        lambda v: (v.add_(1), v * 2)[1],
    ]
    for view in views:
        for write in writes:
            for placement in (Shard(0), Replicate()):
                torch._dynamo.reset()
                plain = torch.arange(32.0).view(8, 4)
                x = distribute_tensor(plain, mesh_of((RANKS,)), [placement], src_data_rank=None)
                taken, wanted, read = (
                    view(x),
                    view(plain),
                    torch.compile(lambda v: v + 1, backend="aot_eager"),
                )
                fast = torch.compile(write, backend="aot_eager")
                assert torch.equal(read(taken).full_tensor(), wanted + 1)
                if placement == Shard(0):
                    with pytest.raises(RuntimeError, match=r"a view.* would not follow"):  # of Dynamo
                        fast(taken)
                    assert torch.equal(x.full_tensor(), plain)
                else:
                    assert torch.equal(fast(taken).full_tensor(), write(wanted))
                    assert torch.equal(x.full_tensor(), plain)
                assert torch.equal(taken.full_tensor(), wanted)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=RANKS)
def test_what_a_function_gave_back_as_it_was_is_given_out_beside_it() -> None:
    functions: list[Callable[[Any], Any]] = [
        lambda v: (lambda a: (a, a.contiguous()))(v.squeeze()),
        lambda v: (lambda a: (a, a.float(), a.contiguous().contiguous()))(v.t()),
        lambda v: (lambda a: (a, a.to(torch.float32), a * 2))(v.view(-1)),
    ]
    for fn in functions:
        for shape in ((8, 4), (0, 3), (4, 0)):
            for placement in (Shard(0), Shard(1), Replicate()):
                torch._dynamo.reset()
                plain = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
                x = distribute_tensor(plain.detach(), mesh_of((RANKS,)), [placement]).requires_grad_()
                results = torch.compile(fn, backend="aot_eager")(x * 1)
                for one, other in zip(results, fn(plain * 1), strict=True):
                    assert torch.equal(one.full_tensor(), other)
                sum(one.sum() for one in results).backward()
                sum(one.sum() for one in fn(plain * 1)).backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
