"""What the rules of all routines share: entry points, and operands as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dicp.loop.index import Size, contiguous_strides
from dicp.loop.ir import Ref
from dicp.loop.lowering import Lowering, Value

FOLDER = Path(__file__).parent
HEADERS = ("gemm.h", "exp.h", "product.h", "attention.h", "convolution.h", "depthwise.h")

MIN_ROWS = 4
TYPES = {torch.float32: ("", "float"), torch.bfloat16: ("_bf16", "d_bf16")}
"""Element type -> how names of routines end, and its name in C++."""
BODIES = {
    "dicp_product": "d_product<{}>(args, sizes, false)",
    "dicp_product_biased": "d_product<{}>(args, sizes, true)",
    "dicp_product_grouped": "d_product_grouped<{}>(args, sizes)",
    "dicp_product_grouped_weights": "d_product_grouped_weights<{}>(args, sizes)",
    "dicp_convolution": "d_convolve(args, sizes, false)",
    "dicp_convolution_biased": "d_convolve(args, sizes, true)",
    "dicp_convolution_filters": "d_convolution_filters(args, sizes)",
    "dicp_depthwise_filters": "d_depthwise_filters(args, sizes)",
    "dicp_attention": "d_attention_forward<{}>(args, sizes, false)",
    "dicp_attention_masked": "d_attention_forward<{}>(args, sizes, true)",
    "dicp_attention_gradients": "d_attention_backward<{}>(args, sizes, false)",
    "dicp_attention_gradients_masked": "d_attention_backward<{}>(args, sizes, true)",
}
"""Routine -> the body of its entry point, for any element type."""


def headers() -> dict[str, str]:
    """The C++ files that routines are made of, by name."""
    return {name: (FOLDER / name).read_text() for name in HEADERS}


def header_of(name: str) -> str:
    """The C++ file that routine `name` calls into; empty for a generated kernel."""
    if name.removesuffix("_bf16") not in BODIES:
        return ""
    return name.split("_")[1] + ".h"


def is_taken(*values: Value | Ref | None) -> bool:
    """All of one type that the kernels take, and no axis known to be empty."""
    given = [v for v in values if v is not None]
    types = {v.dtype for v in given}
    return len(types) == 1 and types <= TYPES.keys() and all(s != 0 for v in given for s in v.shape)


def is_few(rows: Size) -> bool:
    """Whether putting the other operand in order for so few rows costs more than it saves."""
    return isinstance(rows, int) and rows < MIN_ROWS


def rows_of(lw: Lowering, value: Value) -> Ref:
    """`value` in memory, the elements of a row one after another."""
    ref = lw.realize(value)
    return ref if ref.strides[-1] == 1 else lw.realize(value, contiguous_strides(value.shape))


def in_float32(lw: Lowering, value: Value) -> Ref:
    """`value` in memory as float32, laid out as it is."""
    return lw.realize(lw.cast(value, torch.float32), lw.realize(value).strides)


def call(
    lw: Lowering, name: str, args: Sequence[Ref], outs: Sequence[Ref], sizes: Sequence[Size]
) -> tuple[Value, ...]:
    """A call of routine `name` for the type of `args`; sizes stand in the order its C++ says."""
    ending, element = TYPES[args[0].dtype]
    return lw.routine(name + ending, f"  {BODIES[name].format(element)};", args, outs, sizes)
