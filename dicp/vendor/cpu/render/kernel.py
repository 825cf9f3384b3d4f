"""C++ text of loop kernels: the arguments, and the loops that the kernel's kind needs."""

from __future__ import annotations

from typing import Any

from dicp.codegen.types import STORAGE_TYPE
from dicp.loop.ir.kernel import Kernel, kernel_name
from dicp.loop.program import RenderedKernel
from dicp.vendor.cpu import form
from dicp.vendor.cpu.render.inner_reduction import RowsWriter, SplitWriter
from dicp.vendor.cpu.render.loops import Loops
from dicp.vendor.cpu.render.outer_reduction import ColumnsWriter
from dicp.vendor.cpu.render.planes import PlanesWriter
from dicp.vendor.cpu.render.pointwise import PointsWriter, TransposedWriter
from dicp.vendor.cpu.render.scan import JammedScansWriter, PrefixSumsWriter
from dicp.vendor.cpu.render.scatter import ByDestinationWriter, ScatteredWriter
from dicp.vendor.cpu.render.short_rows import ShortRowsWriter

WRITERS: dict[type, type[Loops[Any]]] = {
    form.Points: PointsWriter,
    form.Transposed: TransposedWriter,
    form.Scattered: ScatteredWriter,
    form.ByDestination: ByDestinationWriter,
    form.Rows: RowsWriter,
    form.ShortRows: ShortRowsWriter,
    form.Split: SplitWriter,
    form.Planes: PlanesWriter,
    form.PrefixSums: PrefixSumsWriter,
    form.JammedScans: JammedScansWriter,
    form.Columns: ColumnsWriter,
}


def render(kernel: Kernel) -> RenderedKernel:
    """The kernel's text, in its form."""
    writer = WRITERS[type(kernel.form)](kernel, kernel.form)
    lines = writer.lines()
    head = []
    for k, (ref, name) in enumerate(writer.args.items()):
        ctype = STORAGE_TYPE[ref.dtype]
        const = "" if ref.root in writer.stored else "const "
        head.append(f"  {const}{ctype}* {name} = ({const}{ctype}*)args[{k}];")
    for k, name in enumerate(writer.symbols.values()):
        head.append(f"  const int64_t {name} = sizes[{k}];")
    body = "\n".join([*head, *writer.workspace(), *writer.hidden_steps(), *lines])
    name = kernel_name(kernel.origins, body)
    return RenderedKernel(
        name, body, tuple(writer.args), tuple(writer.symbols), writer.kernel, tuple(writer.sites)
    )
