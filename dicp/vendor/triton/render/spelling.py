"""How types, numbers, conversions and scalar operators are written in Triton: one row each.

A row is a format string over the operands' names. `d` is the module of device functions
(`device.py`), which has a function for each operator that takes more than one of Triton's.
"""

from __future__ import annotations

import math

import torch

from dicp.codegen.values import conversion_kind
from dicp.dtypes import shortest
from dicp.loop.ir.ops import neutral_element

ELEMENT = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
"""Element types as the compiler's signatures name them."""

VALUE_TYPE = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.float32",
    torch.float16: "tl.float32",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
"""Types in registers; 16-bit floats are widened on load and rounded where eager rounds."""

INFIX = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "abs": "tl.abs({0})",
    "square": "{0} * {0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "where": "tl.where({0}, {1}, {2})",
    "logical_not": "{0} == 0",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)",
    "bitwise_not": "~{0}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "isnan": "{0} != {0}",
    "isinf": "tl.abs({0}) == float('inf')",
    "philox_uniform": "d.philox_uniform_{width}({0}, {1}, {2}, {3})",
    "philox_normal": "d.philox_normal_{width}({0}, {1}, {2}, {3})",
}
"""Operators that Triton has itself, or whose device function depends on the width. Every other row
of the operator table is the device function of that name."""

UNSIGNED = {
    "abs": "{0}",
    "sign": "({0} > 0).to(tl.uint8)",
    "bitwise_not": "{0} ^ tl.full([], 255, tl.uint8)",
}
TRUTH = {
    "maximum": "{0} | {1}",
    "minimum": "{0} & {1}",
    "lt": "~{0} & {1}",
    "le": "~{0} | {1}",
    "gt": "{0} & ~{1}",
    "ge": "{0} | ~{1}",
    "sign": "{0}",
    "abs": "{0}",
    "signbit": "{0} & ~{0}",
}
"""Operators on booleans, which Triton would order as signed one-bit integers."""

VARIANTS = {
    "exp_short": "d.exp_short({0})",
    "normal_cdf_short": "d.normal_cdf_short({0})",
    "normalized": "d.divided({0}, {1}, {shared})",
    "over_above_one": "d.over_above_one({0}, {1})",
    "over": "d.over({0}, {1}, {number})",
    "scaled": "{0} * {number}",
}
"""Cheaper forms of operators (`dicp.gpu.precision`), of operands in float32."""
SHARED = {"normalized": "d.reciprocal({1})"}
"""What a row of VARIANTS computes once for all its elements with the same second operand."""

COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "d.maximum({0}, {1})",
    "min": "d.minimum({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
}
"""Combines two partial results of a reduction."""

ATOMIC = {"sum": "tl.atomic_add", "max": "tl.atomic_max", "min": "tl.atomic_min",
          "prod": "d.atomic_prod"}  # fmt: skip
"""Combines a value with one in memory atomically."""


def operator(op: str, dtype: torch.dtype, operand: torch.dtype, args: list[str]) -> str:
    """`op` applied to `args`; `operand` is the type of the first."""
    width = "d" if dtype == torch.float64 else "f"
    row = INFIX.get(op)
    if operand == torch.uint8:
        row = UNSIGNED.get(op, row)
    elif operand == torch.bool:
        row = TRUTH.get(op, row)
    if row is None:
        return f"d.{op}({', '.join(args)})"
    return row.format(*args, width=width)


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar of exactly this value and type."""
    if dtype.is_floating_point and value == 0 and math.copysign(1, value) < 0:
        return f"(tl.full([], 0.0, {VALUE_TYPE[dtype]}) * -1.0)"  # full() has no -0
    return f"tl.full([], {number(value, dtype)}, {VALUE_TYPE[dtype]})"


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant as Triton code, in the fewest digits that give it back."""
    if dtype == torch.bool:
        return str(bool(value))
    if not dtype.is_floating_point:
        return str(int(value))
    real = float(value)
    return shortest(real, dtype) if math.isfinite(real) else f"float('{real}')"


def start_value(op: str, dtype: torch.dtype) -> str:
    """The start value of a reduction, as Triton code."""
    return number(neutral_element(op, dtype), dtype)


def conversion(text: str, source: torch.dtype, target: torch.dtype, rounded: bool) -> str:
    """`text` converted from `source` to `target`; to a 16-bit float it is rounded if `rounded`."""
    held, kind = VALUE_TYPE[target], conversion_kind(source, target, rounded)
    wide = text if VALUE_TYPE[source] == held else f"{text}.to({held})"
    if kind == "test":
        return f"{text} != 0"
    if kind == "round":
        return f"d.round_{ELEMENT[target]}({wide})"
    if kind == "truncate" and target != torch.int64:
        return f"{text}.to(tl.int64).to({held})"
    return wide
