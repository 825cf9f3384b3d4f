"""Values that are compared with an extremum of themselves are stored, not rematerialized."""

from __future__ import annotations

from collections.abc import Iterator

from dicp.loop.ir.expr import Expr, Load, walk
from dicp.loop.ir.graph import Compute, Graph

EXTREMA = ("max", "min")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def store_compared(graph: Graph) -> None:
    """Mark as stored what is compared with its own maximum or minimum.

    The gradient of an extremum asks which elements equal it. Another loop may compute them with
    another last bit, as vectors and remaining elements have functions of their own: none would be
    equal then, and the gradient 0 / 0.
    """
    for node in graph.nodes:
        if not isinstance(node, Compute):
            continue
        for test in walk(node.body):
            if test.op in COMPARISONS:
                compared = set(_producers(test))
                for extremum in compared:
                    if extremum.kind == "reduce" and extremum.op in EXTREMA:
                        for value in compared.intersection(_producers(extremum.body)):
                            value.realize |= value.body.dtype.is_floating_point


def _producers(expr: Expr) -> Iterator[Compute]:
    """The computations whose results an expression loads."""
    for part in walk(expr):
        if isinstance(part, Load) and isinstance(part.ref.root.producer, Compute):
            yield part.ref.root.producer
