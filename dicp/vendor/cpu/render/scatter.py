"""C++ of scatters, whose stores may collide: threads divide rows by destination, or columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from dicp.codegen.emitter import margin
from dicp.codegen.types import VALUE_TYPE
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Call, Const, Expr, Read, Ref
from dicp.loop.ir.index import Index, Indirect, Var, indirect_exprs, is_below, product
from dicp.loop.ir.kernel import Kernel, Store
from dicp.vendor.cpu.render.loops import CHUNKS, Team
from dicp.vendor.cpu.render.non_temporal import deep_variables
from dicp.vendor.cpu.render.pointwise import Pointwise
from dicp.vendor.cpu.thresholds import MIN_PLACES, MIN_SHARE, MIN_WIDTH, PARALLEL_COST, TOGETHER


class Scatter(Pointwise):
    """Stores that may collide: sums of whole rows run in the order of their destinations. Other
    scatters run on threads that each own a range of the last axis, or of the first where its
    stores do not overlap, else on one thread."""

    def lines(self) -> list[str]:
        rows = self.kernel.parallel
        if not rows:
            return super().lines()
        destination = self._destination()
        if destination is not None:
            return self._by_destination(destination)
        last = rows[-1]
        stores = [s for s in self._all_stmts() if isinstance(s, Store)]
        owned = last.size != 1 and all(_owns(s.index, last) for s in stores)
        apart = not owned and len(rows) > 1 and all(_keeps_apart(s.index, rows[0]) for s in stores)
        scope = self._push(rows[:-1], 2 + len(rows[:-1]) if owned else 1 + len(rows[:-1]))
        body = self._push((last,), scope.indent + 1)
        self._stmts(self._all_stmts(), body)
        bounds = ("low", "high") if owned else None
        pragma = [f"{margin(scope.indent)}#pragma omp simd"] if owned else []
        inner = [*scope.lines, *pragma, *self._loop(last, body, scope.indent, bounds)]
        lines: list[str] = []
        base = 1
        if owned:
            size = self._size(last.size)
            base = 2
            lines = [
                f"  for (int64_t chunk = 0; chunk < d_strips({size}); ++chunk) {{",
                f"    const int64_t low = chunk * {size} / d_strips({size}), "
                f"high = (chunk + 1) * {size} / d_strips({size});",
            ]
        for depth, var in enumerate(rows[:-1]):
            lines.append(f"{margin(base + depth)}{self._for(var)} {{")
        lines += inner
        lines += [f"{margin(base + depth)}}}" for depth in reversed(range(len(rows) - 1))]
        lines += ["  }"] if owned else []
        return self._divided(self._team(rows) if owned or apart else None, lines)

    def _destination(self) -> tuple[Store, Indirect] | None:
        """The store and its index, if the kernel only sums whole rows into indexed rows."""
        rows, stmts = self.kernel.parallel, self._all_stmts()
        store = stmts[0]
        if len(rows) != 2 or len(stmts) != 1 or not isinstance(store, Store) or store.op != "sum":
            return None
        (row, last), dtype = rows, store.ref.dtype
        if dtype in ir.LOW_PRECISION or dtype == torch.bool or not isinstance(last.size, int):
            return None
        reads = {e.ref.root for e in ir.walk(store.value) if isinstance(e, Read)}
        others = [(a, c) for a, c in store.index.terms if a != last]
        if store.ref.root in reads or len(others) != 1 or not _owns(store.index, last):
            return None
        ((found, step),) = others
        if not isinstance(found, Indirect) or not isinstance(step, int) or step < last.size:
            return None
        if last.size < MIN_WIDTH or (isinstance(found.size, int) and found.size < MIN_PLACES):
            return None
        if isinstance(row.size, int):
            if row.size * last.size < PARALLEL_COST:
                return None
            if isinstance(found.size, int) and row.size * MIN_SHARE < found.size:
                return None
        return store, found

    def _by_destination(self, found: tuple[Store, Indirect]) -> list[str]:
        """A counting sort of the rows by destination; threads then sum each destination's rows."""
        store, place = found
        row, last = self.kernel.parallel
        rows, places = self._size(row.size), self._size(place.size)
        head = self._push((row,), 2)
        at = self.value(place.expr)
        self._pop(head)
        lines = [
            "  " + self._allocated("int64_t", "first", f"{places} + 1"),
            "  " + self._allocated("int64_t", "listed", rows),
            "  " + self._allocated("int64_t", "places", rows),
            f"  for (int64_t place = 0; place <= {places}; ++place) first[place] = 0;",
            f"  {self._for(row)} {{", *head.lines,
            f"    places[{row.key}] = {at};", f"    ++first[{at}];", "  }",
            f"  for (int64_t place = 1; place <= {places}; ++place)",
            "    first[place] += first[place - 1];",
            f"  for (int64_t row = {rows}; row-- > 0;) listed[--first[places[row]]] = row;",
            f"  {Team().loop()}",
            f"  for (int64_t part = 0; part < {CHUNKS}; ++part) {{",
            f"  const int64_t all = {rows} + {places};",
            f"  const int64_t low = d_share(first, {places}, part * all / {CHUNKS});",
            f"  const int64_t high = d_share(first, {places}, (part + 1) * all / {CHUNKS});",
            "  for (int64_t place = low; place < high; ++place) {",
            "    int64_t next = first[place];",
            "    const int64_t end = first[place + 1];",
        ]  # fmt: skip
        if self.kernel.fresh:
            lines.append("    bool begun = false;")
        for count in TOGETHER:
            lines += self._added_together(store, place, count)
        if self.kernel.fresh:
            target = self._at_place(store, place)
            lines.append(f"    if (!begun) {self._for(last)} {target} = 0;")
        return [*lines, "  }", "  }"]

    def _added_together(self, store: Store, place: Indirect, count: int) -> list[str]:
        row, last = self.kernel.parallel
        target, ctype = self._at_place(store, place), VALUE_TYPE[store.ref.dtype]
        old = f"begun ? {target} : 0" if self.kernel.fresh else target
        outer = self._push((row,), 5)
        body = self._push((last,), 5)
        value = self.value(store.value)
        self._pop(body)
        self._pop(outer)
        lines = [
            f"    {'while' if count == TOGETHER[0] else 'if'} (next + {count} <= end) {{",
            "      #pragma omp simd", f"      {self._for(last)} {{",
            f"        {ctype} sum = {old};",
        ]  # fmt: skip
        for k in range(count):
            lines += [
                "        {", f"{margin(5)}const int64_t {row.key} = listed[next + {k}];",
                *outer.lines, *body.lines, f"{margin(5)}sum = sum + {value};", "        }",
            ]  # fmt: skip
        begun = ["      begun = true;"] if self.kernel.fresh else []
        lines += [f"        {target} = sum;", "      }", f"      next += {count};", *begun, "    }"]
        return lines

    def _at_place(self, store: Store, place: Indirect) -> str:
        terms = tuple((a, c) for a, c in store.index.terms if a != place)
        step = dict(store.index.terms)[place]
        index = f"{self._size(step)} * place + {self._index(Index(store.index.const, terms))}"
        return f"{self._arg(store.ref)}[{index}]"

    def writes_all(self) -> Ref | None:
        """The buffer that a sum by destination covers completely, or None."""
        found = self._destination() if self.kernel.parallel else None
        if found is None:
            return None
        (store, place), last = found, self.kernel.parallel[-1]
        whole = product([place.size, last.size]) == product(store.ref.root.shape)
        step = dict(store.index.terms)[place]
        return store.ref.root if whole and step == last.size and store.index.const == 0 else None


def without_zeros(steps: Sequence[Kernel | Call]) -> list[Kernel | Call]:
    """The steps without zero fills of buffers that a sum by destination then writes completely."""
    kept = list(steps)
    for at, step in enumerate(steps):
        buffer = None
        if isinstance(step, Kernel) and step.kind == "scatter":
            buffer = Scatter(step).writes_all()
        earlier = [k for k in range(at) if buffer is not None and buffer in _buffers(kept[k])]
        if len(earlier) != 1 or not isinstance(step, Kernel):
            continue
        (place,) = earlier
        rest = _without_zeros_of(kept[place], buffer)
        if rest is not None:
            kept[place], kept[at] = rest, replace(step, fresh=True)
    return [s for s in kept if not isinstance(s, Kernel) or any(p.stmts for p in s.phases)]


def _buffers(step: Kernel | Call) -> set[Ref]:
    if not isinstance(step, Kernel):
        return {r.root for r in ir.refs_in((step.args, step.kwargs, step.outs))}
    stores = [s for p in step.phases for s in p.stmts if isinstance(s, Store)]
    places = [e for s in stores for e in indirect_exprs(s.index)]
    found = [*ir.reads(places), *step.reads()]
    return {item.ref.root for item in found} | {s.ref.root for s in stores}


def _without_zeros_of(step: Kernel | Call, buffer: Ref | None) -> Kernel | None:
    """The kernel without its single store, of zeros, to all of `buffer`; None if it has none."""
    if not isinstance(step, Kernel) or step.kind != "pointwise":
        return None
    stores = [s for p in step.phases for s in p.stmts if isinstance(s, Store)]
    zeros = [s for s in stores if s.ref.root is buffer and not s.op and _is_zero(s.value)]
    reads = {item.ref.root for item in step.reads()}
    if len(zeros) != 1 or buffer in reads or sum(s.ref.root is buffer for s in stores) != 1:
        return None
    written = product(v.size for v in zeros[0].index.variables())
    if written != product(zeros[0].ref.root.shape):
        return None
    phases = tuple(
        replace(p, stmts=tuple(s for s in p.stmts if s is not zeros[0])) for p in step.phases
    )
    return replace(step, phases=phases)


def _is_zero(value: Expr) -> bool:
    return isinstance(value, Const) and value.value == 0 and math.copysign(1, value.value) > 0


def _keeps_apart(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` store to distinct blocks of memory, for any index values."""
    step = index.coefficient(var)
    rest = Index(index.const, tuple(t for t in index.terms if t[0] != var))
    return is_below(rest, step)


def _owns(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` always store to distinct places of the last axis."""
    hidden = any(
        var in deep_variables(atom) for atom, _ in index.terms if not isinstance(atom, Var)
    )
    return index.coefficient(var) == 1 and not hidden
