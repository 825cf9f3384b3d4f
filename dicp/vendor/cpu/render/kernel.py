"""C++ text of loop kernels: a signature, and the loops that the kernel's kind asks for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from dicp.codegen.types import STORAGE_TYPE
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.kernel import Kernel, KernelKind
from dicp.origin import Origin
from dicp.vendor.cpu.render.inner_reduction import Rows
from dicp.vendor.cpu.render.loops import Loops
from dicp.vendor.cpu.render.outer_reduction import Columns
from dicp.vendor.cpu.render.pointwise import Pointwise
from dicp.vendor.cpu.render.scatter import Scatter

WRITERS: dict[KernelKind, type[Loops]] = {
    "pointwise": Pointwise, "row": Rows, "column": Columns, "scatter": Scatter
}  # fmt: skip


@dataclass(frozen=True)
class CppKernel:
    """A rendered kernel: equal work has equal `body`, hence an equal name."""

    name: str
    body: str
    args: tuple[Ref, ...]
    symbols: tuple[sympy.Expr, ...]
    kernel: Kernel
    sites: tuple[tuple[str, Origin | None], ...]
    """What each checked place in the code is, and its origin, for error messages."""
    extra: Mapping[str, Any] = field(default_factory=dict)


def render(kernel: Kernel, far_bytes: float = math.inf) -> CppKernel:
    """The kernel's text; results of `far_bytes` and more are written past the caches."""
    writer = WRITERS[kernel.kind](kernel, far_bytes)
    lines = writer.lines()
    head = []
    for k, (ref, name) in enumerate(writer.args.items()):
        ctype = STORAGE_TYPE[ref.dtype]
        const = "" if ref.root in writer.stored else "const "
        head.append(f"  {const}{ctype}* {name} = ({const}{ctype}*)args[{k}];")
    for k, name in enumerate(writer.symbols.values()):
        head.append(f"  const int64_t {name} = sizes[{k}];")
    body = "\n".join([*head, *writer.workspace(), *lines])
    name = "k" + hashlib.sha256(body.encode()).hexdigest()[:20]
    return CppKernel(
        name, body, tuple(writer.args), tuple(writer.symbols), writer.kernel, tuple(writer.sites)
    )
