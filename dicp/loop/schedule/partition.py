"""Sums over rows that do not split evenly: the rows are partitioned among programs.

sum over r of f(r, w) = sum over p of (sum over the rows r of part p of f(r, w))

Each program loops over one part of the rows, the last programs over fewer or none; another kernel
adds up their partial sums. The number of parts is fixed, so that any number of rows works, and it
may be dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, product, variable
from dicp.loop.ir.kernel import Kernel, Partition
from dicp.torch_private import floor_division


def chunk_of(size: Size, parts: int) -> Size:
    """Elements per part: `size` / `parts`, rounded up."""
    more = size + parts - 1
    return more // parts if isinstance(more, int) else floor_division(more, parts)


def partitioned(kernel: Kernel, parts: Mapping[Ref, int]) -> Kernel:
    """The kernel, its rows partitioned if it computes sums of `parts`: result -> number of parts.

    Such sums have room for one partial result per part. They all are sums of the same rows.
    """
    sums = [s for s in kernel.stores() if s.ref in parts]
    if not sums:
        return kernel
    count = parts[sums[0].ref]
    rows, kept = kernel.parallel, kernel.reduction
    if not sums[0].op:  # no other reduction runs along these rows
        rows, kept = kept, rows
    assert all(parts[s.ref] == count and s.op == sums[0].op for s in sums)
    part = kernel.new_variable(count)
    moved = variable(part) * product(v.size for v in kept)
    own = {id(s): replace(s, index=s.index + moved) for s in sums}
    phases = tuple(
        replace(p, stmts=tuple(own.get(id(s), s) for s in p.stmts)) for p in kernel.phases
    )
    partition = Partition(part, chunk_of(product(v.size for v in rows), count))
    return replace(kernel, phases=phases, partition=partition)
