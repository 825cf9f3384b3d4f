"""Scatters whose buffer needs no zeros before: their kernel writes every element of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dicp.loop.ir.expr import Ref, is_zero
from dicp.loop.ir.graph import Call
from dicp.loop.ir.index import product
from dicp.loop.ir.kernel import Kernel
from dicp.vendor.cpu.form import ByDestination


def written_completely(kernel: Kernel, form: ByDestination) -> Ref | None:
    """The buffer that a sum by destination covers completely, row by row, or None."""
    store, place, last = form.store, form.place, kernel.parallel[-1]
    whole = product([place.size, last.size]) == product(store.ref.root.shape)
    step = store.index.coefficient(place)
    return store.ref.root if whole and step == last.size and store.index.const == 0 else None


def without_zeros(steps: Sequence[Kernel | Call]) -> list[Kernel | Call]:
    """The steps without zero fills of buffers that a sum by destination then writes completely."""
    kept = list(steps)
    for at, step in enumerate(steps):
        buffer = None
        if isinstance(step, Kernel) and isinstance(step.form, ByDestination):
            buffer = written_completely(step, step.form)
        earlier = [k for k in range(at) if buffer is not None and buffer in buffers_of(kept[k])]
        if len(earlier) != 1 or not isinstance(step, Kernel):
            continue
        (place,) = earlier
        rest = without_zeros_of(kept[place], buffer)
        if rest is not None:
            kept[place], kept[at] = rest, replace(step, fresh=True)
    return [s for s in kept if not isinstance(s, Kernel) or any(p.stmts for p in s.phases)]


def buffers_of(step: Kernel | Call) -> set[Ref]:
    """The memory that a step reads or writes."""
    return step.read_buffers() | step.written_buffers()


def without_zeros_of(step: Kernel | Call, buffer: Ref | None) -> Kernel | None:
    """The kernel without its single store, of zeros, to all of `buffer`; None if it has none."""
    if not isinstance(step, Kernel) or step.kind != "pointwise":
        return None
    stores = step.stores()
    zeros = [s for s in stores if s.ref.root is buffer and not s.op and is_zero(s.value)]
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
