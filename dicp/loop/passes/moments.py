"""Sums of deviations from a mean that one pass can compute together with the sum itself."""

from __future__ import annotations

from dataclasses import dataclass

from dicp.loop.ir.expr import Expr, Named
from dicp.loop.ir.kernel import Kernel, Reduce


@dataclass(frozen=True, eq=False)
class Deviations:
    """Sums over deviations from a scalar of the row, such as the mean of the same elements."""

    squares: Reduce
    """The sum of their squares."""
    total: Reduce
    """The sum of the elements, of an earlier pass."""
    residual: Reduce | None
    """The sum of the deviations themselves, if the kernel computes it in the squares' pass."""

    @property
    def center(self) -> Named:
        """The scalar that is subtracted."""
        center = self.squares.value.args[0].args[1]
        assert isinstance(center, Named)
        return center

    @property
    def sums(self) -> tuple[Reduce, ...]:
        """The sums over deviations."""
        return (self.squares,) if self.residual is None else (self.residual, self.squares)


def deviations(kernel: Kernel) -> list[Deviations]:
    """Each sum of squared deviations, with the sum of the same elements in an earlier pass.

    Integers are left out: their mean need not be an integer.
    """
    found: list[Deviations] = []
    sums: dict[Expr, Reduce] = {}
    for phase in kernel.phases:
        here = {
            s.value: s for s in phase.stmts
            if isinstance(s, Reduce) and s.op == "sum" and s.dtype.is_floating_point
        }  # fmt: skip
        for value, stmt in here.items():
            if value.op not in ("mul", "square"):
                continue
            deviation, again = value.args[0], value.args[-1]
            if deviation.op != "sub" or again is not deviation:
                continue
            element, center = deviation.args
            if center.op == "reduction_result" and element in sums:
                found.append(Deviations(stmt, sums[element], here.get(deviation)))
        sums |= here
    return found
