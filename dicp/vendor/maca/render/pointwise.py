"""Kernels without a reduction: every thread has points of its own."""

from __future__ import annotations

from dicp.codegen.values import margin
from dicp.gpu.threads import PointThreads
from dicp.gpu.tiles import numel
from dicp.loop.ir.kernel import Kernel
from dicp.vendor.maca.render.points import Points


class Pointwise(Points):
    """Pointwise kernels, and scatters, whose stores may collide."""

    def __init__(self, kernel: Kernel, form: PointThreads) -> None:
        super().__init__(kernel)
        self.block = form

    @property
    def threads(self) -> int:
        return self.block.threads

    def lines(self) -> list[str]:
        loops, block = self.kernel.parallel, self.block
        if not loops:
            scope = self.push((), 2)
            self.statements(self.kernel.stmts())
            return self._guarded("blockIdx.x == 0 && threadIdx.x == 0", scope.lines, 1)
        count = self.size(numel(loops))
        kernel = self.push((), 1)
        start = f"((d_index)blockIdx.x * {block.threads * block.steps} + threadIdx.x)"
        apart = block.threads * block.width
        first = start if block.width == 1 else f"{start} * {block.width}"
        if block.steps == 1:
            inside = self._points(self.kernel.stmts(), loops, "point", block.width, 2)
            head = [f"  const d_index point = {first};"]
            return [*kernel.lines, *head, *self._guarded(f"point < {count}", inside, 1)]
        inside = self._points(self.kernel.stmts(), loops, "point", block.width, 3)
        return [
            *kernel.lines, f"  const d_index first = {first};", "  #pragma unroll",
            f"  for (int step = 0; step < {block.steps}; ++step) {{",
            f"    const d_index point = first + step * {apart};",
            *self._guarded(f"point < {count}", inside, 2), f"{margin(1)}}}",
        ]  # fmt: skip
