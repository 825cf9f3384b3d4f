"""Inputs that are written to: in the graph, on their own memory, after all that reads them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_recorder import record
from ascend_simulated import compiled
from torch import Tensor, nn

from dicp.errors import SimulatorWarning
from dicp.graphop.program import Result
from dicp.vendor.ascend.prototypes import POINTWISE

pytestmark = pytest.mark.sweep

pytree = torch.utils._pytree


def by_index(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache.index_copy_(2, place, new)
    return cache.sum(-1)


def by_slice(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache[:, :, 3:5] = new
    return cache.sum(-1)


def at_the_start(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache[:, :, :2] = new
    return cache * 2


def at_the_end(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache[:, :, -2:] = new
    return cache * 2


def rows(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache[place] = new[0, 0, 0, 0] + 1
    return cache * 2


def added_rows(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache.index_put_((place,), new[0, 0, 0, 0], accumulate=True)
    return cache * 2


def twice(cache: Tensor, new: Tensor, place: Tensor) -> Tensor:
    cache[:, :, 3:5] = new
    cache[:, :, 4:6] = new + 1
    return cache.sum(-1)


def reads_old(cache: Tensor, new: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    before = cache.sum(-1)
    cache[:, :, 3:5] = new
    return before, cache.sum(-1)


PARTIAL = {
    "by_index": (by_index, "ScatterElementsV2", 1),
    "by_slice": (by_slice, "StridedSliceAssign", 1),
    "at_the_start": (at_the_start, "StridedSliceAssign", 1),
    "at_the_end": (at_the_end, "StridedSliceAssign", 1),
    "rows": (rows, "ScatterNdUpdate", 1),
    "added_rows": (added_rows, "ScatterElementsV2", 1),
    "twice": (twice, "StridedSliceAssign", 2),
    "reads_old": (reads_old, "StridedSliceAssign", 1),
}


def cache_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        torch.arange(2 * 4 * 8 * 16, dtype=dtype).view(2, 4, 8, 16),
        torch.rand(2, 4, 2, 16).to(dtype),
        torch.tensor([0, 1]),
    ]


def check(fn: Callable[..., Any], inputs: list[Any], **options: Any) -> None:
    """Outputs and inputs are as eager leaves them, and the inputs are where they were."""
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    places = [x.data_ptr() for x in mine]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        got = compiled(fn, **options)(*mine)
    expected = fn(*theirs)
    pairs = zip(
        pytree.tree_leaves((got, mine)), pytree.tree_leaves((expected, theirs)), strict=True
    )
    for x, y in pairs:
        torch.testing.assert_close(x, y)
        assert x is y is None or x.stride() == y.stride()
    assert places == [x.data_ptr() for x in mine]


def leaving(fn: Callable[..., Any], inputs: list[Any], **options: Any) -> list[Result]:
    target = record(fn, *copy.deepcopy(inputs), **options)
    assert not any("call" in step for p in target.programs for step in p.serialized["steps"])
    return [r for p in target.programs for g in p.graphs for r in g.results]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", PARTIAL)
def test_an_update_of_a_part_writes_that_part(name: str, symbolic: bool) -> None:
    fn, kind, count = PARTIAL[name]
    inputs = cache_inputs()
    target = record(fn, *copy.deepcopy(inputs), dynamic=symbolic)
    kinds = target.kinds()
    assert kinds[kind] == count
    assert not any(kinds[k] for k in ("ConcatD", "TensorScatterUpdate", "ScatterElements",
                                      "Assign", "Transpose"))  # fmt: skip
    assert not any("call" in step for p in target.programs for step in p.serialized["steps"])
    ways = [r.placement for p in target.programs for g in p.graphs for r in g.results]
    assert ways.count("in_place") == 1 and "into_input" not in ways
    check(fn, inputs, dynamic=symbolic)


def test_old_contents_are_read_before() -> None:
    (source,) = record(reads_old, *cache_inputs()).sources()
    assert source.count("AddControlInput(reducesum") == 1
    assert 'Input("RefData"' in source
    assert "graph.SetTargets(Operators{stridedsliceassign" in source


def test_half_caches_and_integers() -> None:
    for dtype in (torch.bfloat16, torch.int32):
        assert [r.placement for r in leaving(by_slice, cache_inputs(dtype))].count("in_place") == 1
        check(by_slice, cache_inputs(dtype))
    assert "into_input" not in [r.placement for r in leaving(by_slice, cache_inputs(torch.int64))]
    check(by_slice, cache_inputs(torch.int64))  # no operator on parts takes them: assigned whole


# ---- whole tensors -------------------------------------------------------------------------------


def momentum(p: Tensor, m: Tensor, grad: Tensor) -> None:
    m.mul_(0.9).add_(grad, alpha=0.1)
    p.add_(m, alpha=-0.01)


def counted(x: Tensor, n: Tensor) -> Tensor:
    n.add_(1)
    return x * n


def unread(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y @ y)
    return y + 1


def mixed(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(x @ y)
    return x + 1


def swapped(x: Tensor, y: Tensor) -> None:
    before = x.clone()
    x.copy_(y * 2)
    y.copy_(before * 2)


def shown_late(x: Tensor, y: Tensor) -> Tensor:
    new = x + y
    out = x @ new  # reads what `new` would go over
    x.copy_(new)
    return out


def returned_old(x: Tensor, y: Tensor) -> Tensor:
    old = x.clone()
    x.add_(y)
    return old


def through_reshape(x: Tensor, y: Tensor) -> Tensor:
    x.copy_((x.reshape(-1) * 2).reshape(4, 4))
    return x.sum()


SQUARE = [torch.arange(16.0).view(4, 4), torch.linspace(-1, 1, 16).view(4, 4)]
WHOLE: dict[str, tuple[Callable[..., Any], list[Tensor], list[str]]] = {
    "momentum": (
        momentum,
        [torch.ones(8), torch.ones(8), torch.rand(8)],
        ["into_input", "into_input"],
    ),
    "counted": (counted, [torch.ones(3), torch.tensor(4)], ["into_input", "fresh"]),
    "unread": (unread, SQUARE, ["into_input", "fresh"]),
    "mixed": (mixed, SQUARE, ["in_place", "fresh"]),
    "swapped": (swapped, SQUARE, ["into_input", "into_input"]),
    "shown_late": (shown_late, SQUARE, ["in_place", "fresh"]),
    "through_reshape": (through_reshape, SQUARE, ["into_input", "fresh"]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_result_goes_over_its_input(name: str) -> None:
    fn, inputs, ways = WHOLE[name]
    assert sorted(r.placement for r in leaving(fn, inputs)) == sorted(ways)
    check(fn, inputs)


def test_a_returned_copy_of_the_old_contents() -> None:
    check(returned_old, SQUARE)


def returned_part(x: Tensor, y: Tensor) -> Tensor:
    old = x.chunk(2)[0].slice_scatter(y[:2, 1:1], 1, 1, 1)
    x[:2].add_(y[:2])
    return old


def test_a_returned_part_of_the_old_contents() -> None:
    """A part is a view of the input in the simulator, and memory of its own in GE."""
    check(returned_part, SQUARE)


@pytest.mark.parametrize(
    "layout",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:]],
    ids=["transposed", "holes", "offset"],
)
def test_any_strides_of_what_is_written_to(layout: Callable[[Tensor], Tensor]) -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum(0)

    base = torch.arange(32.0).view(4, 8)
    other = base.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        got = compiled(fn)(layout(base))
    assert torch.equal(got, fn(layout(other))) and torch.equal(base, other)


def test_an_eager_reader_keeps_its_contents() -> None:
    def fn(x: Tensor) -> Tensor:
        before = torch.histc(x, 4)
        x.mul_(2)
        return before + x.sum()

    check(fn, [torch.arange(8.0)])


def test_old_contents_are_read_after_an_eager_call_on_the_new() -> None:
    def fn(x: Tensor) -> Tensor:
        new = x + 1
        scale = torch.histc(new, 4).sum()
        out = x * scale
        x.copy_(new)
        return out

    check(fn, [torch.arange(8.0)])


def test_an_operator_that_waits_for_an_eager_call() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        new = x + 1
        out = x @ torch.histc(y, 16).view(4, 4)  # reads `x` once the call is done
        x.copy_(new)
        return out

    check(fn, SQUARE)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    ],
    ids=["adamw", "sgd"],
)
def test_an_optimizer_step_copies_no_tensor(make: Callable[[Any], Any]) -> None:
    def model() -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        network = nn.Linear(6, 5)
        for p in network.parameters():
            p.grad = torch.randn_like(p)
        optimizer = make(network.parameters())
        optimizer.step()  # state is made
        return network, optimizer

    network, optimizer = model()
    target = record(optimizer.step)
    assert not any("call" in step for p in target.programs for step in p.serialized["steps"])
    leaving = [r for p in target.programs for g in p.graphs for r in g.results]
    large = [r for r in leaving if r.value.ndim]
    assert large and all(r.placement == "into_input" for r in large)
    assert all(n.kind in POINTWISE | {"Assign"} for n in target.operators())

    mine, theirs = model(), model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        compiled(mine[1].step)()
    theirs[1].step()
    for x, y in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(x, y)
