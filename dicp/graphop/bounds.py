"""Checks of indices that graph operators read from tensors, and of integers that they divide by,
which vendors' operators leave out.

The least and the greatest index of each tensor are one more result of the program; the host
compares them before it hands any result out. Where an operator would read or write outside of its
operand, it gets clamped indices. Indices that are known to be in range need neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.graphop.program import CheckedIndex, IndexCheck, Item, Node, Result, Slot
from dicp.graphop.ranges import Ranges
from dicp.indices import Site, index_sites
from dicp.origin import origin_of
from dicp.torch_private import traced_from

aten = torch.ops.aten
DIVISIONS = frozenset({
    aten.div.Scalar_mode, aten.div.Tensor_mode, aten.floor_divide.Scalar, aten.floor_divide.default,
    aten.fmod.Scalar, aten.fmod.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor,
    aten.remainder.Tensor,
})  # fmt: skip
"""Eager refuses to divide integers by 0."""


class IndexChecks:
    """The checks of one FX graph, gathered while it is lowered."""

    def __init__(self, builder: Ops) -> None:
        self.builder = builder
        self._ranges = Ranges()
        self._rows: list[CheckedIndex] = []
        self._ends: dict[Value, int] = {}
        """Tensor of indices -> the number of its pair of extremes."""
        self._scalars: list[Value] = []

    def needed(self, node: fx.Node) -> list[Site]:
        """The indices of a call that may be out of range.

        Raises NoRule for a call that eager refuses whatever its tensors hold.
        """
        return [site for site in index_sites(node) if not self._is_in_range(site)]

    def _is_in_range(self, site: Site) -> bool:
        if self.builder.same(site.count, 0):
            return True
        if self.builder.same(site.size, 0) and self.builder.proves(site.count > 0):
            raise NoRule("an index into an empty dimension, which eager refuses")
        found = None if site.first else self._ranges.of(site.node)
        if found is None:
            return False
        least, greatest = found[0] >= site.least, found[1] < site.size
        if site.node.op == "get_attr" and not (least and greatest):
            raise NoRule("a constant index out of range, which eager refuses")
        return self.builder.proves(least) and self.builder.proves(greatest)

    def contained(self, site: Site, index: Value) -> Value:
        """Indices for an operator: clamped where the vendor's operators require indices in
        range."""
        g = self.builder
        if g.bears_any_index or site.first:
            return index
        ends = site.least, site.size - 1

        def clamp() -> Value:
            low, high = (g.number(end, index.dtype) for end in ends)
            return g.op("Minimum", g.op("Maximum", index, low), high)

        with self._checking():
            clamped: Value = g.once(("clamped", index, *map(str, ends)), clamp)
        return clamped

    def add_divisor(self, node: fx.Node, args: Sequence[Any]) -> None:
        """Check the divisor of a call that was lowered to graph operators, if it divides integers.

        Raises NoRule for a number that may be 0.
        """
        fake = node.meta["val"]
        if node.target not in DIVISIONS or fake.is_floating_point():
            return
        g, divisor = self.builder, args[1]
        found = self._ranges.of(node.args[1] if isinstance(divisor, Value) else divisor)
        if found is not None and (g.proves(found[0] > 0) or g.proves(found[1] < 0)):
            return
        if not isinstance(divisor, Value):
            raise NoRule("a division by a number that may be 0, which eager refuses")
        with self._checking():
            zeros = g.once(
                ("zeros", divisor),
                lambda: g.cast(g.op("LogicalNot", g.truth(divisor)), torch.int64),
            )
        self.add(node, Site(node, 1, False, fake.numel()), zeros, divides=True)

    def add(self, node: fx.Node, site: Site, index: Value, divides: bool = False) -> None:
        """Check these indices of a call that was lowered to graph operators."""
        if site.first:
            with self._checking():
                index = self.builder.slice(index, 0, 0, 1)
        if index not in self._ends:
            self._ends[index] = len(self._scalars) // 2
            with self._checking():
                self._scalars += self._least_and_greatest(index)
        traced = traced_from(node)
        origin = origin_of(node)
        origin = replace(origin, op=str(traced)) if traced is not None else origin
        self._rows.append(
            CheckedIndex(self._ends[index], site.size, site.count, site.wraps, origin, divides)
        )

    def _least_and_greatest(self, index: Value) -> list[Value]:
        g, count = self.builder, math.prod(index.shape)
        if g.same(count, 1):
            return [g.cast(g.reshape(index, []), torch.int64)] * 2
        if not g.proves(count > 0):  # a 0 does not count where there is an element to point at
            index = g.concat([g.reshape(index, [count]), g.const([0], index.dtype)], 0)
        axes = list(range(index.ndim))
        ends = [g.reduce(kind, index, axes, False) for kind in ("ReduceMin", "ReduceMax")]
        return [g.cast(end, torch.int64) for end in ends]

    def items(self) -> list[Item]:
        """The steps that end the program, if there is anything to check."""
        if not self._rows:
            return []
        with self._checking():
            ends = self.builder.op("Stack", tuple(self._scalars), axis=0, N=len(self._scalars))
        slot = Slot("index_ends", ends.fake)
        return [Result(ends, slot, (0,)), IndexCheck(slot, tuple(self._rows))]

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Mark the operators emitted by these rules as part of index checks."""
        made = self.builder.nodes
        before, origin = len(made), self.builder.origin
        yield
        self.builder.origin = origin
        for item in made[before:]:
            if isinstance(item, Node):
                item.checks = True
