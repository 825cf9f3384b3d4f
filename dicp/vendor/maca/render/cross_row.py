"""Inner reductions with fused cross-row sums: each block loops over rows and adds up."""

from __future__ import annotations

from dicp.codegen.types import VALUE_TYPE
from dicp.gpu.threads import LoopedRowThreads
from dicp.gpu.tiles import numel
from dicp.loop.ir.index import Size, product
from dicp.loop.ir.kernel import Kernel, Store
from dicp.vendor.maca.facts import MIN_WAVE
from dicp.vendor.maca.render.reduction import Reduction


class LoopedRows(Reduction):
    """The groups of a block have a row each at a time; every thread keeps the sums of its points
    over all rows of the block, and the groups' sums are added up at the end."""

    block: LoopedRowThreads

    def __init__(self, kernel: Kernel, form: LoopedRowThreads) -> None:
        super().__init__(kernel, form)
        self._sums = {stmt: f"sums_{k}" for k, stmt in enumerate(kernel.cross_row_stores())}

    def axes(self) -> dict[str, tuple[Size, int]]:
        partition = self.kernel.partition
        loops = (partition.part,) if partition is not None else self.block.parts
        return {"p": (product(v.size for v in loops), 1)}

    def inner_axes(self) -> dict[str, tuple[Size, int]]:
        partition = self.kernel.partition
        rows = self.shared_size if partition is None else partition.chunk
        return {"x": (rows, self.block.rows), **super().inner_axes()}

    @property
    def shared_size(self) -> Size:
        return numel(self.block.looped)

    def lines(self) -> list[str]:
        block = self.block
        whole = self.push(block.parts, 1)
        (number,) = self.block_axes()
        if self.kernel.partition is not None:
            whole.lines += self._part(number)
        else:
            end = self.size(self.shared_size)
            whole.lines += [f"  {text}" for text in self._digits(number, block.parts)]
            whole.lines.append(f"  const d_index first = 0, end = {end};")
        self.range = "", ""  # of the reduction, which is whole
        whole.lines.append(f"  const d_index at = threadIdx.x % {block.group};")
        for stmt, name in self._sums.items():
            size = self._points_of_a_thread
            whole.lines.append(f"  {VALUE_TYPE[stmt.ref.dtype]} {name}[{size}] = {{}};")
        loop = f"  for (d_index base = first; base < end; base += {block.rows}) {{"
        whole.lines += [loop, *self._rows(), "  }"]
        for stmt, name in self._sums.items():
            self._finish(stmt, name)
        self.pop(whole)
        return [*self._declarations(), *whole.lines]

    @property
    def _points_of_a_thread(self) -> int:
        assert self.block.steps is not None
        return self.block.steps * self.block.width

    def _rows(self) -> list[str]:
        """The work on the rows that the block has at a time."""
        block = self.block
        row = self.push(block.looped, 1)
        live, inside = ("own_row < end", "live ? own_row : end - 1") if block.masked else (
            "true", "own_row")  # fmt: skip
        row.lines += [
            f"  const d_index own_row = base + threadIdx.x / {block.group};",
            f"  const bool live = {live};", f"  const d_index row = {inside};",
            *(f"  {text}" for text in self._digits("row", block.looped)),
        ]  # fmt: skip
        self._phases()
        if any(count % 2 for count in self._exchanges.values()) and block.group > MIN_WAVE:
            # The next row's first reduction writes what all threads have read by then.
            row.lines.append("  __syncthreads();")
        self.pop(row)
        return [f"  {text}" for text in row.lines]

    def _store(self, stmt: Store, value: str) -> str:
        if stmt not in self._sums:
            return super()._store(stmt, value)
        return f"{self._sums[stmt]}[{self._inner_position()}] += {value};"

    def _finish(self, stmt: Store, name: str) -> None:
        """Adds up the groups' sums, which the first group stores."""
        block, scope, loops = self.block, self.scopes[-1], self.kernel.reduction
        ctype = VALUE_TYPE[stmt.ref.dtype]
        if block.rows > 1:
            array = self._shared_array(ctype, f"rows_{ctype}", self.threads)
            sizes = f"{block.group}, {block.rows}, {self._points_of_a_thread}"
            scope.lines.append(f"  d_add_rows<{sizes}>({name}, {array});")
        inner = self.push(loops, 3)
        inner.lines += [f"      {text}" for text in self._digits("point", loops)]
        place = f"{self.arg(stmt.ref)}[{self.index(stmt.index)}]"
        inner.lines.append(f"      {self._assignment(stmt, place, f'{name}[k]')}")
        self.pop(inner)
        count, wide = self.size(numel(loops)), block.width
        scope.lines += [
            "  #pragma unroll", f"  for (int k = 0; k < {self._points_of_a_thread}; ++k) {{",
            f"    const d_index point = (k / {wide} * {block.group} + at) * {wide} + k % {wide};",
            *self._guarded(f"threadIdx.x < {block.group} && point < {count}", inner.lines, 2),
            "  }",
        ]  # fmt: skip
