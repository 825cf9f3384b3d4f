"""Numbers as C++ text, for vendors whose graph builders are C++."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch


def literal(number: Any, dtype: torch.dtype) -> str:
    """The number with every digit of its type; of 16-bit floats the bits."""
    if dtype == torch.bool:
        return "true" if number else "false"
    if dtype in (torch.float16, torch.bfloat16):
        bits = torch.tensor(number, dtype=torch.float64).to(dtype).view(torch.int16).item()
        return f"{int(bits) & 0xFFFF:#06x}"
    if dtype.is_floating_point:
        return float_literal(number, "f" if dtype == torch.float32 else "")
    if dtype == torch.int64 and number == -(2**63):
        return "INT64_MIN"
    return f"{int(number)}" + ("u" if dtype in (torch.uint32, torch.uint64) else "")


def float_literal(number: float, suffix: str) -> str:
    """A double, or with the suffix "f" a float: beyond its range, infinity."""
    if suffix and math.isfinite(number):
        try:
            number = struct.unpack("f", struct.pack("f", number))[0]
        except OverflowError:
            number = math.copysign(math.inf, number)
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return ("-" if number < 0 else "") + f"__builtin_inf{suffix}()"
    text = f"{number:.9g}" if suffix else repr(float(number))
    return (text if any(c in text for c in ".e") else f"{text}.0") + suffix
