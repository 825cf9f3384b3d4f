"""From fused groups to kernels: phases, stores, scratch values, loop order, coalesced loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Load, Read, Ref, Rewriter
from dicp.loop.ir.graph import Call, Compute, Graph, refs_in
from dicp.loop.ir.index import (
    ZERO,
    FloorDiv,
    Index,
    Mod,
    Size,
    Var,
    flatten,
    indirect_exprs,
    normal,
    product,
    quotient,
    variable,
)
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
from dicp.loop.passes.inline import cost_of, inline
from dicp.loop.schedule.form import FormChooser
from dicp.loop.schedule.fusion import fuse
from dicp.loop.schedule.groups import CrossRow, Group
from dicp.loop.schedule.legality import is_outer, mapping_of, pass_numbers, place_of
from dicp.loop.schedule.partition import partitioned
from dicp.loop.thresholds import (
    ADJACENT,
    GUESS,
    HEAVY,
    MAX_REPEATED_READS,
    MAX_SCRATCH_ROW,
    MAX_STRIDE,
    STRIDE_POWER,
)
from dicp.origin import Origin

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
) -> Schedule:
    """The kernels and calls of a graph in the order they run.

    `cross_row` says which cross-row reductions may fuse into inner reductions, if any; `with_form`
    sets each kernel's form.
    """
    inline(graph)
    groups = fuse(graph, fuse_kernels, cross_row)
    read_from_memory = _stored_refs(graph, groups)
    steps: list[Step] = []
    for group in groups:
        if group.is_call:
            steps.append(group.nodes[0])  # type: ignore[arg-type]
        elif not any(s == 0 for s in group.dims) or group.axes is not None:
            kernel = _KernelBuilder(group, read_from_memory).build()
            if kernel is not None:
                kernel = partitioned(kernel, cross_row.shares) if cross_row else kernel
                steps.append(kernel if with_form is None else with_form(kernel))
    return Schedule(graph, steps)


def _stored_refs(graph: Graph, groups: Sequence[Group]) -> set[Ref]:
    """Results that must reach memory: read by another group, by a call, or returned."""
    home = {n.out: g for g in groups for n in g.computes()}
    stored = {n.out for n in graph.nodes if isinstance(n, Compute) and n.realize}
    stored |= {r.root for r in refs_in(graph.outputs)}
    for group in groups:
        for node in group.nodes:
            for ref in node.reads():
                current: Ref | None = ref
                while current is not None:
                    if home.get(current) is not group:
                        stored.add(current)
                    current = current.base
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
        self._memo: dict[tuple[Compute, int, bool], Expr] = {}
        self._saved: dict[Compute, None] = {}

    # ---- values -----------------------------------------------------------------------------

    def _value(self, node: Compute, number: int, row: bool) -> Expr:
        """The body of `node` at the current point, loads resolved, for use in pass `number`."""
        key = (node, number, row)
        found = self._memo.get(key)
        if found is None:
            mapping = mapping_of(self.group, node)

            def resolve(item: Load) -> Expr | None:
                return self._read(item, number, row)

            found = self._memo[key] = Rewriter(mapping, resolve)(node.body)
        return found

    def _read(self, item: Load, number: int, row: bool) -> Expr:
        producer = self.members.get(item.ref)
        if producer is None or producer.kind == "scatter":
            return ir.read(item.ref, flatten(item.coords, item.ref.strides))
        early = producer in self.group.rows_only and self.pass_of[producer] == 0
        if self.is_outer and early and producer.kind == "pointwise":
            return ir.opmath(self._value(producer, number, row), item.dtype)
        if producer.kind in ("reduce", "scan") or producer in self.group.rows_only:
            return ir.result(self.names[producer], item.dtype)
        if self.pass_of[producer] < number:
            if self._is_stored(producer) and not self._is_trivial(producer):
                return ir.read(item.ref, self._flat(producer))
            if self._worth_saving(producer):
                self._saved[producer] = None
                return ir.scratch(self.names[producer], item.dtype)
        return ir.opmath(self._value(producer, number, row), item.dtype)

    def _flat(self, node: Compute) -> Index:
        if node.kind == "scatter":
            mapping = mapping_of(self.group, node)
            rewrite = Rewriter(mapping, lambda item: self._read(item, 0, False))
            return flatten([rewrite.index(i) for i in node.target], node.out.strides)
        return flatten(place_of(self.group, node), node.out.strides)

    def _is_stored(self, node: Compute) -> bool:
        return node.out in self.stored

    def _is_trivial(self, node: Compute) -> bool:
        return node.body.op == "const"

    def _worth_saving(self, node: Compute) -> bool:
        size = product(self.group.dims[k] for k in self.group.axes or ())
        if self.is_outer or not isinstance(size, int) or size > MAX_SCRATCH_ROW:
            return False
        value = self._value(node, self.pass_of[node], False)
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
            if n.kind == "reduce" and n not in self.group.cross_row and self._is_stored(n)
        ]
        for node in self._saved:
            save = ScratchStore(
                self.names[node], node.out.dtype, self._value(node, self.pass_of[node], False)
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
        value = self._value(node, self.pass_of[node], True)
        stmts: list[Stmt] = [Let(self.names[node], node.out.dtype, value)]
        if self._is_stored(node):
            named = ir.result(self.names[node], node.out.dtype)
            stmts.append(Store(node.out, self._flat(node), named))
        return stmts

    def _inner(self, node: Compute) -> list[Stmt]:
        number = self.pass_of[node]
        name = self.names[node]
        if node in self.group.cross_row:
            value = ir.opmath(self._value(node, number, False), node.out.dtype)
            return [Store(node.out, self._flat(node), value, node.op)]
        if node.kind == "reduce":
            value = self._value(node, number, False)
            position = None
            if node.op in ("argmax", "argmin"):
                position = self.group.coords[node][node.axes[0]]
            else:
                value = ir.opmath(value, node.out.dtype)
            return [Reduce(name, node.op, value.dtype, value, position)]
        if node.kind == "scan":
            value = ir.opmath(self._value(node, number, False), node.out.dtype)
            named = ir.result(name, node.out.dtype)
            stmts: list[Stmt] = [Scan(name, node.op, node.out.dtype, value)]
            if self._is_stored(node):
                stmts.append(Store(node.out, self._flat(node), named))
            return stmts
        if not self._is_stored(node):
            return []
        value = ir.opmath(self._value(node, number, False), node.out.dtype)
        op = node.op if node.kind == "scatter" and node.op != "store" else ""
        return [Store(node.out, self._flat(node), value, op)]

    # ---- loops ------------------------------------------------------------------------------

    def _loops(self, phases: list[Phase]) -> Kernel:
        group = self.group
        variables = [Var(k, s) for k, s in enumerate(group.dims)]
        axes = group.axes or frozenset()
        parallel = [v for v in variables if v.position not in axes]
        reduction = [v for v in variables if v.position in axes]
        nest = _Nest(phases, parallel, reduction)
        nest.split_by_division()
        scatter = any(n.kind == "scatter" for n in group.computes())
        # argmax and argmin return the first of equal extrema, so their loops keep the order.
        ordered = any(n.kind == "scan" or n.op in ("argmax", "argmin") for n in group.computes())
        nest.order(keep_reduction=ordered)
        nest.merge()
        kind: KernelKind = "outer_reduction" if self.is_outer else "inner_reduction"
        if scatter or not axes:
            kind = "scatter" if scatter else "pointwise"
        origins = {o.node: o for n in group.computes() for o in n.origins}
        return nest.kernel(kind, tuple(origins.values()))


class _Nest:
    """The loops of a kernel while they are split, ordered and merged."""

    def __init__(self, phases: list[Phase], parallel: list[Var], reduction: list[Var]) -> None:
        self.phases = phases
        self.parallel = parallel
        self.reduction = reduction
        self._next = max((v.position for v in parallel + reduction), default=-1) + 1

    def indices(self) -> list[tuple[Index, int]]:
        """The index expressions of every pass, with the bytes that they move per point."""
        found: list[tuple[Index, int]] = []
        for phase in self.phases:
            seen: set[Expr] = set()
            for stmt in phase.stmts:
                if isinstance(stmt, Store):
                    found.append((stmt.index, 2 * stmt.ref.dtype.itemsize))
                    for inner in indirect_exprs(stmt.index):
                        found += self._of(inner, seen)
                if isinstance(stmt, Reduce) and stmt.position is not None:
                    found.append((stmt.position, 0))
                found += self._of(stmt.value, seen)
        return found

    def _of(self, expr: Expr, seen: set[Expr]) -> list[tuple[Index, int]]:
        result = []
        for e in ir.walk(expr, seen):
            weight = e.ref.dtype.itemsize if isinstance(e, (Load, Read)) else 0
            result += [(i, weight) for i in ir.indices_of(e)]
        return result

    def substitute(self, mapping: dict[Var, Index]) -> None:
        rewrite = Rewriter(mapping)
        self.phases = [
            Phase(p.level, tuple(_rewritten(s, rewrite) for s in p.stmts)) for p in self.phases
        ]

    def fresh(self, size: Size) -> Var:
        self._next += 1
        return Var(self._next - 1, size)

    def split_by_division(self) -> None:
        """Split loop v at each v // d or v % d where d divides v's size: v = d * high + low."""
        for _ in range(8):
            found = self._division()
            if found is None:
                return
            var, divisor = found
            outer = quotient(var.size, divisor)
            assert outer is not None
            high, low = self.fresh(outer), self.fresh(divisor)
            self.substitute({var: variable(high) * divisor + variable(low)})
            for loops in (self.parallel, self.reduction):
                if var in loops:
                    at = loops.index(var)
                    loops[at : at + 1] = [high, low]

    def _division(self) -> tuple[Var, Size] | None:
        for index, _ in self.indices():
            for atom in _divisions(index):
                if len(atom.value.terms) != 1 or atom.value.const != 0:
                    continue
                ((var, c),) = atom.value.terms
                if isinstance(var, Var):
                    exact = quotient(var.size, atom.divisor) if c == 1 else None
                    if exact is not None and exact != 1 and atom.divisor != 1:
                        return var, atom.divisor
        return None

    def order(self, keep_reduction: bool) -> None:
        """Put loops with the largest strides outermost."""
        weights = self._weights()
        self.parallel.sort(key=lambda v: weights[v], reverse=True)
        if not keep_reduction:
            self.reduction.sort(key=lambda v: weights[v], reverse=True)

    def _weights(self) -> dict[Var, float]:
        """Sort key of each loop: the order that suits most of the memory traffic.

        The sum over accesses of what `thresholds.py` says of their strides. Ties keep the given
        order.
        """
        total: dict[Var, float] = dict.fromkeys(self.parallel + self.reduction, 0.0)
        stores = [
            (s.index, s.ref.dtype.itemsize)
            for p in self.phases for s in p.stmts if isinstance(s, Store)
        ]  # fmt: skip
        rank = {v: -i * 1e-6 for i, v in enumerate(self.parallel + self.reduction)}
        for index, weight in [*self.indices(), *stores]:
            for var in index.variables():
                c = index.coefficient(var)
                stride = abs(_guess(c))
                if stride == 1:
                    total[var] -= weight * ADJACENT
                elif stride > 1:
                    total[var] += weight * min(stride, MAX_STRIDE) ** STRIDE_POWER
        return {v: total[v] + rank[v] for v in total}

    def merge(self) -> None:
        """Coalesce adjacent loops that every index expression addresses as one loop."""
        for loops in (self.parallel, self.reduction):
            k = 0
            while k + 1 < len(loops):
                outer, inner = loops[k], loops[k + 1]
                if self._mergeable(outer, inner):
                    var = self.fresh(normal(outer.size * inner.size))
                    self.substitute({outer: ZERO, inner: variable(var)})
                    loops[k : k + 2] = [var]
                else:
                    k += 1

    def _mergeable(self, outer: Var, inner: Var) -> bool:
        for index, _ in self.indices():
            hidden = {v for atom in _divisions(index) for v in atom.value.variables()}
            if outer in hidden or inner in hidden:
                return False
            if index.coefficient(outer) != normal(index.coefficient(inner) * inner.size):
                return False
        return True

    def kernel(self, kind: KernelKind, origins: tuple[Origin, ...]) -> Kernel:
        renamed = [Var(k, v.size) for k, v in enumerate([*self.parallel, *self.reduction])]
        old = [*self.parallel, *self.reduction]
        # Two steps, since old and new variables may coincide.
        stand_in = [Var(1000 + k, v.size) for k, v in enumerate(old)]
        self.substitute({o: variable(s) for o, s in zip(old, stand_in, strict=True)})
        self.substitute({s: variable(n) for s, n in zip(stand_in, renamed, strict=True)})
        count = len(self.parallel)
        return Kernel(
            kind, tuple(renamed[:count]), tuple(renamed[count:]), tuple(self.phases), origins
        )


def _guess(value: Size) -> int:
    return value if isinstance(value, int) else GUESS


def _divisions(index: Index) -> Iterable[FloorDiv | Mod]:
    for atom, _ in index.terms:
        if isinstance(atom, (FloorDiv, Mod)):
            yield atom
            yield from _divisions(atom.value)


def _rewritten(stmt: Stmt, rewrite: Rewriter) -> Stmt:
    value = rewrite(stmt.value)
    if isinstance(stmt, Store):
        return replace(stmt, value=value, index=rewrite.index(stmt.index))
    if isinstance(stmt, Reduce) and stmt.position is not None:
        return replace(stmt, value=value, position=rewrite.index(stmt.position))
    return replace(stmt, value=value)


__all__ = ["Schedule", "Step", "schedule"]
