"""Which float16 elements of a loop vector instructions convert, before the loop or after it.

g++ 12 vectorizes conversions of float16 only as integer arithmetic, which takes several times as
long as loading, computing and storing the elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.expr import Convert, Read
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Stmt, Store


def widened(stmts: Sequence[Stmt]) -> list[Access]:
    """The elements that may be read before the loop: those of every point, and not of memory that
    the loop changes elsewhere."""
    stores = [s for s in stmts if isinstance(s, Store)]
    computed = [s for s in stmts if not (isinstance(s, Store) and s.is_move)]
    return [
        (ref, index) for ref, index in unconditional_reads(computed)
        if ref.dtype == torch.float16
        and all((s.ref, s.index) == (ref, index) for s in stores if s.ref.root is ref.root)
    ]  # fmt: skip


def narrowed(stmts: Sequence[Stmt]) -> list[Store]:
    """The stores that may be made after the loop."""
    return [
        s for s in stmts
        if isinstance(s, Store) and s.ref.dtype == torch.float16 and not s.op and not s.is_move
    ]  # fmt: skip


def converted_copies(stmts: Sequence[Stmt], var: Var) -> dict[Store, Read]:
    """The stores that only convert elements of another tensor between float16 and float32: one call
    does a block of them, for the loop over a copy would become a call that copies memory."""
    stored = {s.ref.root for s in stmts if isinstance(s, Store)}
    always = unconditional_reads(stmts)
    found: dict[Store, Read] = {}
    for stmt in stmts:
        if not isinstance(stmt, Store) or stmt.op or not is_along(stmt.index, var):
            continue
        source = stmt.value.args[0] if isinstance(stmt.value, Convert) else stmt.value
        if (
            isinstance(source, Read)
            and {source.ref.dtype, stmt.ref.dtype} == {torch.float16, torch.float32}
            and is_along(source.index, var)
            and source.ref.root not in stored
            and (source.ref, source.index) in always
        ):
            found[stmt] = source
    return found
