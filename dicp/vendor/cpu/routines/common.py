"""Shared by the rules of all routines: entry points, and operands in the kernels' layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, dense_strides
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import rows_of
from dicp.vendor.cpu.thresholds import MIN_PRODUCT_ROWS
from dicp.vendor.cpu.toolchain import JOINED_PRODUCTS

FOLDER = Path(__file__).parent
HEADERS = ("tile.h", "gemm.h", "exp.h", "dots.h", "axpys.h", "product.h", "attention.h",
           "attention_gradients.h", "convolution.h", "depthwise.h", "im2col.h", "nhwc.h",
           "int8.h", "split.h")  # fmt: skip

LIBRARY_CALLS = RuleTable()
"""Rules that call the library, for where the routines are not used."""
TYPES = {torch.float32: ("", "float"), torch.bfloat16: ("_bf16", "d_bf16")}
"""Element type -> suffix of routine names, and its name in C++."""
CHANNELS_LAST = (0, 2, 3, 1)
"""The axes of channels-last images in memory, the contiguous one last."""
DEPTHWISE_TAPS = (3, 5, 7)
"""Widths of depthwise filters for which there are kernels."""


def _both(name: str, function: str, option: str = "biased") -> dict[str, str]:
    """An entry point without an option of its function, and one with it."""
    return {name: f"{function}(args, sizes, false)",
            f"{name}_{option}": f"{function}(args, sizes, true)"}  # fmt: skip


PRODUCT_BODIES = _both("dicp_product", "d_product<{}>")
GROUPS = {
    "product": PRODUCT_BODIES,
    "product_any_rows": {
        **PRODUCT_BODIES,
        **_both("dicp_product_any_rows", "d_product_any_rows<{}>"),
    },
    "product_grouped": {
        **PRODUCT_BODIES,
        "dicp_product_grouped": "d_product_grouped<{}>(args, sizes)",
        "dicp_product_grouped_weights": "d_product_grouped_weights<{}>(args, sizes)",
    },
    "split": _both("dicp_split", "d_product_split"),
    "product_transposed": _both("dicp_product_transposed", "d_product_transposed<{}>"),
    "dots": _both("dicp_dots", "d_product_by_dots<{}>"),
    "axpys": _both("dicp_axpys", "d_product_by_axpys<{}>"),
    "dots_bytes": {"dicp_dots_of_bytes": "d_product_of_bytes_by_dots<{}>(args, sizes)"},
    "product_bytes": {"dicp_product_of_bytes": "d_product_of_bytes<{}>(args, sizes)"},
    "product_bytes_on_tiles": {
        "dicp_product_on_tiles_of_bytes": "d_product_of_bytes_on_tiles<{}>(args, sizes)"
    },
    "int8": {
        "dicp_int8": "d_product_int8<true>(args, sizes)",
        "dicp_uint8": "d_product_int8<false>(args, sizes)",
    },
    "convolution": _both("dicp_convolution", "d_convolve"),
    "nhwc": {
        **_both("dicp_nhwc", "d_convolve_nhwc"),
        **_both("dicp_nhwc_strided", "d_convolve_nhwc_strided"),
    },
    "nhwc_filters": {"dicp_nhwc_filters": "d_convolution_nhwc_filters_of(args, sizes)"},
    "convolution_filters": {"dicp_convolution_filters": "d_convolution_filters(args, sizes)"},
    "im2col": {
        **_both("dicp_im2col", "d_im2col_forward"),
        "dicp_im2col_images": "d_im2col_images(args, sizes)",
    },
    "im2col_filters": {"dicp_im2col_filters": "d_im2col_filters(args, sizes)"},
    **{
        f"depthwise_{n}": _both(f"dicp_depthwise_{n}", f"d_depthwise_forward<{{}}, {n}>")
        for n in DEPTHWISE_TAPS
    },
    **{
        f"depthwise_gradients_{n}": {
            f"dicp_depthwise_images_{n}": f"d_depthwise_backward<{{}}, {n}>(args, sizes)",
            f"dicp_depthwise_filters_{n}": f"d_depthwise_filters_of<{{}}, {n}>(args, sizes)",
        }
        for n in DEPTHWISE_TAPS
    },
    "depthwise_filters": {"dicp_depthwise_filters": "d_depthwise_filters_of<{}, 0>(args, sizes)"},
    "attention": _both("dicp_attention", "d_attention_forward<{}>", "masked"),
    "attention_gradients": _both("dicp_attention_gradients", "d_attention_backward<{}>", "masked"),
}
"""Group of routines compiled together -> entry point -> body; `{}` is the element type.

Grouped products, and those of any number of rows, are compiled together with plain ones, as they
share their tiles.
"""
BODIES = {name: body for group in GROUPS.values() for name, body in group.items()}


@dataclass(frozen=True, order=True)
class Group:
    """The routines of one row of `GROUPS` for one element type; they share most of their code."""

    name: str
    ending: str

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> Group:
        return cls(name, TYPES[dtype][0])

    @property
    def header(self) -> str:
        own = f"{self.name}.h"
        return own if own in HEADERS else self.name.split("_")[0] + ".h"

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags added to those of generated kernels; products and sums are contracted.

        Relative to -O3 they halve compile time, for code as fast, provided that the last iterations
        of attention's loops are peeled.
        """
        peeled = ("-fpeel-loops",) if self.header.startswith("attention") else ()
        return (JOINED_PRODUCTS, "-O2", "-fno-tree-vrp", "-fno-ivopts", *peeled)

    def bodies(self) -> dict[str, str]:
        """Entry point -> its body."""
        element = dict(TYPES.values())[self.ending]
        return {n + self.ending: _body(b, element) for n, b in GROUPS[self.name].items()}


class Axis(NamedTuple):
    """A spatial axis of a convolution; a `d_axis` in C++."""

    size: Any
    """Of the images."""
    out: Any
    """The size of the result."""
    taps: Any
    stride: Any
    padding: Any
    dilation: Any

    def is_known(self) -> bool:
        """Whether no entry is symbolic."""
        return all(isinstance(n, int) for n in self)

    def starts_in_padding(self) -> bool:
        """Whether the first pixel of the result is known to read nothing but padding."""
        known = all(isinstance(n, int) for n in (self.taps, self.padding, self.dilation))
        return known and self.padding > (self.taps - 1) * self.dilation


UNIT_AXIS = Axis(1, 1, 1, 1, 0, 1)
"""The axis that a convolution over one axis lacks beside one over two."""


class Shaped(Protocol):
    """A tensor of Dynamo's graph or of lowering's."""

    @property
    def shape(self) -> Sequence[Size]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def group_of(name: str) -> Group | None:
    """The group of routine `name`; None for a generated kernel."""
    routine = name.removesuffix("_bf16")
    found = [group for group, bodies in GROUPS.items() if routine in bodies]
    return Group(found[0], name.removeprefix(routine)) if found else None


def without_parts(groups: Iterable[Group]) -> dict[Group, Group]:
    """Each group -> the one compiled for it: itself, or one of `groups` with all its routines."""
    all_of = {g: GROUPS[g.name].keys() for g in groups}
    return {
        g: max(
            (h for h in all_of if h.ending == g.ending and own <= all_of[h]),
            key=lambda h: len(all_of[h]),
        )
        for g, own in all_of.items()
    }


def _body(call: str, element: str) -> str:
    """The call, and an error report if the routine ran out of memory, its results unwritten."""
    return (
        f"  d_failed_allocation = 0; {call.format(element)}; "
        "if (d_failed_allocation) d_report(status, 3, d_failed_allocation);"
    )


def headers() -> dict[str, str]:
    """The C++ headers of the routines: name -> text."""
    return {name: (FOLDER / name).read_text() for name in HEADERS}


def are_supported(*values: Shaped | None) -> bool:
    """Whether all have one dtype, which the kernels support, and no axis is known to be empty."""
    given = [v for v in values if v is not None]
    types = {v.dtype for v in given}
    return (
        len(types) == 1
        and types <= TYPES.keys()
        and not any(isinstance(s, int) and s == 0 for v in given for s in v.shape)
    )


def is_few(rows: Size) -> bool:
    """Whether there are too few rows to amortize packing the other operand."""
    return isinstance(rows, int) and rows < MIN_PRODUCT_ROWS


def in_float32(lw: Lowering, value: Value) -> Ref:
    """`value` in memory as float32, with its own strides."""
    return lw.realize(lw.cast(value, torch.float32), lw.realize(value).strides)


def call(
    lw: Lowering, name: str, args: Sequence[Ref], outs: Sequence[Ref], sizes: Sequence[Size]
) -> tuple[Value, ...]:
    """A call of routine `name` for the dtype of `args`; `sizes` in the order its C++ documents."""
    ending, element = TYPES.get(args[0].dtype, ("", ""))
    return lw.routine(name + ending, _body(BODIES[name], element), args, outs, sizes)


def call_biased(
    lw: Lowering,
    name: str,
    operands: Sequence[Ref],
    bias: Value | None,
    out: Ref,
    sizes: Sequence[Size],
) -> Value:
    """The result of routine `name`, or of its form with a bias where there is one."""
    if bias is None:
        return call(lw, name, operands, (out,), sizes)[0]
    return call(lw, f"{name}_biased", [*operands, rows_of(lw, bias)], (out,), sizes)[0]


def channels_last(lw: Lowering, x: Value) -> Ref:
    """Images in memory, channels last."""
    image = lw.realize(x)
    return (
        image if is_channels_last(image) else lw.realize(x, dense_strides(x.shape, CHANNELS_LAST))
    )


def is_channels_last(image: Ref) -> bool:
    """Whether images are channels last; those of a single pixel are, whatever its strides are."""
    n, c, h, k = image.shape
    if h == 1 and k == 1:
        return image.strides[1] == 1 and (n == 1 or image.strides[0] == c)
    strides = dense_strides(image.shape, CHANNELS_LAST)
    return image.strides[1:] == strides[1:] and (n == 1 or image.strides[0] == strides[0])
