"""Elementwise operators. Narrow floating point is computed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.dtypes import REDUCED_FLOATS
from dicp.graphop.interpreter import Semantics

aten = torch.ops.aten

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin,
    "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh,
    "BesselI0e": torch.special.i0e, "Ceil": torch.ceil,
    "Cos": torch.cos, "Cosh": torch.cosh, "Digamma": torch.digamma, "Erf": torch.erf,
    "Erfc": torch.erfc, "Erfinv": torch.erfinv, "Expm1": torch.expm1, "Floor": torch.floor,
    "Identity": torch.clone, "Invert": torch.bitwise_not,
    "IsInf": torch.isinf, "IsNan": torch.isnan, "Lgamma": torch.lgamma, "Log1p": torch.log1p,
    "LogicalNot": torch.logical_not, "Mish": F.mish, "Neg": torch.neg,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Rint": torch.round, "Rsqrt": torch.rsqrt, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Square": torch.square,
    "Tan": torch.tan, "Tanh": torch.tanh, "TensorMove": torch.clone,
    "Trunc": torch.trunc, "HardSwish": F.hardswish,
}  # fmt: skip


def _quotient(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`function`, in which integers divided by 0 are any number."""

    def apply(x: Tensor, y: Tensor) -> Tensor:
        return function(x, y if y.dtype.is_floating_point else torch.where(y == 0, 1, y))

    return apply


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Atan2": torch.atan2, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq,
    "FloorDiv": _quotient(torch.floor_divide), "FloorMod": _quotient(torch.remainder),
    "Greater": torch.gt,
    "GreaterEqual": torch.ge, "LeftShift": torch.bitwise_left_shift, "Less": torch.lt,
    "LessEqual": torch.le, "LogicalAnd": torch.logical_and, "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum, "Minimum": torch.minimum, "Mod": _quotient(torch.fmod),
    "Mul": torch.mul,
    "NextAfter": torch.nextafter, "NotEqual": torch.ne, "Pow": torch.pow,
    "RightShift": torch.bitwise_right_shift,
    "Sub": torch.sub, "TruncateDiv": _quotient(lambda x, y: torch.div(x, y, rounding_mode="trunc")),
}  # fmt: skip


def real_div(x1: Tensor, x2: Tensor) -> Tensor:
    """True division in the operands' own type: integers are cut."""
    if x1.dtype.is_floating_point:
        return torch.div(x1, x2)
    return torch.div(x1, x2, rounding_mode="trunc")


def cast(x: Tensor, dst_type: Any) -> Tensor:
    return x.to(dst_type)


def exp(x: Tensor, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """base ** (scale x + shift); a base of -1 stands for e."""
    if base == -1.0 and scale == 1.0 and shift == 0.0:
        return torch.exp(x)
    inner = _wide(x) * scale + shift
    result = torch.exp(inner) if base == -1.0 else torch.exp(inner * math.log(base))
    return (torch.exp2(inner) if base == 2.0 else result).to(x.dtype)


def log(x: Tensor, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """log_base(scale x + shift); a base of -1 stands for e."""
    known = {-1.0: torch.log, 2.0: torch.log2, 10.0: torch.log10}
    if scale == 1.0 and shift == 0.0 and base in known:
        return known[base](x)
    return (torch.log(_wide(x) * scale + shift) / math.log(base)).to(x.dtype)


def axpy(x1: Tensor, x2: Tensor, alpha: Tensor) -> Tensor:
    """x1 + alpha x2, rounded once."""
    return (_wider(x1) + _wider(alpha) * _wider(x2)).to(x1.dtype)


def select(condition: Tensor, then: Tensor, other: Tensor) -> Tensor:
    return torch.where(condition, then, other)


def addcmul(x: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    """x + value x1 x2, rounded once."""
    return (_wide(x) + _wide(value) * _wide(x1) * _wide(x2)).to(x.dtype)


def addcdiv(x: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    """x + value x1 / x2, rounded once."""
    return (_wide(x) + _wide(value) * (_wide(x1) / _wide(x2))).to(x.dtype)


def gelu_v2(x: Tensor, approximate: str = "none") -> Tensor:
    # In double: far below zero eager's own kernels differ with the strides of what they are given.
    return F.gelu(x.double(), approximate=approximate).to(x.dtype)


def gelu_grad_v2(dy: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return aten.gelu_backward(dy, x, approximate=approximate)


def swish(x: Tensor, scale: float = 1.0) -> Tensor:
    if scale == 1.0:
        return F.silu(x)
    wide = _wide(x)
    return (wide * torch.sigmoid(scale * wide)).to(x.dtype)


def swish_grad(grad: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    wide = _wide(x)
    gate = torch.sigmoid(scale * wide)
    return (_wide(grad) * (gate + scale * wide * gate * (1 - gate))).to(x.dtype)


def leaky_relu(x: Tensor, negative_slope: float = 0.0) -> Tensor:
    return F.leaky_relu(x, negative_slope)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return F.softplus(x, beta, threshold)


def sigmoid_grad(y: Tensor, dy: Tensor) -> Tensor:
    return aten.sigmoid_backward(dy, y)


def tanh_grad(y: Tensor, dy: Tensor) -> Tensor:
    return aten.tanh_backward(dy, y)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(start, end, weight)


def _wider(x: Tensor) -> Tensor:
    """In a type that holds products exactly, where there is one."""
    return x.double() if x.dtype == torch.float32 else _wide(x)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in REDUCED_FLOATS else x


def register(semantics: Semantics) -> None:
    semantics.update(UNARY)
    semantics.update(BINARY)
    semantics.update({
        "RealDiv": real_div, "Cast": cast, "Exp": exp, "Log": log,
        "AxpyV2": axpy, "SelectV2": select, "Addcmul": addcmul,
        "Addcdiv": addcdiv, "GeluV2": gelu_v2, "GeluGradV2": gelu_grad_v2, "Swish": swish,
        "SwishGrad": swish_grad,
        "LeakyRelu": leaky_relu,
        "SoftplusV2": softplus,
        "SigmoidGrad": sigmoid_grad, "TanhGrad": tanh_grad,
        "Lerp": lerp,
        "HardSwishGrad": aten.hardswish_backward.default,
    })  # fmt: skip
