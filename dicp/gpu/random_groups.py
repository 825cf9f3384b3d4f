"""Random numbers in a kernel: neighbours share a call of the generator, which gives four words."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr
from dicp.loop.ir.index import Index, Var, quotient
from dicp.loop.ir.kernel import Kernel, Store
from dicp.loop.ir.ops import float32

NEIGHBOURS = {
    ("philox_uniform", torch.float32): 4,
    ("philox_normal", torch.float32): 4,
    ("philox_uniform", torch.float64): 2,
    ("philox_bits", torch.int64): 2,
    ("philox_normal", torch.float64): 1,
}
"""Elements that share a call, by operator and type."""
WORD = 32
UNIT = 24
"""Bits of a word, and those of them that a uniform number keeps."""
WIDEST = 16
"""Bytes that a thread writes at a time."""


def split(index: Index, neighbours: int) -> tuple[Index, Var] | None:
    """`index` as neighbours * block + v, if one loop v alone moves among neighbours.

    A thread holds neighbours side by side. That v // neighbours is the same for them the compiler
    sees; of a sum that has v in it, it does not.
    """
    blocks = [(atom, quotient(c, neighbours)) for atom, c in index.terms]
    rest = [atom for atom, block in blocks if block is None]
    const = quotient(index.const, neighbours)
    if const is None or len(rest) != 1 or index.coefficient(rest[0]) != 1:
        return None
    if not isinstance(rest[0], Var):
        return None
    return Index(const, tuple((atom, b) for atom, b in blocks if b is not None)), rest[0]


def threshold(expr: Expr) -> int | None:
    """The smallest word of which `expr`, a uniform number beside a constant, is not below it."""
    if expr.op not in ("ge", "lt") or expr.args[0].op != "philox_uniform":
        return None
    number, limit = expr.args
    if number.dtype != torch.float32 or limit.op != "const":
        return None
    steps = math.ceil(float32(limit.attr) * 2**UNIT)
    return steps << (WORD - UNIT) if 0 <= steps < 2**UNIT else None


def _stores(kernel: Kernel) -> Iterator[Store]:
    return (s for p in kernel.phases for s in p.stmts if isinstance(s, Store))


def most_side_by_side(kernel: Kernel) -> int | None:
    """How many elements a thread may store side by side, where random numbers are drawn.

    Each store lays its elements out for itself, a vector for each thread, and what is laid out
    twice is drawn twice: the widest elements decide for all.
    """
    seen: set[int] = set()
    if not any(e.op.startswith("philox") for x in kernel.exprs() for e in ir.walk(x, seen)):
        return None
    last = [*kernel.parallel, *kernel.reduction][-1:]
    moved = [s.ref for s in _stores(kernel) if s.index.variables().issuperset(last)]
    moved += [r.ref for r in kernel.reads() if r.coords[0].variables().issuperset(last)]
    return WIDEST // max((ref.dtype.itemsize for ref in moved), default=1)
