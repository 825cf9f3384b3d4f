"""Chooses the form of each kernel on the host, by the thresholds of this room.

In: a kernel of the loop IR's schedule. Out: the same kernel with its form, which renderers print.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from dicp.loop.ir.expr import Expr, Masked, Rewriter, walk
from dicp.loop.ir.index import Index, Var, normal, variable
from dicp.loop.ir.kernel import Kernel, Stmt, Variant, rewritten
from dicp.loop.passes.inline import operation_cost
from dicp.loop.passes.one_hot import without_one_hot_sums
from dicp.loop.passes.split_loops import split
from dicp.loop.schedule.form import exp_weights
from dicp.loop.thresholds import HEAVY
from dicp.vendor.cpu.form import Columns, HostForm, Points
from dicp.vendor.cpu.schedule.chooser import CONVERTED, Chooser
from dicp.vendor.cpu.schedule.inner_reduction import Inner
from dicp.vendor.cpu.schedule.outer_reduction import Outer
from dicp.vendor.cpu.schedule.pointwise import Pointwise
from dicp.vendor.cpu.schedule.scatter import Scatter
from dicp.vendor.cpu.thresholds import (
    MAX_INTERLEAVED,
    MAX_PEELED,
    MIN_HIDDEN_STEP,
    STACK_BYTES,
)


def with_form(kernel: Kernel, non_temporal_bytes: float = math.inf) -> Kernel:
    """The kernel with its form; results of `non_temporal_bytes` and more are not kept in caches."""
    kernel = _unrolled(without_one_hot_sums(kernel))
    interleaved = _interleaved_differences(kernel)
    kernel = _jammed(kernel)
    choosers: dict[str, type[Chooser]] = {
        "pointwise": Pointwise, "inner_reduction": Inner, "outer_reduction": Outer,
        "scatter": Scatter,
    }  # fmt: skip
    chosen = choosers[kernel.kind](kernel, non_temporal_bytes).choose()
    rows, steps = _has_short_masked_rows(kernel, chosen), _hidden_steps(kernel, chosen)
    chosen = replace(
        chosen, scalar_rows=rows, hidden=steps, stack_bytes=STACK_BYTES, converted=CONVERTED
    )
    return replace(kernel, form=chosen, variants={**exp_weights(kernel), **interleaved})


def _unrolled(kernel: Kernel) -> Kernel:
    """The kernel without its last loop, if that loop's few iterations do not all compute the same,
    as the real and imaginary parts of products: the loop around it is vectorized then."""
    if kernel.kind != "pointwise" or len(kernel.parallel) < 2:
        return kernel
    *outer, last = kernel.parallel
    if not isinstance(last.size, int) or not 1 < last.size <= MAX_INTERLEAVED:
        return kernel
    parts = split(kernel.stmts(), last)
    if len(parts) == 1:
        return kernel
    stmts: list[Stmt] = []
    for part in parts:
        for k in range(part.low, part.high):
            stmts += _substituted(part.stmts, last, Index(k))
    return _with_loops(kernel, outer, stmts)


def _jammed(kernel: Kernel) -> Kernel:
    """The kernel with the equal ranges of a loop jammed into one, if these compute an elementary
    function of the same value, as the halves of the gradient of a gated unit do."""
    if kernel.kind != "pointwise" or not _elementary_functions(kernel.stmts()):
        return kernel
    for var in kernel.parallel:
        ranges = split(kernel.stmts(), var)
        extents = {normal(each.high - each.low) for each in ranges}
        if len(ranges) == 1 or len(extents) > 1:
            continue
        jammed = Var(var.position, extents.pop())
        parts = [_substituted(each.stmts, var, variable(jammed) + each.low) for each in ranges]
        if set.intersection(*map(_elementary_functions, parts)):
            loops = [jammed if v is var else v for v in kernel.parallel]
            return _with_loops(kernel, loops, [s for part in parts for s in part])
    return kernel


def _substituted(stmts: Iterable[Stmt], var: Var, index: Index) -> list[Stmt]:
    """The statements with `index` in the place of a loop's variable."""
    rewrite = Rewriter({var: index})
    return [rewritten(s, rewrite, rewrite.index) for s in stmts]


def _with_loops(kernel: Kernel, loops: Iterable[Var], stmts: Iterable[Stmt]) -> Kernel:
    """A kernel of one phase with other loops and statements."""
    phase = replace(kernel.phases[0], stmts=tuple(stmts))
    return replace(kernel, parallel=tuple(loops), phases=(phase,))


def _elementary_functions(stmts: Iterable[Stmt]) -> set[Expr]:
    """The values that a polynomial or more computes."""
    seen: set[Expr] = set()
    return {e for s in stmts for e in walk(s.value, seen) if operation_cost(e) >= HEAVY}


def _interleaved_differences(kernel: Kernel) -> dict[Expr, Variant]:
    """The differences of a kernel that stores several elements of a tensor in an iteration.

    g++ 12 contracts alternating differences and sums of products into FMA, though
    -ffp-contract=off forbids it: the imaginary part of a number times its conjugate is then a
    rounding error and not 0. It takes x + -y for a difference unless bits are flipped.
    """
    stores = Counter(s.ref.root for s in kernel.stores())
    if max(stores.values(), default=0) < 2:
        return {}
    seen: set[Expr] = set()
    found = (e for x in kernel.exprs() for e in walk(x, seen) if e.dtype.is_floating_point)
    return {e: Variant(f"{e.op}_by_bits") for e in found if e.op in ("sub", "neg")}


def _hidden_steps(kernel: Kernel, form: HostForm) -> frozenset[tuple[Var, int]]:
    """The large steps of vectorized loops by which a tensor is accessed at several places.

    g++ 12 takes the places for a group that fills the step, and shuffles all of it: it compiled two
    reads 4096 elements apart for 70 s. Rows that are jammed or unrolled are several places, too.
    """
    places = {(item.ref.root, item.index) for item in kernel.reads()}
    places |= {(s.ref.root, s.index) for s in kernel.stores()}
    loops = (*kernel.parallel[-1:], *kernel.reduction[-1:])
    found = Counter(
        (ref, loop, step)
        for ref, index in places
        for loop in loops
        if isinstance(step := index.coefficient(loop), int) and abs(step) >= MIN_HIDDEN_STEP
    )
    jammed = kernel.parallel[-1] if isinstance(form, Columns) else None
    return frozenset((v, step) for (_, v, step), n in found.items() if n > 1 or v is jammed)


def _has_short_masked_rows(kernel: Kernel, form: HostForm) -> bool:
    """Whether g++ may unroll the inner loops, vectorize the outer one, and permute masked loads.

    g++ 12 leaves out the permutation: `a[2 * i] = x[2 * i + 1], a[2 * i + 1] = x[2 * i]` with
    loads that are executed where a condition holds becomes a copy.
    """
    inner = [*kernel.parallel[1:], *kernel.reduction]
    short = any(isinstance(loop.size, int) and loop.size <= MAX_PEELED for loop in inner)
    parts = isinstance(form, Points) and len(form.strips) > 1
    values = (value for expr in kernel.exprs() for value in walk(expr))
    return bool(inner) and (short or parts) and any(isinstance(v, Masked) for v in values)
