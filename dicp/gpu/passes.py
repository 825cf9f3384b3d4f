"""What the passes of a reduction wait for, and what they keep in the cache.

In: a kernel's phases. Out: values of its form (`dicp.gpu.form`, `dicp.gpu.threads`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Named, Read, Ref
from dicp.loop.ir.index import Index, indirect_exprs
from dicp.loop.ir.kernel import Kernel, Phase, Reduce, ScratchStore, Stmt, Store
from dicp.loop.schedule.form import online_softmax

Hints: TypeAlias = Mapping[Read, Literal["first", "last"]]
"""Loads of a pass, and whether the cache drops what they load first or last."""


def executed(phase: Phase) -> tuple[Stmt, ...]:
    """The statements of a phase that run where scratch values are rematerialized when read."""
    return tuple(s for s in phase.stmts if not isinstance(s, ScratchStore))


def exprs_of(stmts: Iterable[Stmt], kernel: Kernel) -> list[Expr]:
    """What `stmts` compute, the scratch values that they read included."""
    saves = {s.name: s.value for s in kernel.stmts() if isinstance(s, ScratchStore)}
    seen: set[Expr] = set()
    used = [e for s in stmts for e in ir.walk(s.value, seen)]
    for name in {e.name for e in used if isinstance(e, Named) and e.op == "scratch"}:
        used += ir.walk(saves[name], seen)
    return used


def buffers_read(exprs: Iterable[Expr]) -> set[Ref]:
    """The buffers whose memory the expressions read."""
    return {e.ref.root for e in exprs if isinstance(e, Read)}


def barriers(kernel: Kernel, passes: Sequence[Sequence[Stmt]]) -> frozenset[int]:
    """The phases before which the threads of a block wait for each other: they read elements that
    another thread may have stored. `passes` are the statements of each phase that run in it."""
    stored: set[Ref] = set()
    found: set[int] = set()
    for position, stmts in enumerate(passes):
        if stored and buffers_read(exprs_of(stmts, kernel)) & stored:
            found.add(position)
            stored.clear()
        stored |= {s.ref.root for s in stmts if isinstance(s, Store) and not s.op}
    return frozenset(found)


def online_pairs(passes: Sequence[Sequence[Stmt]]) -> tuple[tuple[int, Reduce, Reduce], ...]:
    """Online softmax: the phase of a maximum, the maximum, and the next phase's sum."""
    pairs = [online_softmax(first, second) for first, second in pairwise(passes)]
    return tuple((k, *pair) for k, pair in enumerate(pairs) if pair is not None)


def cache_hints(
    kernel: Kernel, passes: Sequence[Sequence[Stmt]], online: Collection[int] = ()
) -> dict[int, Hints]:
    """The hints of each pass: the cache keeps what a later pass reads again and what all rows read,
    and not what is read once. None in kernels with one pass.

    A pass in `online` is one with the next.
    """
    whole = [k for k, p in enumerate(kernel.phases) if p.level == "reduction" and passes[k]]
    if len(whole) < 2:
        return {}
    used = [exprs_of(stmts, kernel) for stmts in passes]
    read = [buffers_read(exprs) for exprs in used]
    hints: dict[int, Hints] = {}
    for position in whole:
        after = position + (2 if position in online else 1)
        later = set[Ref]().union(*read[after:])
        hints[position] = {
            e: "last" if e.ref.root in later or not _varies(e.index, kernel) else "first"
            for e in used[position] if isinstance(e, Read)
        }  # fmt: skip
    return hints


def _varies(index: Index, kernel: Kernel) -> bool:
    """Whether the element differs from row to row."""
    if index.variables() & set(kernel.parallel):
        return True
    inner = [e for x in indirect_exprs(index) for e in ir.walk(x)]
    named = any(isinstance(e, Named) for e in inner)
    return named or any(_varies(i, kernel) for e in inner for i in ir.indices_of(e))
