"""Symbolic graphs for targets that compile fixed sizes only: one program per set of sizes.

A graph traced with symbolic sizes is right for all sizes that its guards allow. So a specialized
copy is made without tracing again: its symbols are replaced by the sizes of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.torch_private import (
    first_sizes,
    free_symbols,
    is_jagged_size,
    is_plain_symbol,
    number_at,
    pytree,
)

Sources: TypeAlias = Mapping[Any, tuple[int, ...]]
"""Symbol -> the position of an input whose value it is, or a position and an axis."""
Sizes: TypeAlias = tuple[int, ...]
"""The values of the symbols, in the order of Sources."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbol_sources(gm: fx.GraphModule) -> dict[Any, tuple[int, ...]] | None:
    """Where a call finds the sizes of a graph's inputs: empty for a graph of fixed sizes.

    None where an input's size is an expression of a symbol that no input has as its size. The size
    of a jagged dimension, which no kernel reads, is left out.
    """
    found: dict[Any, tuple[int, ...]] = {}
    needed: set[Any] = set()
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        is_tensor = isinstance(val, torch.Tensor)
        for axis, size in enumerate(val.shape if is_tensor else (val,)):
            if is_jagged_size(size):
                continue
            place = (position, axis) if is_tensor else (position,)
            if isinstance(size, torch.SymInt):
                needed |= free_symbols(size)
            if is_plain_symbol(size):
                (symbol,) = free_symbols(size)
                found.setdefault(symbol, place)
    return None if needed - found.keys() else found


def traced_sizes(gm: fx.GraphModule, sources: Sources) -> Sizes | None:
    """The sizes of the call that the graph was traced for; None where one is not known."""
    values = first_sizes(gm)
    return tuple(values[s] for s in sources) if sources.keys() <= values.keys() else None


def specialized(gm: fx.GraphModule, values: Mapping[Any, int]) -> fx.GraphModule:
    """A copy of the graph, with the same inputs and outputs, in which symbols have `values`."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        val = pytree.tree_map(lambda x: _at(x, values), node.meta.get("val"))
        if node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS):
            if not isinstance(val, _NUMBERS):
                env[node] = val
                continue
        copy = env[node] = graph.node_copy(node, lambda n: env[n])
        copy.args, copy.kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        copy.meta = {**node.meta, "val": val}
        copy.meta.pop("tensor_meta", None)
        if node.op == "placeholder" and isinstance(val, int):
            env[node] = val  # the copy stays, unused: it is an input
    return fx.GraphModule(gm, graph)


def _at(value: Any, symbols: Mapping[Any, int]) -> Any:
    """A fake tensor or a symbolic number at these values of its symbols."""
    if isinstance(value, _NUMBERS):
        return number_at(value, symbols)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    parts = [*value.shape, *value.stride(), value.storage_offset()]
    if all(type(part) is int for part in parts):
        return value
    shape, stride, (offset,), (size,) = (
        tuple(number_at(part, symbols) for part in group)
        for group in (
            value.shape, value.stride(), (value.storage_offset(),),
            (value.untyped_storage().nbytes(),),
        )
    )  # fmt: skip
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        whole = torch.empty(size // value.dtype.itemsize, dtype=value.dtype, device=value.device)
        fixed = whole.as_strided(shape, stride, offset)
        fixed = fixed.conj() if value.is_conj() else fixed
        return torch.ops.aten._neg_view(fixed) if value.is_neg() else fixed
