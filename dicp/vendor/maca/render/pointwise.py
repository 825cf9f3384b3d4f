"""Kernels without a reduction: every thread has points of its own, or a block has a tile."""

from __future__ import annotations

from dicp.codegen.types import STORAGE_TYPE
from dicp.codegen.values import margin
from dicp.gpu.threads import CrossingThreads, PointThreads
from dicp.gpu.tiles import numel
from dicp.loop.ir.index import Size
from dicp.loop.ir.kernel import Kernel
from dicp.vendor.maca.render.points import Points


class Pointwise(Points):
    """Pointwise kernels, and scatters, whose stores may collide."""

    block: PointThreads

    def __init__(self, kernel: Kernel, form: PointThreads) -> None:
        super().__init__(kernel)
        self.block = form

    def axes(self) -> dict[str, tuple[Size, int]]:
        return {"x": (numel(self.kernel.parallel), self.block.points)}

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


class Crossing(Points):
    """A block computes a square tile of the last loop and of another one along which some accesses
    are contiguous: those pass through shared memory, so that adjacent threads have adjacent
    elements.
    """

    block: CrossingThreads

    def __init__(self, kernel: Kernel, form: CrossingThreads) -> None:
        super().__init__(kernel)
        self.block = form
        *outer, self.last = kernel.parallel
        self.outer = tuple(v for v in outer if v is not form.crossing)

    @property
    def together(self) -> bool:
        return True

    def axes(self) -> dict[str, tuple[Size, int]]:
        side = self.block.side
        tile = {"y": (self.block.crossing.size, side), "x": (self.last.size, side)}
        return {"z": (numel(self.outer), 1), **tile}

    def lines(self) -> list[str]:
        z, y, x = self.block_axes()
        side, crossing, last = self.block.side, self.block.crossing, self.last
        kernel = self.push(self.outer, 1)
        kernel.lines += [
            f"  const d_index outer = {z};",
            f"  const d_index first_y = {y} * {side}, first_x = {x} * {side};",
            *(f"  {text}" for text in self._digits("outer", self.outer)),
        ]
        ends: list[str] = []
        for number, (ref, index) in enumerate((*self.block.reads, *self.block.stores)):
            # Rows are one word longer, so that a column's elements lie in different banks.
            pitch = side + max(1, 4 // ref.dtype.itemsize)
            name, ctype = f"tile_{number}", STORAGE_TYPE[ref.dtype]
            kernel.lines.append(f"  __shared__ d_shared<{ctype}, {side * pitch}> {name};")
            kept = f"{name}[at_x * {pitch} + at_y]"
            stored = number >= len(self.block.reads)
            moved = self.push((crossing, last), 3)
            place = f"{self.arg(ref)}[{self.index(index)}]"
            to, source = (place, kept) if stored else (kept, place)
            moved.lines.append(f"      {to} = {source};")
            self.pop(moved)
            (ends if stored else kernel.lines).extend(self._tile("at_y", "at_x", moved.lines))
            (self.lane_lvalues if stored else self.staged)[ref, index] = kept
        kernel.lines += ["  __syncthreads();"] if self.block.reads else []
        body = self.push((crossing, last), 3)
        self.statements(self.kernel.stmts())
        self.pop(body)
        self.pop(kernel)
        ends = ["  __syncthreads();", *ends] if ends else []
        return [*kernel.lines, *self._tile("at_x", "at_y", body.lines), *ends]

    def _tile(self, near: str, far: str, body: list[str]) -> list[str]:
        """`body` at the points of the tile; adjacent threads have adjacent points along `near`."""
        side, crossing, last = self.block.side, self.block.crossing, self.last
        inside = (
            f"{crossing.key} < {self.size(crossing.size)} && {last.key} < {self.size(last.size)}"
        )
        return [
            f"  for (int k = threadIdx.x; k < {side * side}; k += {self.threads}) {{",
            f"    const int {near} = k % {side}, {far} = k / {side};",
            f"    const d_index {crossing.key} = first_y + at_y, {last.key} = first_x + at_x;",
            *self._guarded(inside, body, 2), "  }",
        ]  # fmt: skip
