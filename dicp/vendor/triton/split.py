"""Reductions with few results are split: parts of the sweep side by side, then their results.

sum over r of f(x, r) = sum over s of (sum over c of f(x, s * C + c)), with R = S * C.
"""

from __future__ import annotations

import math

from dicp.loop import ir
from dicp.loop.index import (
    ZERO,
    Index,
    Size,
    Var,
    contiguous_strides,
    domain,
    product,
    variable,
)
from dicp.loop.ir import Compute, Graph, Ref, Rewriter
from dicp.vendor.triton.tiles import COLUMNS, ENOUGH_PROGRAMS, extent

SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all"})
FEW_PROGRAMS = 48
"""Programs that leave most multiprocessors idle."""
LEAST_ROW = 8192
"""Elements of a row that one program sweeps at the least."""
LEAST_COLUMN = 128
"""Rows of a column block that one program sweeps at the least."""
LEAST_PARTS = 4


def split_reductions(graph: Graph) -> None:
    """Each long reduction with few results becomes two, the first with many."""
    nodes: list[ir.Node] = []
    for node in graph.nodes:
        if isinstance(node, Compute):
            found = _parts(node)
            if found is not None:
                nodes.append(_split(node, *found))
        nodes.append(node)
    graph.nodes[:] = nodes


def _parts(node: Compute) -> tuple[int, int] | None:
    """The reduced axis to split, one of known size, and into how many parts."""
    if node.kind != "reduce" or node.op not in SPLITTABLE:
        return None
    results = product(s for k, s in enumerate(node.shape) if k not in node.axes)
    fixed = [k for k in node.axes if isinstance(node.shape[k], int)]
    if not isinstance(results, int) or 0 in node.shape or not fixed:
        return None
    swept = math.prod(extent(node.shape[k]) for k in node.axes)
    column = (len(node.shape) - 1) not in node.axes
    programs = -(-results // COLUMNS) if column else results
    if programs >= FEW_PROGRAMS:
        return None
    wanted = min(swept // (LEAST_COLUMN if column else LEAST_ROW), ENOUGH_PROGRAMS // programs)
    parts, axis = max((_divisor(extent(node.shape[k]), wanted), -k) for k in fixed)
    return (-axis, parts) if parts >= LEAST_PARTS else None


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`."""
    return next((d for d in range(min(most, size), 1, -1) if size % d == 0), 1)


def _split(node: Compute, axis: int, parts: int) -> Compute:
    """The first half; `node` is left to combine what it gives."""
    size = node.shape[axis]
    assert isinstance(size, int)
    chunk = size // parts
    shape: tuple[Size, ...] = (*node.shape[:axis], parts, chunk, *node.shape[axis + 1 :])
    mapping: dict[Var, Index] = {}
    for k, s in enumerate(node.shape):
        at = k if k < axis else k + 1
        mapping[Var(k, s)] = variable(Var(at, s))
    inside = variable(Var(axis + 1, chunk))
    mapping[Var(axis, size)] = variable(Var(axis, parts)) * chunk + inside
    axes = tuple(k if k < axis else k + 1 for k in node.axes)
    kept = tuple(1 if k in axes else s for k, s in enumerate(shape))
    partial = Ref(f"{node.out.name}_parts", kept, node.out.dtype, contiguous_strides(kept), "temp")
    first = Compute(
        partial, shape, Rewriter(mapping)(node.body), "reduce", axes, node.op,
        after=node.after, origins=node.origins,
    )  # fmt: skip
    partial.producer = first
    node.shape = tuple(
        (parts if k == axis else 1) if k in node.axes else s for k, s in enumerate(node.shape)
    )
    idx = domain(node.shape)
    node.body = ir.load(partial, [*idx[: axis + 1], ZERO, *idx[axis + 1 :]])
    node.axes = (axis,)
    return first
