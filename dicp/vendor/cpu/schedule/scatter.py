"""The form of kernels whose stores may collide: what keeps threads apart.

In: a scatter. Out: `Points`, `ByDestination` or `Scattered`.
"""

from __future__ import annotations

import torch

from dicp.dtypes import REDUCED_FLOATS
from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import is_along
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import Index, Indirect, Var, is_below
from dicp.loop.ir.kernel import Kernel, Store
from dicp.vendor.cpu import form
from dicp.vendor.cpu.form import HostForm
from dicp.vendor.cpu.schedule.chooser import Chooser
from dicp.vendor.cpu.thresholds import (
    MAX_DESTINATIONS_PER_ROW,
    MIN_DESTINATIONS,
    MIN_OWNED,
    MIN_SORTED_ROW,
    PARALLEL_COST,
    ROWS_AT_ONCE,
)


class Scatter(Chooser):
    """Chooses how threads divide stores that may collide."""

    def choose(self) -> HostForm:
        rows = self.kernel.parallel
        if not rows:
            return form.Points()
        by_destination = self.by_destination()
        if by_destination is not None:
            return by_destination
        last, stores = rows[-1], self.kernel.stores()
        distinct = last.size != 1 and all(is_along(s.index, last) for s in stores)
        owned = distinct and not (isinstance(last.size, int) and last.size < 2 * MIN_OWNED)
        apart = not owned and len(rows) > 1 and rows_apart(self.kernel)
        return form.Scattered(self.team(rows) if owned or apart else None, distinct, owned)

    def by_destination(self, always: bool = False) -> form.ByDestination | None:
        """The form of sums of whole rows into indexed rows; None for others, and where sorting rows
        does not pay, unless it is done `always`."""
        destination = self._destination(always)
        if destination is None:
            return None
        store, place = destination
        return form.ByDestination(store=store, place=place, rows_at_once=ROWS_AT_ONCE)

    def _destination(self, always: bool) -> tuple[Store, Indirect] | None:
        """The store and its index, if the kernel only sums whole rows into indexed rows."""
        rows, stmts = self.kernel.parallel, self.kernel.stmts()
        store = stmts[0]
        if len(rows) != 2 or len(stmts) != 1 or not isinstance(store, Store) or store.op != "sum":
            return None
        found = self._indexed_row(store, rows[-1])
        if found is None or not (always or _enough_places(found, *rows)):
            return None
        return store, found

    def _indexed_row(self, store: Store, last: Var) -> Indirect | None:
        """The index of the row that `store` adds to; None where it does not add whole rows."""
        dtype = store.ref.dtype
        if dtype in REDUCED_FLOATS or dtype == torch.bool or not isinstance(last.size, int):
            return None
        reads = {e.ref.root for e in ir.walk(store.value) if isinstance(e, Read)}
        others = store.index.without(last).terms
        if store.ref.root in reads or len(others) != 1 or not is_along(store.index, last):
            return None
        ((found, step),) = others
        whole = isinstance(step, int) and step >= last.size
        return found if isinstance(found, Indirect) and whole else None


def _enough_places(place: Indirect, row: Var, last: Var) -> bool:
    """Whether sorting the rows by destination costs less than the collisions."""
    assert isinstance(last.size, int)
    if last.size < MIN_SORTED_ROW or (
        isinstance(place.size, int) and place.size < MIN_DESTINATIONS
    ):
        return False
    if not isinstance(row.size, int):
        return True
    few = isinstance(place.size, int) and row.size * MAX_DESTINATIONS_PER_ROW < place.size
    return row.size * last.size >= PARALLEL_COST and not few


def rows_apart(kernel: Kernel) -> bool:
    """Whether each iteration of a scatter's first loop stores to a block of memory of its own."""
    return all(_is_injective(s.index, kernel.parallel[0]) for s in kernel.stores())


def _is_injective(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` store to distinct blocks of memory, for any index values."""
    return is_below(index.without(var), index.coefficient(var))
