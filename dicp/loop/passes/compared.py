"""Values that are compared with an extremum of themselves are stored, not rematerialized."""

from __future__ import annotations

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
    bodies = (node.body for node in graph.nodes if isinstance(node, Compute))
    for test in (part for body in bodies for part in walk(body) if part.op in COMPARISONS):
        compared = _producers(test)
        for extremum in compared:
            if extremum.kind == "reduce" and extremum.op in EXTREMA:
                for value in compared & _producers(extremum.body):
                    value.realize |= value.body.dtype.is_floating_point


def _producers(expr: Expr) -> set[Compute]:
    """The computations whose results an expression loads."""
    loaded = (part.ref.root.producer for part in walk(expr) if isinstance(part, Load))
    return {producer for producer in loaded if isinstance(producer, Compute)}
