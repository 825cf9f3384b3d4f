"""Sums of squared deviations from a mean that one pass can compute together with the sum itself."""

from __future__ import annotations

from dicp.loop.ir.expr import Expr
from dicp.loop.ir.kernel import Kernel, Reduce


def squared_distances(kernel: Kernel) -> list[tuple[Reduce, Reduce]]:
    """Each sum of squared deviations, paired with the sum of the same elements in an earlier pass.

    The mean is a scalar of the row: `square.value.args[0].args[1]` for the first of a pair.
    """
    found: list[tuple[Reduce, Reduce]] = []
    sums: dict[Expr, Reduce] = {}
    for phase in kernel.phases:
        here = [s for s in phase.stmts if isinstance(s, Reduce) and s.op == "sum"]
        for stmt in here:
            if stmt.value.op not in ("mul", "square"):
                continue
            away, again = stmt.value.args[0], stmt.value.args[-1]
            if away.op != "sub" or again is not away:
                continue
            element, mean = away.args
            if mean.op == "reduction_result" and element in sums:
                found.append((stmt, sums[element]))
        sums |= {s.value: s for s in here}
    return found
