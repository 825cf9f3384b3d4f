"""What decides a kernel's form on every target: loops that cross in memory, online softmax, work.

A target's own form chooser, a `FormChooser`, asks these questions and adds its thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Const, Expr, Named
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Kernel, Reduce, Stmt, Store, Variant
from dicp.loop.ir.ops import SCALAR_OPS

FormChooser = Callable[[Kernel], Kernel]
"""Returns the kernel with its form, and with the rewrites that the form needs."""


def memory_indices(kernel: Kernel) -> list[Index]:
    """The indices of all reads and stores."""
    return [item.index for item in kernel.reads()] + [s.index for s in kernel.stores()]


def crossing_loop(kernel: Kernel, least: int = 0, assumed: int = 0) -> Var | None:
    """The outer loop along which some tensor is contiguous while the last loop strides it.

    Both have at least `least` points; a dynamic size counts as `assumed`.
    """
    last = kernel.parallel[-1]
    for index in memory_indices(kernel):
        for var in kernel.parallel[:-1]:
            if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                sizes = (v.size if isinstance(v.size, int) else assumed for v in (var, last))
                if all(size >= least for size in sizes):
                    return var
    return None


def online_softmax(maxima: Sequence[Stmt], sums: Sequence[Stmt]) -> tuple[Reduce, Reduce] | None:
    """max(x) and, in the next pass, sum(exp(x - max)): online softmax needs one pass for both.

    A sum so far is rescaled by exp(old max - new max), which holds for this exponent alone. None
    for other statements of two passes.
    """
    if len(maxima) != 1 or len(sums) != 1:
        return None
    first, second = maxima[0], sums[0]
    if not (isinstance(first, Reduce) and isinstance(second, Reduce)):
        return None
    exponents = (first.op, second.op) == ("max", "sum") and second.value.op == "exp"
    same = exponents and is_distance_below(second.value.args[0], first)
    return (first, second) if same and first.dtype == second.dtype else None


def is_distance_below(expr: Expr, row_max: Reduce) -> bool:
    """Whether `expr` is x - max(x), `row_max` being the maximum."""
    if expr.op != "sub" or row_max.op != "max":
        return False
    own = expr.args[1] is ir.result(row_max.name, row_max.dtype)
    return own and row_max.dtype == expr.dtype and row_max.value is expr.args[0]


def exp_weights(kernel: Kernel) -> dict[Expr, Variant]:
    """The exponentials of what is never positive: they need no scaling, and are at most 1."""
    maxima = {s.name: s for s in kernel.stmts() if isinstance(s, Reduce)}
    seen: set[Expr] = set()
    found = (e for x in kernel.exprs() for e in ir.walk(x, seen) if e.op == "exp")
    weights = (e for e in found if _is_never_positive(e.args[0], maxima))
    return {e: Variant("exp_weight") for e in weights if e.dtype != torch.float64}


def _is_never_positive(expr: Expr, maxima: Mapping[str, Reduce]) -> bool:
    """Whether `expr` is x - max(x), or is never positive by its form: -|x| or -c * x * x."""
    if expr.op == "neg":
        return expr.args[0].op == "abs"
    if len(expr.args) != 2:
        return False
    first, second = expr.args
    if expr.op == "mul" and isinstance(second, Const) and second.value < 0:
        return first.op == "mul" and first.args[0] is first.args[1]
    if expr.op != "sub" or not isinstance(second, Named):
        return False
    row_max = maxima.get(second.name)
    return row_max is not None and is_distance_below(expr, row_max)


def cost_of_point(kernel: Kernel) -> int:
    """Cost of one point in all passes: its arithmetic or its traffic, whichever is more."""
    total, moved = 1, sum(isinstance(s, Store) for s in kernel.stmts())
    for phase in kernel.phases:
        seen: set[Expr] = set()
        for stmt in phase.stmts:
            for e in ir.walk(stmt.value, seen):
                row = SCALAR_OPS.get(e.op)
                total += row.cost // 4 if row else 0
                moved += e.op == "read"
    return max(total, moved // 2)
