"""Symbolic graphs for targets that compile fixed sizes only: one program per set of sizes.

A graph traced with symbolic sizes is right for all sizes that its guards allow. So a specialized
copy is made without tracing again: its symbols are replaced by the sizes of a call.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.errors import SpecializationWarning
from dicp.target import Executable
from dicp.torch_private import first_sizes, free_symbols, is_plain_symbol, number_at, pytree

MOST_SIZES = 64
"""How many sets of sizes keep their programs; the least recently used program is dropped."""

Sources: TypeAlias = Mapping[Any, tuple[int, ...]]
"""Symbol -> the position of an input whose value it is, or a position and an axis."""
Sizes: TypeAlias = tuple[int, ...]
"""The values of the symbols, in the order of Sources."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbol_sources(gm: fx.GraphModule) -> dict[Any, tuple[int, ...]] | None:
    """Where a call finds the sizes of a graph's inputs: empty for a graph of fixed sizes.

    None where an input's size is an expression of a symbol that no input has as its size.
    """
    found: dict[Any, tuple[int, ...]] = {}
    needed: set[Any] = set()
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        is_tensor = isinstance(val, torch.Tensor)
        for axis, size in enumerate(val.shape if is_tensor else (val,)):
            place = (position, axis) if is_tensor else (position,)
            if isinstance(size, torch.SymInt):
                needed |= free_symbols(size)
            if is_plain_symbol(size):
                (symbol,) = free_symbols(size)
                found.setdefault(symbol, place)
    return None if needed - found.keys() else found


def traced_sizes(gm: fx.GraphModule, sources: Sources) -> Sizes | None:
    """The sizes of the call that the graph was traced for; None where one is not known."""
    values = first_sizes(n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
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


class PerSizeExecutable:
    """Runs the program for the sizes of its inputs, compiled when they first occur.

    compile: makes a specialized graph executable.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        sources: Sources,
        compile: Callable[[fx.GraphModule], Executable],
    ) -> None:
        self._gm = gm
        self._sources = dict(sources)
        self._compile = compile
        self._programs: OrderedDict[Sizes, Executable] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    def __call__(self, inputs: list[Any]) -> list[Any]:
        sizes = self._sizes(inputs)
        with self._lock:
            found = self._programs.get(sizes)
            if found is None:
                found = self._compile(self.graph_for(sizes))
                self.keep(sizes, found)
            self._programs.move_to_end(sizes)
        return found(inputs)

    def graph_for(self, sizes: Sizes) -> fx.GraphModule:
        """The graph specialized to these sizes."""
        return specialized(self._gm, dict(zip(self._sources, sizes, strict=True)))

    def keep(self, sizes: Sizes, program: Executable) -> None:
        """Use `program` for these sizes."""
        self._programs[sizes] = program
        if len(self._programs) > MOST_SIZES:
            self._programs.popitem(last=False)
            if not self._warned:
                self._warned = True
                names = sorted(map(str, self._sources))
                warnings.warn(SpecializationWarning(MOST_SIZES, names), stacklevel=2)

    def _sizes(self, inputs: Sequence[Any]) -> Sizes:
        return tuple(
            inputs[s[0]] if len(s) == 1 else inputs[s[0]].shape[s[1]]
            for s in self._sources.values()
        )
