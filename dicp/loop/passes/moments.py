"""Sums of squared distances from a mean that one sweep can take together with the sum itself."""

from __future__ import annotations

from dicp.loop.ir import expr as ir
from dicp.loop.ir.kernel import Kernel, Reduce


def squared_distances(kernel: Kernel) -> list[tuple[Reduce, Reduce]]:
    """Each with the sum of the same elements that an earlier sweep takes.

    What they are distances from is a value of the row: `square.value.args[0].args[1]`.
    """
    found: list[tuple[Reduce, Reduce]] = []
    sums: dict[str, Reduce] = {}
    for phase in kernel.phases:
        here = [s for s in phase.stmts if isinstance(s, Reduce) and s.op == "sum"]
        for stmt in here:
            if stmt.value.op not in ("mul", "square"):
                continue
            away, again = stmt.value.args[0], stmt.value.args[-1]
            if away.op != "sub" or ir.show(again) != ir.show(away):
                continue
            element, mean = away.args
            if mean.op == "reduction_result" and ir.show(element) in sums:
                found.append((stmt, sums[ir.show(element)]))
        sums |= {ir.show(s.value): s for s in here}
    return found
