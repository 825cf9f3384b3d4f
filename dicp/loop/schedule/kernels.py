"""From fused groups to kernels: phases, stores and scratch values.

In: a graph. Out: its kernels, with their forms, and its calls in the order they run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Load, Ref, Rewriter
from dicp.loop.ir.graph import Call, Compute, Graph, refs_in
from dicp.loop.ir.index import Index, Var, flatten, product
from dicp.loop.ir.kernel import (
    Kernel,
    KernelKind,
    Let,
    Phase,
    Reduce,
    Scan,
    ScratchStore,
    Stmt,
    Store,
)
from dicp.loop.passes.compared import store_compared
from dicp.loop.passes.in_place import scatter_in_place
from dicp.loop.passes.inline import cost_of, inline
from dicp.loop.schedule.form import FormChooser
from dicp.loop.schedule.fusion import fuse
from dicp.loop.schedule.groups import CrossRow, Group
from dicp.loop.schedule.legality import is_outer, mapping_of, pass_numbers, result_coordinates
from dicp.loop.schedule.nest import Nest
from dicp.loop.schedule.partition import partitioned
from dicp.loop.schedule.transposes import transposed_operands
from dicp.loop.thresholds import HEAVY, MAX_REPEATED_READS, MAX_SCRATCH_ROW
from dicp.origin import merged_origins

Step = Kernel | Call


@dataclass
class Schedule:
    """Kernels and calls in the order they run; targets may replace kernels by steps of theirs."""

    graph: Graph
    steps: list[Any]


def schedule(
    graph: Graph,
    fuse_kernels: bool = True,
    cross_row: CrossRow | None = None,
    with_form: FormChooser | None = None,
    transposes: bool = False,
) -> Schedule:
    """The kernels and calls of a graph in the order they run.

    `cross_row` says which cross-row reductions may fuse into inner reductions, if any; `with_form`
    sets each kernel's form. With `transposes`, operands that a reduction's innermost loops would
    stride are copied first.
    """
    scatter_in_place(graph)
    store_compared(graph)
    inline(graph)
    groups = fuse(graph, fuse_kernels, cross_row)
    if transposes:
        groups = [each for group in groups for each in (*transposed_operands(group), group)]
    read_from_memory = _stored_refs(graph, groups)
    steps: list[Step] = []
    for group in groups:
        if group.is_call:
            steps.append(group.nodes[0])  # type: ignore[arg-type]
        elif not any(s == 0 for s in group.dims) or group.axes is not None:
            kernel = _KernelBuilder(group, read_from_memory).build()
            if kernel is not None:
                kernel = partitioned(kernel, cross_row.partitions) if cross_row else kernel
                steps.append(kernel if with_form is None else with_form(kernel))
    return Schedule(graph, steps)


def _stored_refs(graph: Graph, groups: Sequence[Group]) -> set[Ref]:
    """Results that must reach memory: read by another group, by a call, or returned."""
    home = {n.out: g for g in groups for n in g.computes()}
    stored = {n.out for n in graph.nodes if isinstance(n, Compute) and n.realize}
    stored |= {r.root for r in refs_in(graph.outputs)}
    for group in groups:
        for node in group.nodes:
            read = itertools.chain.from_iterable(ref.chain() for ref in node.reads())
            stored |= {ref for ref in read if home.get(ref) is not group}
            if isinstance(node, Compute) and node.out.base is not None:
                stored |= {node.out, node.out.base}
    return stored


class _KernelBuilder:
    def __init__(self, group: Group, stored: set[Ref]) -> None:
        self.group = group
        self.stored = stored
        self.members = {n.out: n for n in group.computes()}
        self.pass_of = pass_numbers(group)
        self.names = {n: f"r{k}" for k, n in enumerate(group.computes())}
        scans = any(n.kind == "scan" for n in group.computes())
        self.is_outer = group.axes is not None and not scans and is_outer(group)
        self._memo: dict[tuple[Compute, int], Expr] = {}
        self._saved: dict[Compute, None] = {}

    # ---- values -----------------------------------------------------------------------------

    def _value(self, node: Compute, number: int) -> Expr:
        """The body of `node` at the current point, loads resolved, for use in pass `number`."""
        found = self._memo.get((node, number))
        if found is None:
            rewrite = Rewriter(mapping_of(self.group, node), lambda item: self._read(item, number))
            found = self._memo[node, number] = rewrite(node.body)
        return found

    def _read(self, item: Load, number: int) -> Expr:
        producer = self.members.get(item.ref)
        if producer is None or producer.kind == "scatter":
            return ir.read(item.ref, flatten(item.coords, item.ref.strides))
        early = producer in self.group.rows_only and self.pass_of[producer] == 0
        if self.is_outer and early and producer.kind == "pointwise":
            return ir.opmath(self._value(producer, number), item.dtype)
        if producer.kind == "scan":
            return self._running(producer)
        if producer.kind == "reduce" or producer in self.group.rows_only:
            return ir.result(self.names[producer], item.dtype)
        if self.pass_of[producer] < number:
            if producer.out in self.stored and producer.body.op != "const":
                return ir.read(item.ref, self._flat(producer))
            if self._worth_saving(producer):
                self._saved[producer] = None
                return ir.scratch(self.names[producer], item.dtype)
        return ir.opmath(self._value(producer, number), item.dtype)

    def _running(self, node: Compute) -> Expr:
        """The result of a scan at the current point, in the dtype that it has in memory."""
        return ir.cast(ir.result(self.names[node], node.body.dtype), node.out.dtype)

    def _flat(self, node: Compute) -> Index:
        if node.kind == "scatter":
            mapping = mapping_of(self.group, node)
            rewrite = Rewriter(mapping, lambda item: self._read(item, 0))
            return flatten([rewrite.index(i) for i in node.target], node.out.strides)
        return flatten(result_coordinates(self.group, node), node.out.strides)

    def _worth_saving(self, node: Compute) -> bool:
        size = product(self.group.dims[k] for k in self.group.axes or ())
        if self.is_outer or not isinstance(size, int) or size > MAX_SCRATCH_ROW:
            return False
        value = self._value(node, self.pass_of[node])
        reads = sum(e.op == "read" for e in ir.walk(value))
        return cost_of(value) >= HEAVY or reads > MAX_REPEATED_READS

    # ---- phases -----------------------------------------------------------------------------

    def build(self) -> Kernel | None:
        phases: list[Phase] = []
        last = max(self.pass_of.values(), default=0)
        inner_stmts: list[list[Stmt]] = []
        row_stmts: list[list[Stmt]] = []
        for number in range(last + 1):
            here = [n for n in self.group.computes() if self.pass_of[n] == number]
            row_stmts.append([s for n in here if n in self.group.rows_only for s in self._row(n)])
            inner_stmts.append(
                [s for n in here if n not in self.group.rows_only for s in self._inner(n)]
            )
        tail: list[Stmt] = [
            Store(n.out, self._flat(n), ir.result(self.names[n], n.out.dtype))
            for n in self.group.computes()
            if n.kind == "reduce" and n not in self.group.cross_row and n.out in self.stored
        ]
        for node in self._saved:
            save = ScratchStore(
                self.names[node], node.out.dtype, self._value(node, self.pass_of[node])
            )
            inner_stmts[self.pass_of[node]].insert(0, save)
        if self.is_outer:
            tail = [s for rows in row_stmts for s in rows] + tail
            row_stmts = [[] for _ in row_stmts]
        for rows, inner in zip(row_stmts, inner_stmts, strict=True):
            if rows:
                phases.append(Phase("parallel", tuple(rows)))
            if inner:
                phases.append(Phase("reduction", tuple(inner)))
        if tail:
            phases.append(Phase("parallel", tuple(tail)))
        if not phases:
            return None
        return self._loops(phases)

    def _row(self, node: Compute) -> list[Stmt]:
        value = self._value(node, self.pass_of[node])
        stmts: list[Stmt] = [Let(self.names[node], node.out.dtype, value)]
        if node.out in self.stored:
            named = ir.result(self.names[node], node.out.dtype)
            stmts.append(Store(node.out, self._flat(node), named))
        return stmts

    def _inner(self, node: Compute) -> list[Stmt]:
        kind, name, out = node.kind, self.names[node], node.out
        if kind in ("pointwise", "scatter") and out not in self.stored:
            return []
        value = self._value(node, self.pass_of[node])
        if kind == "reduce" and node.op in ("argmax", "argmin"):
            place = self.group.coords[node][node.axes[0]]
            return [Reduce(name, node.op, value.dtype, value, place)]
        if kind == "scan":
            stmts: list[Stmt] = [Scan(name, node.op, value.dtype, value)]
            if out in self.stored:
                stmts.append(Store(out, self._flat(node), self._running(node)))
            return stmts
        value = ir.opmath(value, out.dtype)
        if node in self.group.cross_row:
            return [Store(out, self._flat(node), value, node.op)]
        if kind == "reduce":
            return [Reduce(name, node.op, value.dtype, value)]
        op = node.op if kind == "scatter" and node.op != "store" else ""
        return [Store(out, self._flat(node), value, op)]

    # ---- loops ------------------------------------------------------------------------------

    def _loops(self, phases: list[Phase]) -> Kernel:
        group = self.group
        variables = [Var(k, s) for k, s in enumerate(group.dims)]
        axes = group.axes or frozenset()
        parallel = [v for v in variables if v.position not in axes]
        reduction = [v for v in variables if v.position in axes]
        nest = Nest(phases, parallel, reduction)
        nest.split_by_division()
        scatter = any(n.kind == "scatter" for n in group.computes())
        # argmax and argmin return the first of equal extrema, so their loops keep the order.
        ordered = any(n.kind == "scan" or n.op in ("argmax", "argmin") for n in group.computes())
        nest.merge()  # ordered, loops that are one in memory may lie apart
        nest.order(keep_reduction=ordered)
        nest.merge()
        kind: KernelKind = "outer_reduction" if self.is_outer else "inner_reduction"
        if scatter or not axes:
            kind = "scatter" if scatter else "pointwise"
        return nest.kernel(kind, merged_origins(*(n.origins for n in group.computes())))
