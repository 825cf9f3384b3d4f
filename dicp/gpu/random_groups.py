"""Random numbers in a kernel: adjacent elements share one Philox call, which gives four words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dicp.gpu.thresholds import ACCESS_BYTES
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Const, Expr
from dicp.loop.ir.index import Index, Var, quotient
from dicp.loop.ir.kernel import Kernel, Store, Variant
from dicp.loop.ir.ops import float32

WORD = 32
UNIT = 24
"""Bits of a word (WORD), and the number of them that a uniform number keeps (UNIT)."""


def split(index: Index, neighbours: int) -> tuple[Index, Var] | None:
    """(block, v) such that `index` is neighbours * block + v for a single loop v; None if not.

    A thread holds adjacent elements. The compiler sees that v // neighbours is the same for them,
    which it does not see for the quotient of a sum that contains v.
    """
    blocks = [(atom, quotient(c, neighbours)) for atom, c in index.terms]
    rest = [atom for atom, block in blocks if block is None]
    const = quotient(index.const, neighbours)
    if const is None or len(rest) != 1 or index.coefficient(rest[0]) != 1:
        return None
    if not isinstance(rest[0], Var):
        return None
    return Index(const, tuple((atom, b) for atom, b in blocks if b is not None)), rest[0]


def words(kernel: Kernel) -> dict[Expr, Variant]:
    """Comparisons of a uniform number with a constant: "word" compares its bits with `number`."""
    seen: set[Expr] = set()
    found = {e: threshold(e) for x in kernel.exprs() for e in ir.walk(x, seen)}
    return {e: Variant("word", least) for e, least in found.items() if least is not None}


def threshold(expr: Expr) -> int | None:
    """For `uniform >= c` or `uniform < c`, the smallest word whose number is not below c.

    None for other expressions and for c outside [0, 1).
    """
    if expr.op not in ("ge", "lt") or expr.args[0].op != "philox_uniform":
        return None
    number, limit = expr.args
    if number.dtype != torch.float32 or not isinstance(limit, Const):
        return None
    steps = math.ceil(float32(limit.value) * 2**UNIT)
    return steps << (WORD - UNIT) if 0 <= steps < 2**UNIT else None


def limited_stores(kernel: Kernel, inner: Sequence[Var]) -> dict[Store, int]:
    """Stores along the loops `inner`, and the most adjacent elements that a thread may store.

    Of kernels with random numbers alone. The compiler chooses a layout per store, one vector per
    thread, and computes a random number once per layout. So the widest element type sets the vector
    length of all stores.
    """
    seen: set[Expr] = set()
    if not any(e.op.startswith("philox") for x in kernel.exprs() for e in ir.walk(x, seen)):
        return {}
    last = [*kernel.parallel, *kernel.reduction][-1:]
    moved = [s.ref for s in kernel.stores() if s.index.variables().issuperset(last)]
    moved += [r.ref for r in kernel.reads() if r.index.variables().issuperset(last)]
    most = ACCESS_BYTES // max((ref.dtype.itemsize for ref in moved), default=1)
    stores = [s for s in kernel.stores() if not s.op and s.ref.dtype.itemsize * most < ACCESS_BYTES]
    adjacent = len(inner) == 1
    return {s: most for s in stores if adjacent and s.index.coefficient(inner[0]) == 1}
