"""C++ of loop kernels as plain nested loops, right for every kernel and tuned for no hardware.

A new vendor begins with this text and changes what its hardware does otherwise: how the parallel
loops are divided (`SerialKernel.parallel_loops`), how colliding stores are combined
(`combining_store`), how arrays are declared, how an operator is spelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from dicp.codegen.emitter import Emitter
from dicp.codegen.spelling import SCALAR_HEADER, header_text
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE
from dicp.codegen.values import local, margin
from dicp.loop.ir.index import Var, indirect_exprs, product
from dicp.loop.ir.kernel import Kernel, Phase, Reduce, Scan, ScratchStore, Store, kernel_name
from dicp.loop.program import RenderedKernel

PARAMETERS = "void** args, const int64_t* sizes, int64_t* status"
"""Of a kernel's function: addresses of its tensors, its sizes, and where it reports an error."""


class SerialKernel(Emitter):
    """Writes the C++ of one kernel: `body` is that of a function of PARAMETERS.

    The source must include `scalar.h` (see `headers`).
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        lines = self._rows() if kernel.reduction else self._points()
        self.body = "\n".join([*self._arguments(), *lines])
        self.name = kernel_name(kernel.origins, self.body)

    def source(self) -> RenderedKernel:
        """The rendered kernel, as `LoopTarget.render_kernel` returns it."""
        return RenderedKernel(
            self.name, self.body, tuple(self.args), tuple(self.symbols), self.kernel,
            tuple(self.sites),
        )  # fmt: skip

    def parallel_loops(self, body: Sequence[str]) -> list[str]:
        """`body` inside the kernel's parallel loops, which are independent of each other."""
        return self.loops(self.kernel.parallel, body, 1)

    def colliding_loops(self, body: Sequence[str]) -> list[str]:
        """`body` inside parallel loops that may store to one place twice, in order.

        May be divided only where `combining_store` is atomic.
        """
        return self.loops(self.kernel.parallel, body, 1)

    def loops(self, loops: Sequence[Var], body: Sequence[str], indent: int) -> list[str]:
        """`body` inside `loops`, the first of them outermost."""
        heads = [
            f"{margin(indent + depth)}for (int64_t {var.key} = 0; {var.key} < "
            f"{self.size(var.size)}; ++{var.key}) {{"
            for depth, var in enumerate(loops)
        ]
        ends = [f"{margin(indent + depth)}}}" for depth in reversed(range(len(loops)))]
        return [*heads, *body, *ends]

    def _points(self) -> list[str]:
        """Kernels without a reduction: all statements at every point."""
        scope = self.push(self.kernel.parallel, 1 + len(self.kernel.parallel))
        self.statements(self.kernel.stmts())
        collide = any(isinstance(s, Store) and _may_collide(s) for s in self.kernel.stmts())
        return (self.colliding_loops if collide else self.parallel_loops)(scope.lines)

    def _rows(self) -> list[str]:
        """Kernels with reductions: phase after phase in every row."""
        depth = 1 + len(self.kernel.parallel)
        row = self.push(self.kernel.parallel, depth)
        for phase in self.kernel.phases:
            if phase.level == "parallel":
                self.statements(phase.stmts)
            else:
                row.lines += self._along_reduction(phase, depth)
        return self.parallel_loops(row.lines)

    def _along_reduction(self, phase: Phase, depth: int) -> list[str]:
        loops, pad = self.kernel.reduction, margin(depth)
        head = [pad + self._declare(s) for s in phase.stmts if isinstance(s, (Reduce, Scan))]
        count = product(v.size for v in loops)
        head += [
            f"{pad}{VALUE_TYPE[s.dtype]} saved_{s.name}[{self.size(count)}];"
            for s in phase.stmts if isinstance(s, ScratchStore)
        ]  # fmt: skip
        body = self.push(loops, depth + len(loops))
        self.statements(phase.stmts)
        self.pop(body)
        return [*head, *self.loops(loops, body.lines, depth)]

    def _declare(self, stmt: Reduce | Scan) -> str:
        """Sums of floats are added in double: their error does not grow with their length."""
        if stmt.op == "sum" and stmt.dtype.is_floating_point:
            return f"double {local(stmt.name)} = 0;"
        return super()._declare(stmt)

    def _arguments(self) -> list[str]:
        lines = []
        for k, (ref, name) in enumerate(self.args.items()):
            const = "" if ref.root in self.stored else "const "
            ctype = f"{const}{STORAGE_TYPE[ref.dtype]}*"
            lines.append(f"  {ctype} {name} = ({ctype})args[{k}];")
        names = enumerate(self.symbols.values())
        return lines + [f"  const int64_t {name} = sizes[{k}];" for k, name in names]


def _may_collide(store: Store) -> bool:
    """Whether two points of the parallel loops may store to one place."""
    return bool(store.op) or any(True for _ in indirect_exprs(store.index))


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """The files that a kernel's source includes, by name."""
    return {SCALAR_HEADER: header_text()}


FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
DTYPES = FLOATS | {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
"""The dtypes that `scalar.h` converts and computes."""
