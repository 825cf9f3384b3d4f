"""MACA C++ of a kernel: its parameters, its body, and the function that runs it on the host."""

from __future__ import annotations

from dicp.codegen.types import STORAGE_TYPE
from dicp.gpu.threads import PointThreads, RowThreads
from dicp.gpu.tiles import numel
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.kernel import Kernel, kernel_name
from dicp.loop.program import RenderedKernel
from dicp.serialize import encode_size
from dicp.vendor.maca.facts import LEAST_WAVE
from dicp.vendor.maca.render.pointwise import Pointwise
from dicp.vendor.maca.render.reduction import Reduction


def render(kernel: Kernel) -> RenderedKernel:
    """The kernel's text, in its form."""
    form = kernel.form
    writer: Reduction | Pointwise
    if isinstance(form, RowThreads):
        writer, block = Reduction(kernel, form), form.rows
    else:
        assert isinstance(form, PointThreads)
        writer, block = Pointwise(kernel, form), form.points
    lines = writer.lines()
    rows = numel(kernel.parallel)
    blocks = f"({writer.size(rows)} + {block - 1}) / {block}"
    together = isinstance(form, RowThreads) and form.exchanges
    body = "\n".join(
        [
            f"D_KERNEL void __launch_bounds__({writer.threads}) KERNEL(",
            f"    {', '.join(_parameters(writer))}) {{", *lines, "}",
            "#ifdef D_HOST", "D_LAUNCHER(KERNEL) {",
            *(f"  const d_index {n} = sizes[{k}];" for k, n in enumerate(writer.symbols.values())),
            f"  d_run_{'together' if together else 'independent'}"
            f"({{(unsigned)({blocks})}}, {{{writer.threads}}}, [&] {{",
            f"    KERNEL({', '.join(_arguments(writer))});", "  });", "}", "#endif",
        ]
    )  # fmt: skip
    axes = {"x": {"size": encode_size(rows), "block": block},
            "r": {"size": encode_size(numel(kernel.reduction)), "block": 1}}  # fmt: skip
    launch = {
        "grid": ["x"], "axes": axes, "warps": writer.threads // LEAST_WAVE, "whole": True,
        "reaches": list(writer.reaches),
    }  # fmt: skip
    return RenderedKernel(
        kernel_name(kernel.origins, body), body, tuple(writer.args), tuple(writer.symbols), kernel,
        tuple(writer.sites), {"launch": launch},
    )  # fmt: skip


def _pointer(writer: Pointwise | Reduction, ref: Ref) -> str:
    const = "" if ref.root in writer.stored else "const "
    return f"{const}{STORAGE_TYPE[ref.dtype]}"


def _parameters(writer: Pointwise | Reduction) -> list[str]:
    pointers = [f"d_global<{_pointer(writer, ref)}> {name}" for ref, name in writer.args.items()]
    return [*pointers, *(f"const d_index {name}" for name in writer.symbols.values())]


def _arguments(writer: Pointwise | Reduction) -> list[str]:
    pointers = [f"({_pointer(writer, r)}*)args[{k}]" for k, r in enumerate(writer.args)]
    return [*pointers, *writer.symbols.values()]
