"""Numbers as tensors of a dtype store them, and which conversions are lossless.

A constant is a number with a dtype. `converted` gives the number that a tensor of that dtype holds;
every constant goes through it once, wherever it is folded, matched or emitted. Nothing here runs an
operator, so that it may be called under any dispatch mode.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
from functools import cache

import torch

Number = bool | int | float

REDUCED_FLOATS = frozenset({torch.float16, torch.bfloat16})
"""Floating-point types that operators compute in float32."""


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that operators compute and add up elements of `dtype` in (`at::opmath_type`)."""
    return torch.float32 if dtype in REDUCED_FLOATS else dtype


def converted(number: Number, dtype: torch.dtype) -> Number | None:
    """`number` as `dtype` holds it, converted as by `torch.full` or `Tensor.to`.

    None where PyTorch's result depends on the machine (a float that is NaN or out of an integer
    type's range) and for dtypes not listed here.
    """
    if dtype == torch.bool:
        return bool(number)
    if dtype == torch.float64:
        return float(number)
    if dtype == torch.float32:
        return _single(number)
    if dtype in REDUCED_FLOATS:
        single = _single(number)
        narrow = _half if dtype == torch.float16 else _round_to_bfloat16
        return None if single is None else narrow(single)
    if dtype in _INTEGERS:
        return _integer(number, dtype)
    return None


def significand_bits(dtype: torch.dtype) -> int:
    """The bits of a number below 1 that a floating-point dtype holds; with more of them it could be
    rounded to 1."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def power_of_ten(digits: int) -> float:
    """10 ** digits, infinite beyond the largest double."""
    return 10.0**digits if digits <= sys.float_info.max_10_exp else math.inf


def largest_below(number: float, dtype: torch.dtype) -> float:
    """The largest number of a floating-point dtype that is less than `number`."""
    info, held = torch.finfo(dtype), converted(number, dtype)
    assert isinstance(held, float)
    if not held >= number or held == -math.inf:
        return held
    if held == math.inf:
        return info.max
    fraction, exponent = math.frexp(held)
    step = math.ldexp(info.eps, exponent - (2 if fraction == 0.5 else 1)) if held else 0.0
    return held - max(step, info.smallest_normal * info.eps)


def fits(number: Number, dtype: torch.dtype) -> bool:
    """Whether `torch.full` takes `number` for `dtype`, rather than refuse it as an overflow.

    Negative integers wrap around in unsigned types, down to minus their largest number. Source:
    PyTorch's `c10::overflows`.
    """
    if dtype == torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return (
            not abs(number) > torch.finfo(dtype).max
            or isinstance(number, float)
            and (math.isinf(number))
        )
    info = torch.iinfo(dtype)
    if isinstance(number, float):
        return info.min <= number <= float(info.max)
    return (info.min or -info.max) <= number <= info.max


_INTEGERS = frozenset({
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


def _integer(number: Number, dtype: torch.dtype) -> int | None:
    """Integers wrap around; floats are truncated."""
    info = torch.iinfo(dtype)
    if isinstance(number, float):
        inside = math.isfinite(number) and info.min <= int(number) <= info.max
        return int(number) if inside else None
    return (int(number) - info.min) % (1 << info.bits) + info.min


def _single(number: Number) -> float | None:
    wide = float(number)
    if not isinstance(number, float) and wide != number:
        return None  # already rounded by the conversion to double
    return ctypes.c_float(wide).value


def _half(single: float) -> float:
    try:
        return float(struct.unpack("<e", struct.pack("<e", single))[0])
    except OverflowError:
        return math.copysign(math.inf, single)


def _round_to_bfloat16(single: float) -> float:
    """bfloat16: the upper 16 bits, rounded to nearest, ties to even."""
    if math.isnan(single):
        return single
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@cache
def holds_all(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `target` holds every value of `source`, so that converting to it loses nothing."""
    if source == target or source == torch.bool:
        return True
    if source.is_complex or target.is_complex or torch.bool == target:
        return False
    if source.is_floating_point:
        return target.is_floating_point and _spans(torch.finfo(source), torch.finfo(target))
    least, most = torch.iinfo(source).min, torch.iinfo(source).max
    if target.is_floating_point:
        info = torch.finfo(target)
        return most <= min(2 / info.eps, info.max)
    return torch.iinfo(target).min <= least and most <= torch.iinfo(target).max


def _spans(narrow: torch.finfo, wide: torch.finfo) -> bool:
    return (
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.tiny * wide.eps <= narrow.tiny * narrow.eps
    )


def shortest(number: float, dtype: torch.dtype) -> str:
    """The shortest decimal that `dtype` (16-bit floats: float32) reads back as this number."""
    if dtype == torch.float64 or not math.isfinite(number):
        return repr(number)
    texts = (repr(float(f"{number:.{digits}g}")) for digits in range(6, 10))
    return next((text for text in texts if _single(float(text)) == number), repr(number))
