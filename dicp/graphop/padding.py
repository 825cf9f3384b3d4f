"""Which graphs may run on padded inputs: those in which no padded element affects any other.

Every symbolic dimension is padded at its end, up to a shape bucket. A graph may be padded if each
operator's elements at unpadded positions depend on elements at unpadded positions alone:
elementwise operators, moves that preserve padded dimensions, products, reductions and norms over
other dimensions. Padded positions of the results are sliced off. A graph that writes to an input,
or has an operator without a check by its vendor, may not be padded.

Graphs that are compiled for fixed sizes take the sizes of the run as numbers beside the padded
tensors. Operators along a padded dimension read masked operands: their padded positions hold the
neutral element (`masks`). Elsewhere such graphs are refused, as are those that use a size as a
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.flattened import Flow, Forms, Mixed, unknown
from dicp.graphop.interpreter import Semantics
from dicp.graphop.operators import Ops
from dicp.graphop.program import Graph, Node, Value
from dicp.graphop.rewrite import Rewrite, Rewritten
from dicp.torch_private import linear_factor

Refusal = str | None
Check = Callable[[Node], Refusal]
"""Why an operator combines padded elements with others, or None."""


def padding_refusal(
    graph: Graph, checks: Mapping[str, Check], semantics: Semantics,
    flows: Mapping[str, Flow] | None = None,
) -> Refusal:  # fmt: skip
    """Why a graph does not run on padded inputs; None if it does. `checks` are the vendor's by
    operator; a graph of known sizes has no use for padding.

    flows: of graphs that take sizes of the run as numbers, where an operator leaves padded places.
    """
    placed: dict[Value, Forms] = {}
    if not any(is_padded(size) for node in graph.nodes for size in _sizes_of(node)):
        return "its sizes are known"
    if not any(node.kind == "input" for node in graph.nodes):
        return "it takes no tensor"
    if any(result.placement != "fresh" for result in graph.results):
        return "it writes to an input"
    for node in graph.nodes:
        found = None if node.checks else _node_refusal(node, checks, semantics, flows is not None)
        if found is None and flows is not None:
            found = _flow_refusal(node, flows, placed)
        if found is not None:
            return f"{node.kind} {found}" + (f", from {node.origin}" if node.origin else "")
    if any(any(placed[result.value]) for result in graph.results if flows is not None):
        return "a result has a flattened padded dimension"
    return None


def _flow_refusal(node: Node, flows: Mapping[str, Flow], placed: dict[Value, Forms]) -> Refusal:
    """Record where the results of a node have padding."""
    flow = flows.get(node.kind, unknown)
    if node.checks:  # only reads indices
        placed.update((value, [None] * value.ndim) for value in node.outputs)
        return None
    try:
        forms = flow(node, [placed[value] for value in node.operands()])
    except Mixed as error:
        return str(error)
    placed.update((value, forms) for value in node.outputs)
    return None


def _node_refusal(
    node: Node, checks: Mapping[str, Check], semantics: Semantics, takes_numbers: bool
) -> Refusal:
    if node.kind == "sizes" and takes_numbers:
        return None
    if node.kind in ("input", "const", "sizes"):
        simple = all(linear_factor(size) is not None for size in _sizes_of(node))
        return None if simple else "has a size that is no multiple of one symbol"
    check = checks.get(node.kind)
    if check is None:
        return "is not known to keep padded elements apart"
    host = semantics[node.kind].host
    for port, operand in node.inputs.items():
        for value in [operand] if isinstance(operand, Value) else operand:
            if value.node.kind == "sizes" and port not in host and not takes_numbers:
                return "uses a size as a number"
    return check(node)


def _sizes_of(node: Node) -> list[Any]:
    if node.kind == "sizes":
        sizes = node.attrs["sizes"]
        return list(sizes) if isinstance(sizes, tuple) else [sizes]
    return [size for value in node.outputs for size in value.shape]


def is_padded(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def refused_if(padded: bool, reason: str) -> Refusal:
    return reason if padded else None


# ---- checks --------------------------------------------------------------------------------------


def allows_padding(node: Node) -> Refusal:
    """Elementwise: each element of the result depends on those at its own position."""
    return None


def along(axes: Callable[[Node], Sequence[Any]]) -> Check:
    """Refused along a padded dimension of the first operand."""

    def check(node: Node) -> Refusal:
        shape = node.operands()[0].shape
        over = [shape[axis % len(shape)] for axis in axes(node)] if shape else []
        return refused_if(any(map(is_padded, over)), "works along a padded dimension")

    return check


def last(count: Callable[[Node], int]) -> Check:
    """Refused along any of the last dimensions that is padded."""
    return along(lambda node: range(-count(node), 0))


def joined(attr: str) -> Check:
    """The operands are concatenated along the axis that an attribute names: only the last may be
    padded."""
    return lambda node: refused_if(
        any(is_padded(v.shape[node.attrs[attr]]) for v in node.operands()[:-1]),
        "joins along a padded dimension",
    )


def division(node: Node) -> Refusal:
    """Padded integers are zeros: division by them is refused."""
    padded = any(map(is_padded, node.outputs[0].shape))
    whole = not node.outputs[0].dtype.is_floating_point
    return refused_if(padded and whole, "divides integers")


def images(node: Node) -> Refusal:
    """Only the batch may be padded."""
    shape = node.operands()[0].shape
    return refused_if(any(map(is_padded, shape[1:])), "works on padded images")


def sliced(shape: Sequence[Any], bounds: Sequence[Sequence[Any]]) -> Refusal:
    """`bounds` are the starts, the ends and the steps, by dimension."""
    for size, begin, end, step in zip(shape, *bounds, strict=True):
        if is_padded(size) and (begin != 0 or step != 1 or not _same(end, size)):
            return "takes a part of a padded dimension"
        if not is_padded(size) and (is_padded(begin) or is_padded(end)):
            return "starts or ends at a size"
    return None


def reshaped(node: Node) -> Refusal:
    """A padded dimension is preserved if the number of elements before it is unchanged."""
    before, after = list(node.operands()[0].shape), list(node.outputs[0].shape)
    while before and after and _same(before[0], after[0]):
        before.pop(0)
        after.pop(0)
    left, right = (_before_padded(shape) for shape in (before, after))
    return refused_if(left is None or left != right, "takes a padded dimension apart")


def _same(left: Any, right: Any) -> bool:
    return linear_factor(left) == linear_factor(right)


def _before_padded(shape: Sequence[Any]) -> int | None:
    """The number of elements before the only padded dimension; 0 if none is padded, None if two
    are."""
    places = [k for k, size in enumerate(shape) if is_padded(size)]
    if not places:
        return 0
    return math.prod(shape[: places[0]]) if len(places) == 1 else None


# ---- masks ---------------------------------------------------------------------------------------


def masked(g: Ops, x: Value, axes: Sequence[int], fill: float) -> Value:
    """`x` with `fill` at the padded positions of `axes`."""
    for axis in axes:
        size = x.shape[axis]
        if is_padded(size):
            inside = g.op("Less", g.iota(x.shape, axis), g.number(size, torch.int64))
            x = g.where(inside, x, fill, x.dtype)
    return x


def masks(axes: Callable[[Node], Sequence[int]], fill: Callable[[torch.dtype], float]) -> Rewrite:
    """Mask the first operand of an operator along `axes`."""

    def rewrite(g: Builder, node: Node) -> Rewritten:
        assert isinstance(g, Ops)
        x = node.operands()[0]
        if not any(is_padded(x.shape[axis]) for axis in axes(node)):
            return None
        return g.own(node.kind, masked(g, x, axes(node), fill(x.dtype)), **node.attrs)

    return rewrite


def masked_mean(axes: Callable[[Node], Sequence[int]], total: str) -> Rewrite:
    """The mean as the sum (the operator `total`), divided by the number of elements of the run."""

    def rewrite(g: Builder, node: Node) -> Rewritten:
        assert isinstance(g, Ops)
        x = node.operands()[0]
        count = math.prod(x.shape[axis] for axis in axes(node))
        if not is_padded(count):
            return None
        found = g.own(total, masked(g, g.wide(x), axes(node), 0), **node.attrs)[0]
        return [g.cast(g.div(found, g.number(count, found.dtype)), x.dtype)]

    return rewrite


def masked_dot(g: Builder, node: Node) -> Rewritten:
    """Both factors are masked along the dimensions that are summed, the last two of `dims`: padded
    elements may be infinite."""
    assert isinstance(g, Ops)
    sides = list(zip(node.operands(), node.attrs["dims"][2:], strict=True))
    if not any(is_padded(x.shape[axis]) for x, axes in sides for axis in axes):
        return None
    return g.own(node.kind, *(masked(g, x, axes, 0) for x, axes in sides), **node.attrs)


def lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
