"""Operators whose Scalar changes from call to call, as functions of a tensor of it.

Learning rates and step sizes are such Scalars. As a tensor the number is data, so that one program
serves every number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dicp.dtypes import REDUCED_FLOATS, fits
from dicp.torch_private import OpOverload, schema_of

aten = torch.ops.aten
Number = bool | int | float | complex
KINDS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def number_tensor(number: Number) -> Tensor:
    """A host tensor without dimensions that holds a number."""
    return torch.tensor(number, dtype=KINDS[type(number)], device="cpu")


def add(self: Tensor, other: Tensor, *, alpha: Tensor) -> Tensor:
    return _exact(self) + _exact(other) * alpha


def sub(self: Tensor, other: Tensor, *, alpha: Tensor) -> Tensor:
    return _exact(self) - _exact(other) * alpha


def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Tensor) -> Tensor:
    return _exact(self) + _exact(tensor1) * value * _exact(tensor2)


def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Tensor) -> Tensor:
    return _exact(self) + _exact(tensor1) * value / _exact(tensor2)


def lerp(self: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    start = _exact(self)
    return torch.lerp(start, _exact(end), weight.to(start.dtype))


def fill(self: Tensor, value: Tensor) -> Tensor:
    return torch.fill(self, value)


def power(self: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(_exact(self), _exact(exponent.to(self.dtype)))


def leaky_relu(self: Tensor, negative_slope: Tensor) -> Tensor:
    given = _exact(self)
    return torch.where(given > 0, given, given * negative_slope)


def leaky_relu_backward(
    grad_output: Tensor, self: Tensor, negative_slope: Tensor, self_is_result: bool
) -> Tensor:
    grad = _exact(grad_output)
    return torch.where(self > 0, grad, grad * negative_slope)


def _comparison(op: OpOverload) -> Callable[..., Tensor]:
    def compare(self: Tensor, other: Tensor) -> Any:
        return op(self, other.to(self.dtype))

    return compare


def _exact(tensor: Tensor) -> Tensor:
    """In the dtype that eager computes in, and rounds from once."""
    return tensor.float() if tensor.dtype in REDUCED_FLOATS else tensor


SCALARS: dict[OpOverload, tuple[str, Callable[..., Tensor]]] = {
    aten.add.Tensor: ("alpha", add),
    aten.sub.Tensor: ("alpha", sub),
    aten.addcmul.default: ("value", addcmul),
    aten.addcdiv.default: ("value", addcdiv),
    aten.lerp.Scalar: ("weight", lerp),
    aten.fill.Scalar: ("value", fill),
    aten.pow.Tensor_Scalar: ("exponent", power),
    aten.leaky_relu.default: ("negative_slope", leaky_relu),
    aten.leaky_relu_backward.default: ("negative_slope", leaky_relu_backward),
    **{
        packet.Scalar: ("other", _comparison(packet.Tensor))
        for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    },
}
"""The Scalar of a functional operator, and the function."""
OWN_KERNELS = {aten.pow.Tensor_Scalar: (-2, -1, -0.5, 0, 0.5, 1, 2, 3)}
"""Numbers with a kernel of their own, but for float16: the square root of -inf is not its power."""


def with_tensor_for_scalar(
    op: OpOverload, given: Mapping[str, Any], result: torch.dtype
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What computes `op`, and its arguments: a function of SCALARS, else `op` as it is.

    A number stays one where it is the default, a factor of 1, or has a kernel of its own; where the
    operands' dtypes differ or the number promotes them; and where the dtype does not hold it, which
    eager refuses. Powers of integers have no negative exponents, which are checked as numbers.
    """
    if op in SCALARS:
        name, function = SCALARS[op]
        values = {a.name: given[a.name] for a in schema_of(op).arguments}
        default = next(a.default_value for a in schema_of(op).arguments if a.name == name)
        dtypes = {value.dtype for value in values.values() if isinstance(value, Tensor)}
        kept = (default, *(() if torch.float16 in dtypes else OWN_KERNELS.get(op, ())))
        if len(dtypes) == 1 and result in (*dtypes, torch.bool) and values[name] not in kept:
            (dtype,) = dtypes
            number = values[name]
            if op == aten.fill.Scalar:
                number = _as_eager_rounds(dtype, number)
            whole = not (dtype.is_floating_point or dtype.is_complex)
            if _holds(dtype, number) and not (op in OWN_KERNELS and whole):
                return function, {**given, name: number_tensor(number)}
    return op, dict(given)


def _as_eager_rounds(dtype: torch.dtype, number: Number) -> Number:
    """A number that a tensor is filled with, rounded as eager does: a tensor of it promotes."""
    if isinstance(number, float) and not dtype.is_floating_point and fits(number, dtype):
        return bool(number) if dtype == torch.bool else number if dtype.is_complex else int(number)
    return number


def _holds(dtype: torch.dtype, number: Number) -> bool:
    """Whether a number promotes no tensor of that dtype, and does not overflow it."""
    if torch.result_type(torch.empty(1, dtype=dtype, device="cpu"), number) != dtype:
        return False
    if isinstance(number, complex):
        return True
    return fits(number, dtype) and fits(number, KINDS[type(number)])
