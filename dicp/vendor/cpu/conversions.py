"""Which float16 elements of a loop vector instructions convert, before the loop or after it.

g++ 12 vectorizes conversions of float16 only as integer arithmetic, which takes several times as
long as loading, computing and storing the elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.loop.ir.access import Access, unconditional_reads
from dicp.loop.ir.kernel import Stmt, Store


def widened(stmts: Sequence[Stmt]) -> list[Access]:
    """The elements that may be read before the loop: those of every point, and not of memory that
    the loop changes elsewhere."""
    stores = [s for s in stmts if isinstance(s, Store)]
    computed = [s for s in stmts if not (isinstance(s, Store) and s.is_copy)]
    return [
        (ref, index) for ref, index in unconditional_reads(computed)
        if ref.dtype == torch.float16
        and all((s.ref, s.index) == (ref, index) for s in stores if s.ref.root is ref.root)
    ]  # fmt: skip


def narrowed(stmts: Sequence[Stmt]) -> list[Store]:
    """The stores that may be made after the loop."""
    return [
        s for s in stmts
        if isinstance(s, Store) and s.ref.dtype == torch.float16 and not s.op and not s.is_copy
    ]  # fmt: skip
