"""C++ spellings of types, numbers, conversions and sizes."""

from __future__ import annotations

import math

import sympy
import torch

from dicp.codegen.values import conversion_kind
from dicp.dtypes import shortest
from dicp.loop.ir.ops import REDUCTIONS


class Spellings(dict[torch.dtype, str]):
    """The types of a language by dtype; raises ValueError for a dtype that it lacks."""

    def __missing__(self, dtype: torch.dtype) -> str:
        raise ValueError(f"there is no generated code for {dtype}; take it out of Facts.dtypes")


VALUE_TYPE = Spellings({
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "float",
    torch.float16: "float",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
})  # fmt: skip
STORAGE_TYPE = Spellings({
    **VALUE_TYPE, torch.bfloat16: "d_bf16", torch.float16: "d_f16", torch.bool: "uint8_t"
})  # fmt: skip
"""Element types in memory. 16-bit floats are stored as bits and bools as bytes, both widened on
load: loops that load or store `bool` are not vectorized."""


def widened(lvalue: str, dtype: torch.dtype) -> str:
    """The element at `lvalue` as a value: 16-bit floats as float, a boolean's byte as a test."""
    if dtype == torch.bool:
        return f"({lvalue} != 0)"
    wide = {torch.bfloat16: "d_from_bf16", torch.float16: "d_from_f16"}.get(dtype)
    return f"{wide}({lvalue})" if wide else lvalue


def start_value(op: str, dtype: torch.dtype) -> str:
    """The start value of reduction `op`, as C code."""
    ctype = VALUE_TYPE[dtype]
    kind = REDUCTIONS[op].start
    return {
        "zero": "0",
        "one": "1",
        "lowest": f"d_lowest<{ctype}>()",
        "highest": f"d_highest<{ctype}>()",
    }[kind]


REAL_SIZES = {
    "ToFloat": "(double)({0})",
    "IntTrueDiv": "((double)({0}) / (double)({1}))",
    "FloatTrueDiv": "((double)({0}) / (double)({1}))",
    "TruncToInt": "(int64_t)({0})",
    "FloorToInt": "(int64_t)d_floor((double)({0}))",
    "CeilToInt": "(int64_t)d_ceil((double)({0}))",
    "RoundToInt": "(int64_t)d_round((double)({0}))",
}
"""C++ of functions in sizes computed in floating point, such as a length times a scale factor."""


def has_spelling(size: sympy.Expr) -> bool:
    """Whether `size_text` can write this size."""
    try:
        size_text(size)
    except NotImplementedError:
        return False
    return True


def size_text(size: sympy.Expr) -> str:
    """C++ of a symbolic size, which divides and rounds as Python does.

    Raises NotImplementedError for a function that C++ does not have.
    """
    if size.is_Integer or size.is_Symbol:
        return str(size)
    if size.is_Float:
        return repr(float(size))
    parts = [size_text(a) for a in size.args]
    kind = type(size).__name__
    if kind in REAL_SIZES:
        return REAL_SIZES[kind].format(*parts)
    if kind in ("Add", "Mul"):
        return "(" + (" + " if kind == "Add" else " * ").join(parts) + ")"
    if kind in ("FloorDiv", "CleanDiv"):
        return f"d_size_div({parts[0]}, {parts[1]})"
    if kind in ("Mod", "PythonMod"):
        return f"d_size_mod({parts[0]}, {parts[1]})"
    if kind == "ModularIndexing":
        return f"d_size_mod(d_size_div({parts[0]}, {parts[1]}), {parts[2]})"
    if kind in ("Max", "Min"):
        sign = ">" if kind == "Max" else "<"
        text = parts[0]
        for part in parts[1:]:
            text = f"({text} {sign} {part} ? {text} : {part})"
        return text
    if kind in ("Pow", "PowByNatural") and size.args[1].is_Integer and size.args[1] > 0:
        return "(" + " * ".join([parts[0]] * int(size.args[1])) + ")"
    raise NotImplementedError(f"size expression {size}")


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A C++ literal of exactly this value."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        number = float(value)
        suffix = "" if dtype == torch.float64 else "f"
        if math.isnan(number):
            return f"d_nan{suffix}"
        if math.isinf(number):
            return f"({'-' if number < 0 else ''}d_inf{suffix})"
        text = f"{shortest(number, dtype)}{suffix}"
        return f"({text})" if text.startswith("-") else text
    whole = int(value)
    if whole == -(2**63):
        return "INT64_MIN"
    return f"({VALUE_TYPE[dtype]}){whole}" if whole >= 0 else f"({VALUE_TYPE[dtype]})({whole})"


def conversion(text: str, source: torch.dtype, target: torch.dtype, rounded: bool) -> str:
    """C code that converts the value `text`; `rounded`: even to 16-bit floats."""
    kind = conversion_kind(source, target, rounded)
    if kind == "test":
        return f"{text} != 0"
    if kind == "select":
        return f"{text} ? {literal(1, target)} : {literal(0, target)}"
    if kind == "round":
        return f"d_round_{'bf16' if target == torch.bfloat16 else 'f16'}((float){text})"
    if kind == "truncate" and target == torch.int64:
        return f"d_to_int64({text})"
    if kind == "truncate" and (source, target) == (torch.float64, torch.uint8):
        return f"d_to_uint8({text})"
    if kind == "truncate":
        whole = f"d_to_int32({text})"
        return whole if target == torch.int32 else f"({VALUE_TYPE[target]}){whole}"
    return f"({VALUE_TYPE[target]}){text}"
