"""Comparing a device's values with a reference: tolerances, errors, and both verdicts.

tolerance: |a - b| <= atol + rtol * |b| for every element, NaN equal to NaN.
fp64: the error against float64 is at most twice that of eager in the same dtype, plus a floor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.compare import FLOOR_ULPS
from dicp.config import tool_variable
from dicp.errors import ToolVariableError

COLUMNS = (
    "name",
    "allclose",
    "cosine_similarity",
    "max_abs_diff",
    "max_relative_diff",
    "atol",
    "rtol",
    "error_info",
)
_CHUNK = 1 << 22
"""Elements compared at a time: the float64 copies of more would not fit beside large tensors."""

_DEFAULTS = {
    torch.float16: 1e-4, torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-8,
}  # fmt: skip
_WHOLE_NUMBERS = 1e-3
_PYTHON_NUMBERS = 1e-6
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class Tolerance:
    atol: float
    rtol: float


_EXACT = Tolerance(0.0, 0.0)


def tolerance(operator: str, value: Any, computed: Collection[torch.dtype] = ()) -> Tolerance:
    """The tolerance for the device's value: of operator and dtype, of the dtype, general, default.

    computed: dtypes that it was computed from, the narrowest of which counts. Raises
    ToolVariableError.
    """
    if value is None:
        return _EXACT
    if not isinstance(value, torch.Tensor):
        return Tolerance(_PYTHON_NUMBERS, _PYTHON_NUMBERS)
    dtype = _REAL.get(value.dtype, value.dtype)
    if dtype.is_floating_point:
        dtype = max((dtype, *computed), key=lambda each: torch.finfo(each).eps)
    name = str(dtype).removeprefix("torch.").upper()
    short = operator.rpartition(".")[2].upper()
    base = "AUTOCOMPARE_ERROR_TOLERANCE"
    for variable in (f"{short}_{base}_{name}", f"{base}_{name}", base):
        text = tool_variable(variable)
        if text:
            return _parsed(variable, text)
    default = _DEFAULTS.get(dtype, _WHOLE_NUMBERS)
    return Tolerance(default, default)


def _parsed(variable: str, text: str) -> Tolerance:
    try:
        atol, rtol = (float(part) for part in text.split(","))
    except ValueError:
        raise ToolVariableError(variable, text, "two numbers 'atol,rtol', such as 1e-3,1e-3") from (
            None
        )
    if not (atol >= 0 and rtol >= 0):
        raise ToolVariableError(variable, text, "two numbers that are not negative")
    return Tolerance(atol, rtol)


@dataclass(frozen=True)
class Comparison:
    """One value beside its reference."""

    name: str
    allclose: bool
    cosine: float = 1.0
    max_abs: float = 0.0
    max_relative: float = 0.0
    tolerance: Tolerance = _EXACT
    error_info: str = ""
    ratio: float = 0.0
    """The worst error as a multiple of what the tolerance allows."""
    fp64: bool = True
    """The verdict of the fp64 rule; where nothing but the tolerance can judge, that one's."""

    def row(self) -> tuple[object, ...]:
        return (
            self.name,
            self.allclose,
            f"{self.cosine:.9f}",
            f"{self.max_abs:.9f}",
            f"{self.max_relative:.9f}",
            f"{self.tolerance.atol:.9f}",
            f"{self.tolerance.rtol:.9f}",
            self.error_info,
        )


def compare(
    operator: str, name: str, got: Any, reference: Any, eager: Any = None, scale: float = 0.0,
    computed: Collection[torch.dtype] = (),
) -> Comparison:  # fmt: skip
    """Compare a leaf of the device's values with the reference's; `eager` for the fp64 rule.

    scale: the largest of the values that roundings in this one may come from. computed: as in
    `tolerance`.
    """
    allowed = tolerance(operator, got, computed)
    if isinstance(got, torch.Tensor) != isinstance(reference, torch.Tensor):
        info = f"Inconsistent types: {type(got).__name__} {type(reference).__name__}"
        return Comparison(name, False, 0.0, math.inf, math.inf, allowed, info, math.inf, False)
    if isinstance(got, torch.Tensor):
        return _compare_tensors(name, got, reference, allowed, eager, scale)
    if isinstance(got, (bool, int, float, complex)) and isinstance(
        reference, (bool, int, float, complex)
    ):
        return _compare_numbers(name, got, reference, allowed)
    same = bool(got == reference) or got is reference
    far = 0.0 if same else math.inf
    return Comparison(
        name, same, float(same), far, far, allowed, "" if same else "Inconsistent values", far, same
    )


def as_promised(comparison: Comparison, got: Any, promised: Any, shapes: bool = True) -> Comparison:
    """The comparison, failed where `got` has another dtype or, with `shapes`, another shape than
    `promised`."""
    if not isinstance(got, torch.Tensor) or not isinstance(promised, torch.Tensor):
        return comparison
    if got.dtype != promised.dtype:
        info = f"Inconsistent dtypes: {got.dtype} {promised.dtype}"
    elif shapes and got.shape != promised.shape:
        info = f"Inconsistent shape: {tuple(got.shape)} {tuple(promised.shape)}"
    else:
        return comparison
    return replace(comparison, allclose=False, error_info=info, ratio=math.inf, fp64=False)


def _compare_numbers(name: str, got: Any, reference: Any, allowed: Tolerance) -> Comparison:
    if got != got and reference != reference:
        return Comparison(name, True, tolerance=allowed)
    error = 0.0 if got == reference else abs(got - reference)
    bound = allowed.atol + allowed.rtol * abs(reference)
    close = math.isfinite(error) and error <= bound
    relative = error / abs(reference) if reference else (math.inf if error else 0.0)
    ratio = error / bound if bound and math.isfinite(error) else (math.inf if error else 0.0)
    cosine = 1.0 if close or (got * reference).real > 0 else -1.0
    return Comparison(name, close, cosine, float(error), float(relative), allowed, "", ratio, close)


def _compare_tensors(
    name: str, got: torch.Tensor, reference: torch.Tensor, allowed: Tolerance, eager: Any,
    scale: float,
) -> Comparison:  # fmt: skip
    if got.shape != reference.shape:
        info = f"Inconsistent shape: {tuple(got.shape)} {tuple(reference.shape)}"
        return Comparison(name, False, 0.0, math.inf, math.inf, allowed, info, math.inf, False)
    info = ""
    if got.dtype != reference.dtype:
        info = f"Inconsistent dtypes: {got.dtype} {reference.dtype}"
    found = _errors(got, reference, allowed)
    close = found.ratio <= 1
    fp64 = close if eager is None else _fp64_holds(got, reference, eager, found, scale)
    return Comparison(
        name, close, found.cosine, found.largest, found.relative, allowed, info, found.ratio, fp64
    )


@dataclass
class _Errors:
    largest: float = 0.0
    relative: float = 0.0
    ratio: float = 0.0
    product: float = 0.0
    own: float = 0.0
    other: float = 0.0
    peak: float = 0.0

    @property
    def cosine(self) -> float:
        if self.own == self.other == 0:
            return 1.0
        length = math.sqrt(self.own) * math.sqrt(self.other)
        return self.product / length if length else 0.0


def _errors(got: torch.Tensor, reference: torch.Tensor, allowed: Tolerance) -> _Errors:
    found = _Errors()
    for a, b in _chunks(got, reference):
        error, size = (a - b).abs(), b.abs()
        finite = a.isfinite() & b.isfinite()
        if not finite.all():
            same = (a == b) | (a.isnan() & b.isnan())
            error = torch.where(same, error.new_zeros(()), error)
            error = torch.where(error.isnan(), error.new_full((), math.inf), error)
            size = torch.where(b.isfinite(), size, error.new_zeros(()))
            a, b = (torch.where(finite, v, v.new_zeros(())) for v in (a, b))
        largest = float(error.max())
        if largest:
            bound = allowed.atol + allowed.rtol * size
            found.largest = max(found.largest, largest)
            found.relative = max(found.relative, _largest_quotient(error, size))
            found.ratio = max(found.ratio, _largest_quotient(error, bound))
        found.peak = max(found.peak, float(size.max()))
        found.product += float((a * b.conj()).sum().real)
        found.own += float((a * a.conj()).sum().real)
        found.other += float((b * b.conj()).sum().real)
    return found


def _largest_quotient(error: torch.Tensor, size: torch.Tensor) -> float:
    quotient = error / size
    return float(torch.where(error == 0, error.new_zeros(()), quotient).max())


def _chunks(
    got: torch.Tensor, reference: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors piece by piece on the CPU, in float64 or complex128."""
    yield from zip(dense_chunks(got), dense_chunks(reference), strict=True)


def dense_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's values piece by piece on the CPU, flat, in float64 or complex128."""
    flat = _dense(tensor)
    for start in range(0, flat.numel(), _CHUNK):
        yield _wide(flat[start : start + _CHUNK])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.reshape(-1)


def _wide(part: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if part.dtype.is_complex else torch.float64
    return part.cpu().to(wide)


def _fp64_holds(
    got: torch.Tensor, reference: torch.Tensor, eager: Any, found: _Errors, scale: float
) -> bool:
    """error <= 2 * eager's own error + floor, of the largest error and of the reference's scale."""
    if not isinstance(eager, torch.Tensor) or eager.shape != got.shape:
        return found.ratio <= 1
    if got.dtype not in FLOOR_ULPS:
        return found.largest == 0 or found.ratio <= 1
    # On the CPU the call is eager's own: its errors are those of `got`.
    own = found if eager is got else _errors(eager, reference, _EXACT)
    largest = found.largest, own.largest
    if eager is not got and math.isinf(own.largest):
        largest = _finite_errors(got, reference, eager)
    floor = _rounding(got.dtype) * found.peak
    # Sums are in float32 at least.
    floor += min(_rounding(got.dtype), _rounding(torch.float32)) * scale
    return largest[0] <= 2 * largest[1] + floor + torch.finfo(got.dtype).tiny


def _finite_errors(
    got: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor
) -> tuple[float, float]:
    """The largest errors of `got` and of eager, which is infinite or NaN where float64 is not, or
    the reverse: there `got` has no error where it agrees with eager, and eager has none."""
    mine = its = 0.0
    for a, b, e in zip(*map(dense_chunks, (got, reference, eager)), strict=True):
        odd = (e.isfinite() != b.isfinite()) | (e.isnan() != b.isnan())
        a = torch.where(odd & ((a == e) | (a.isnan() & e.isnan())), b, a)
        e = torch.where(odd, b, e)
        mine = max(mine, _errors(a, b, _EXACT).largest)
        its = max(its, _errors(e, b, _EXACT).largest)
    return mine, its


def _rounding(dtype: torch.dtype) -> float:
    """The error, relative to the largest value, that is allowed where eager happens to be exact."""
    return FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
