"""MACA C++ of a kernel: its parameters, its body, and the function that runs it on the host."""

from __future__ import annotations

from dicp.codegen.types import STORAGE_TYPE
from dicp.gpu.threads import CrossingThreads, LoopedRowThreads, PointThreads, RowThreads
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.kernel import Kernel, kernel_name
from dicp.loop.program import RenderedKernel
from dicp.serialize import encode_size
from dicp.vendor.maca.facts import MIN_WAVE
from dicp.vendor.maca.render.cross_row import LoopedRows
from dicp.vendor.maca.render.points import Points
from dicp.vendor.maca.render.pointwise import Crossing, Pointwise
from dicp.vendor.maca.render.reduction import Reduction


def _writer(kernel: Kernel) -> Points:
    form = kernel.form
    if isinstance(form, LoopedRowThreads):
        return LoopedRows(kernel, form)
    if isinstance(form, RowThreads):
        return Reduction(kernel, form)
    if isinstance(form, CrossingThreads):
        return Crossing(kernel, form)
    assert isinstance(form, PointThreads)
    return Pointwise(kernel, form)


def render(kernel: Kernel) -> RenderedKernel:
    """The kernel's text, in its form."""
    writer = _writer(kernel)
    lines = writer.lines()
    how = "together" if writer.together else "independent"
    blocks = writer.blocks()
    body = "\n".join(
        [
            f"D_KERNEL void __launch_bounds__({writer.threads}) KERNEL(",
            f"    {', '.join(_parameters(writer))}) {{", *lines, "}",
            "#ifdef D_HOST", "D_LAUNCHER(KERNEL) {",
            *(f"  const d_index {n} = sizes[{k}];" for k, n in enumerate(writer.symbols.values())),
            f"  d_run_{how}({{(unsigned)({blocks})}}, {{{writer.threads}}}, [&] {{",
            f"    KERNEL({', '.join(_arguments(writer))});", "  });", "}", "#endif",
        ]
    )  # fmt: skip
    axes = {**writer.axes(), **writer.inner_axes()}
    launch = {
        "grid": list(writer.axes()),
        "axes": {n: {"size": encode_size(s), "block": b} for n, (s, b) in axes.items()},
        "warps": writer.threads // MIN_WAVE, "whole": True, "reaches": list(writer.reaches),
    }  # fmt: skip
    return RenderedKernel(
        kernel_name(kernel.origins, body), body, tuple(writer.args), tuple(writer.symbols), kernel,
        tuple(writer.sites), {"launch": launch},
    )  # fmt: skip


def _pointer(writer: Points, ref: Ref) -> str:
    const = "" if ref.root in writer.stored else "const "
    return f"{const}{STORAGE_TYPE[ref.dtype]}"


def _parameters(writer: Points) -> list[str]:
    pointers = [f"d_global<{_pointer(writer, ref)}> {name}" for ref, name in writer.args.items()]
    return [*pointers, *(f"const d_index {name}" for name in writer.symbols.values())]


def _arguments(writer: Points) -> list[str]:
    pointers = [f"({_pointer(writer, r)}*)args[{k}]" for k, r in enumerate(writer.args)]
    return [*pointers, *writer.symbols.values()]
