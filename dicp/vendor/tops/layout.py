"""Conversions between NCHW and NHWC at the borders only.

A transpose moves behind what reads it: f(t(x), t(y)) = t(f(x, y)), for operators that work element
by element, along one axis or over axes. Where it meets its inverse, before the next convolution,
both go. Sizes of 1 and broadcasts move for nothing: a reshape or another order of a broadcast's
dimensions does it. An operator moves only if all that it reads moves for nothing or is a transpose
of the same order, so that no transpose is ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dicp.graphop.builder import Builder
from dicp.graphop.partition import remove_dead
from dicp.graphop.program import Item, Node, Value
from dicp.graphop.prototype import ResultType
from dicp.graphop.rewrite import Rewrite, Rewritten, rewritten
from dicp.graphop.strides import inverse
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.prototypes import ELEMENTWISE

Order = tuple[int, ...]


def cancelled(builder: Builder, items: Sequence[Item], outputs: Sequence[object]) -> list[Item]:
    """`items` with their transposes as late as can be, and those that undo each other gone."""
    assert isinstance(builder, Hlir)
    for _ in range(2):  # what one pass makes may be what another rewrite looks for
        items = remove_dead(rewritten(builder, items, REWRITES), outputs)
    return list(items)


def order_of(value: Value) -> Order | None:
    """The permutation, if the value is a transpose."""
    return tuple(value.node.attrs["perm"]) if value.node.kind == "Transpose" else None


def _source(value: Value) -> Value:
    return value.node.operands()[0]


def _moved(order: Order, axes: Sequence[int]) -> list[int]:
    """Where axes of a transpose stand in what it reads."""
    return [order[axis] for axis in axes]


def _is_free(g: Hlir, value: Value) -> bool:
    """Whether a value may be had in another order without a transpose."""
    return value.ndim == 0 or value.node.kind in ("BroadcastInDim", "const") or _is_thin(g, value)


def _is_thin(g: Hlir, value: Value) -> bool:
    """Whether at most one dimension has more than one element: any order is the same memory."""
    return sum(not g.same(size, 1) for size in value.shape) <= 1


def _reordered(g: Hlir, value: Value, order: Order) -> Value:
    """`value` with its dimensions in `order`; one that is free, or a transpose that this undoes."""
    if value.ndim == 0:
        return value
    own = order_of(value)
    if own is not None and inverse(own) == order:
        return _source(value)
    shape = [value.shape[d] for d in order]
    if value.node.kind != "BroadcastInDim":
        return g.reshape(value, shape)
    dims = [order.index(d) for d in value.node.attrs["dims"]]
    source = _source(value)
    if dims != sorted(dims):
        place = sorted(range(len(dims)), key=dims.__getitem__)
        source = g.reshape(source, [source.shape[d] for d in place])
    kind = ResultType(value.dtype, tuple(shape))
    return g.hlir("BroadcastInDim", source, dims=sorted(dims), type=kind)


def _can_reorder(g: Hlir, value: Value, order: Order) -> bool:
    """Whether `_reordered` adds no transpose."""
    own = order_of(value)
    if own is not None and inverse(own) == order:
        return True
    if value.node.kind != "BroadcastInDim":
        return _is_free(g, value)
    dims = [order.index(d) for d in value.node.attrs["dims"]]
    return dims == sorted(dims) or _is_thin(g, _source(value))


def _common_order(g: Hlir, values: Sequence[Value]) -> Order | None:
    """The order that all values are transposes of, or may be had in."""
    orders = {order for value in values if (order := order_of(value)) is not None}
    if len(orders) != 1:
        return None
    order = orders.pop()
    back = inverse(order)
    return order if all(_can_reorder(g, v, back) for v in values) else None


def _behind(
    attrs: Callable[[Node, Order], dict[str, Any] | None] = lambda node, order: dict(node.attrs),
) -> Rewrite:
    """Moves a transpose behind an operator whose result has its operands' dimensions; `attrs` are
    those of the moved operator, None where it cannot be moved."""

    def rewrite(builder: Builder, node: Node) -> Rewritten:
        assert isinstance(builder, Hlir)
        values = [value for value in node.operands() if value.ndim]
        order = _common_order(builder, values) if values else None
        given = None if order is None else attrs(node, order)
        if order is None or given is None:
            return None
        back = inverse(order)
        operands = [
            _reordered(builder, operand, back) if isinstance(operand, Value)
            else tuple(_reordered(builder, value, back) for value in operand)
            for operand in node.inputs.values()
        ]  # fmt: skip
        kind = given.get("type")
        if isinstance(kind, ResultType):
            given["type"] = ResultType(kind.dtype, tuple(kind.dims[d] for d in back))
        made = builder.own(node.kind, *operands, **given)
        return [builder.transpose(value, order) for value in made]

    return rewrite


def _axis(node: Node, order: Order) -> dict[str, Any]:
    return {**node.attrs, "axis": order[node.attrs["axis"]]}


def _axes(node: Node, order: Order) -> dict[str, Any] | None:
    if not node.attrs["keepdim"]:
        return None
    return {**node.attrs, "axes": sorted(_moved(order, node.attrs["axes"]))}


def _bounds(node: Node, order: Order) -> dict[str, Any]:
    back = inverse(order)
    return {name: [node.attrs[name][d] for d in back] for name in ("start", "limit", "stride")}


def _reduction(builder: Builder, node: Node) -> Rewritten:
    """A reduction that leaves its other dimensions in the same order needs no transpose."""
    assert isinstance(builder, Hlir)
    x = node.operands()[0]
    order = order_of(x)
    if order is None or node.attrs["keepdim"]:
        return _behind(_axes)(builder, node)
    axes = node.attrs["axes"]
    left = _moved(order, [d for d in range(x.ndim) if d not in axes])
    if left != sorted(left):
        return None
    given = {**node.attrs, "axes": sorted(_moved(order, axes))}
    return [builder.own(node.kind, _source(x), **given)[0]]


def _transpose(builder: Builder, node: Node) -> Sequence[Value] | None:
    """t(u(x)) is one transpose, or x."""
    assert isinstance(builder, Hlir)
    x, order = node.operands()[0], tuple(node.attrs["perm"])
    inner = order_of(x)
    if inner is not None:
        return [builder.transpose(_source(x), [inner[d] for d in order])]
    if _can_reorder(builder, x, order):
        return [_reordered(builder, x, order)]
    return None


def _reshape(builder: Builder, node: Node) -> Sequence[Value] | None:
    """A transpose that moves only sizes of 1 is a reshape."""
    assert isinstance(builder, Hlir)
    x = node.operands()[0]
    order = order_of(x)
    if x.node.kind == "Reshape":
        return [builder.reshape(_source(x), node.outputs[0].shape)]
    if order is None:
        return None
    source = _source(x)
    kept = [d for d in order if not builder.same(source.shape[d], 1)]
    return [builder.reshape(source, node.outputs[0].shape)] if kept == sorted(kept) else None


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(ELEMENTWISE, _behind()),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
                    _reduction),
    "Concatenate": _behind(_axis),
    "Softmax": _behind(_axis),
    "Slice": _behind(_bounds),
    "Transpose": _transpose,
    "Reshape": _reshape,
}  # fmt: skip
