"""Elementwise arithmetic, comparison, logic and conversion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS, opmath_dtype, power_of_ten
from dicp.graphop.operators import NoRule, Operand, Ops, Value
from dicp.rules import RuleTable
from dicp.torch_private import schema_of

aten = torch.ops.aten
prims = torch.ops.prims
RULES = RuleTable()
rule = RULES.register

REAL_FUNCTIONS = {
    aten.acos: "Acos", aten.acosh: "Acosh", aten.asin: "Asin", aten.asinh: "Asinh",
    aten.atan: "Atan", aten.atanh: "Atanh", aten.cos: "Cos", aten.cosh: "Cosh",
    aten.erf: "Erf", aten.erfc: "Erfc", aten.erfinv: "Erfinv", aten.exp: "Exp",
    aten.expm1: "Expm1", aten.log: "Log", aten.log1p: "Log1p", aten.reciprocal: "Reciprocal",
    aten.rsqrt: "Rsqrt", aten.sigmoid: "Sigmoid", aten.sin: "Sin", aten.sinh: "Sinh",
    aten.sqrt: "Sqrt", aten.tan: "Tan", aten.tanh: "Tanh",
}  # fmt: skip
"""Operators computed in the result's floating-point dtype."""

NUMBER_FUNCTIONS = {
    aten.abs: "Abs", aten.neg: "Neg", aten.relu: "Relu", aten.square: "Square",
}  # fmt: skip
"""Operators computed in the operand's own dtype."""

ROUNDINGS = {aten.ceil: "Ceil", aten.floor: "Floor", aten.trunc: "Trunc", aten.round: "Round"}
"""Operators that return integers unchanged."""

TESTS = {aten.isnan: ("IsNan", False), aten.isinf: ("IsInf", False)}
"""Predicates of floating-point numbers, with their result for integers."""

ARITHMETIC = {
    aten.atan2: "Atan2", aten.maximum: "Maximum", aten.minimum: "Minimum", aten.fmod: "Mod",
    aten.remainder: "FloorMod",
}  # fmt: skip
"""Operators computed in the result's dtype, to which eager rounds numbers."""

COMPARISONS = {
    aten.eq: "Equal", aten.ne: "NotEqual", aten.lt: "Less", aten.le: "LessEqual",
    aten.gt: "Greater", aten.ge: "GreaterEqual",
}  # fmt: skip

BITWISE = {
    aten.bitwise_and: ("BitwiseAnd", "LogicalAnd"), aten.bitwise_or: ("BitwiseOr", "LogicalOr"),
    aten.bitwise_xor: ("BitwiseXor", "NotEqual"),
}  # fmt: skip
"""Operators on integers and on booleans."""

SHIFTS = {
    aten.bitwise_left_shift: "LeftShift", aten.bitwise_right_shift: "RightShift",
    aten.__lshift__: "LeftShift", aten.__rshift__: "RightShift",
}  # fmt: skip


def _overloads(packet: Any, *names: str) -> list[Any]:
    return [getattr(packet, n) for n in packet.overloads() if n in names]


UNARY = ("default",)
BINARY = ("default", "Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor", "Tensor_Tensor")


def _takes_tensor(op: Any) -> bool:
    return any("Tensor" in str(a.type) for a in schema_of(op).arguments)


def _add_all(table: dict[Any, Any], make: Callable[[Any], Any], names: tuple[str, ...]) -> None:
    for packet, kind in table.items():
        for op in _overloads(packet, *names):
            if _takes_tensor(op):
                RULES.add(op, make(kind))


def _real(kind: str) -> Any:
    return lambda g, x: g.op(kind, g.cast(x, g.dtype))


def _number(kind: str) -> Any:
    def apply(g: Ops, x: Value) -> Value:
        return x if x.dtype == torch.bool and kind == "Abs" else g.op(kind, x)

    return apply


def _rounding(kind: str) -> Any:
    return lambda g, x: g.op(kind, x) if x.dtype.is_floating_point else x


def _test(entry: tuple[str, bool]) -> Any:
    def apply(g: Ops, x: Value) -> Value:
        kind, otherwise = entry
        if x.dtype.is_floating_point:
            return g.op(kind, x)
        return g.full(x.shape, otherwise, torch.bool)

    return apply


def _arithmetic(kind: str) -> Any:
    def apply(g: Ops, x: Operand, y: Operand) -> Value:
        if g.dtype == torch.bool:
            table = {"Maximum": "LogicalOr", "Minimum": "LogicalAnd"}
            if kind not in table:
                raise NoRule(f"{kind} of booleans")
            return g.op(table[kind], g.as_type(x, torch.bool), g.as_type(y, torch.bool))
        return g.op(kind, g.as_type(x, g.dtype), g.as_type(y, g.dtype))

    return apply


@rule(aten.nextafter.default)
def nextafter(g: Ops, x: Value, y: Value) -> Value:
    if g.dtype in REDUCED_FLOATS and not g.takes("NextAfter", "x1", g.dtype):
        raise NoRule("the neighbour of a 16-bit float is not that of a wider one")
    return g.op("NextAfter", g.as_type(x, g.dtype), g.as_type(y, g.dtype))


def _common_dtype(x: Operand, y: Operand) -> torch.dtype:
    """The dtype that eager computes in: tensors with dimensions take precedence over 0-dim tensors,
    those over numbers."""
    return torch.result_type(_example(x), _example(y))


def _example(x: Operand) -> Any:
    if isinstance(x, Value):
        return torch.empty((1,) * x.ndim, dtype=x.dtype, device="meta")
    if isinstance(x, torch.SymFloat):
        return 1.5
    return 1 if isinstance(x, torch.SymInt) else x


def _comparison(kind: str) -> Any:
    def apply(g: Ops, x: Operand, y: Operand) -> Value:
        dtype = _common_dtype(x, y)
        if dtype == torch.bool and kind not in ("Equal", "NotEqual"):
            dtype = torch.int32
        return g.op(kind, g.as_type(x, dtype), g.as_type(y, dtype))

    return apply


def _bitwise(kinds: tuple[str, str]) -> Any:
    def apply(g: Ops, x: Operand, y: Operand) -> Value:
        return g.binary(kinds[g.dtype == torch.bool], x, y)

    return apply


def _shift(kind: str) -> Any:
    return lambda g, x, y: g.binary(kind, x, y)


def _logical(kind: str) -> Any:
    def apply(g: Ops, x: Value, y: Value) -> Value:
        dtype = _common_dtype(x, y)  # in which a tiny number may be 0
        x, y = (g.cast(z, dtype) if z.dtype.is_floating_point else z for z in (x, y))
        return g.op(kind, g.truth(x), g.truth(y))

    return apply


_add_all(REAL_FUNCTIONS, _real, UNARY)
_add_all(NUMBER_FUNCTIONS, _number, UNARY)
_add_all(ROUNDINGS, _rounding, UNARY)
_add_all(TESTS, _test, UNARY)
_add_all(ARITHMETIC, _arithmetic, BINARY)
_add_all(COMPARISONS, _comparison, BINARY)
_add_all(BITWISE, _bitwise, BINARY)
_add_all(SHIFTS, _shift, BINARY)


RULES.update({
    aten.sign.default: lambda g, x: x if x.dtype == torch.bool else g.op("Sign", x),
    aten.log2.default: lambda g, x: g.op("Log", g.cast(x, g.dtype), base=2.0),
    aten.log10.default: lambda g, x: g.op("Log", g.cast(x, g.dtype), base=10.0),
    aten.exp2.default: lambda g, x: g.op("Exp", g.cast(x, g.dtype), base=2.0),
    aten.bitwise_not.default:
        lambda g, x: g.op("LogicalNot" if x.dtype == torch.bool else "Invert", x),
    aten.logical_not.default: lambda g, x: g.op("LogicalNot", g.truth(x)),
    aten.logical_and.default: _logical("LogicalAnd"),
    aten.logical_or.default: _logical("LogicalOr"),
    aten.logical_xor.default: _logical("NotEqual"),
})  # fmt: skip


@rule(aten.signbit.default)
def signbit(g: Ops, x: Value) -> Value:
    if x.dtype == torch.bool or not x.dtype.is_signed:
        return g.full(x.shape, False, torch.bool)
    if not x.dtype.is_floating_point:
        return g.op("Less", x, g.number(0, x.dtype))
    if x.dtype.itemsize == 2:  # Bitcast does not take every 16-bit float; float32 keeps the sign
        x = g.cast(x, torch.float32)
    bits = {4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return g.op("Less", g.op("Bitcast", x, type=bits), g.number(0, bits))


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(g: Ops, x: Value, y: Any) -> Value:
    size = g.op("Abs", g.cast(x, g.dtype))
    if isinstance(y, Value):
        return g.op("Select", signbit(g, g.cast(y, g.dtype)), g.op("Neg", size), size)
    if not isinstance(y, int | float):
        raise NoRule("the sign of a symbolic number")
    return g.op("Neg", size) if math.copysign(1.0, y) < 0 else size


# ---- sums and products ---------------------------------------------------------------------------


def _scaled_sum(g: Ops, x: Operand, y: Operand, alpha: Any) -> Value:
    """x + alpha y, rounded once."""
    dtype = g.dtype
    if dtype == torch.bool:
        right = g.as_type(y, dtype)
        if not isinstance(alpha, int | float):
            raise NoRule("a symbolic factor of a bool")
        if not alpha:
            right = g.op("LogicalAnd", right, g.number(False, dtype))
        return g.op("LogicalOr", g.as_type(x, dtype), right)
    if dtype.is_floating_point and isinstance(y, Value):
        wide = g.compute_dtype(dtype, x, alpha)
        operands = (g.as_type(x, wide), g.as_type(y, wide), g.number(alpha, wide))
        return g.cast(g.op("Axpy", *operands), dtype)
    if not isinstance(y, Value):
        return g.binary("Add", x, y * alpha)
    return g.binary("Add", x, g.binary("Mul", y, alpha))


@rule(aten.add.Tensor, aten.add.Scalar)
def add(g: Ops, x: Value, y: Operand, alpha: Any = 1) -> Value:
    if g.dtype == torch.bool or alpha != 1:
        return _scaled_sum(g, x, y, alpha)
    return g.binary("Add", x, y)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(g: Ops, x: Value, y: Operand, alpha: Any = 1) -> Value:
    return g.binary("Sub", x, y) if alpha == 1 else _scaled_sum(g, x, y, -alpha)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(g: Ops, x: Value, y: Operand, alpha: Any = 1) -> Value:
    if alpha == 1:
        return g.binary("Sub", y, x)
    return _scaled_sum(g, y, x, -alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(g: Ops, x: Value, y: Operand) -> Value:
    if g.dtype == torch.bool:
        return g.op("LogicalAnd", g.as_type(x, torch.bool), g.as_type(y, torch.bool))
    return _scaled(g, "Mul", x, y)


def _scaled(g: Ops, kind: str, x: Operand, y: Operand) -> Value:
    """A product or quotient; as in eager, a 0-dim `y` is not rounded to 16 bits before it."""
    exact = isinstance(y, Value) and y.ndim == 0
    return g.cast(g.binary(kind, x, y, opmath_dtype(g.dtype) if exact else g.dtype), g.dtype)


@rule(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def div(g: Ops, x: Value, y: Operand) -> Value:
    return _scaled(g, "Div", x, y)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(g: Ops, x: Value, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(g, x, y)
    if rounding_mode == "floor":
        return _scaled(g, "FloorDiv", x, y)
    if not g.dtype.is_floating_point:
        return g.binary("TruncateDiv", x, y)
    # as in eager: the quotient is truncated before it is rounded to a 16-bit float
    wide = opmath_dtype(g.dtype)
    quotient = g.op("Div", g.as_type(x, wide), g.as_type(y, wide))
    return g.cast(g.op("Trunc", quotient), g.dtype)


RULES.update({
    (aten.floor_divide.default, aten.floor_divide.Scalar):
        lambda g, x, y: _scaled(g, "FloorDiv", x, y),
    aten.addcmul.default: lambda g, x, a, b, value=1: _add_combined(g, "Addcmul", x, a, b, value),
    aten.addcdiv.default: lambda g, x, a, b, value=1: _add_combined(g, "Addcdiv", x, a, b, value),
})  # fmt: skip


@rule(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def pow(g: Ops, x: Operand, y: Operand) -> Value:
    if isinstance(x, Value) and y == 2 and g.dtype == x.dtype:
        return g.op("Square", x)
    # eager on the CPU takes no square root in float16, which differs for -0.0 and -inf
    root = y in (0.5, -0.5) and g.dtype != torch.float16
    if isinstance(x, Value) and root and y == 0.5:
        return g.op("Sqrt", g.cast(x, g.dtype))
    if isinstance(x, Value) and (root or y == -1) and g.dtype.is_floating_point:
        return g.op("Rsqrt" if y == -0.5 else "Reciprocal", g.cast(x, g.dtype))
    return g.binary("Pow", x, y)


def _add_combined(g: Ops, kind: str, x: Value, a: Value, b: Value, value: Any) -> Value:
    wide = g.compute_dtype(g.dtype, value)
    operands = [g.as_type(v, wide) for v in (x, a, b, value)]
    return g.cast(g.op(kind, *operands), g.dtype)


def fma(g: Ops, x: Operand, y: Operand, z: Operand) -> Value:
    one = g.number(1, g.dtype)
    return g.op("Addcmul", *(g.as_type(v, g.dtype) for v in (z, x, y)), one)


RULES.add_named("prims::fma", fma)  # Dynamo registers it


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(g: Ops, start: Value, end: Value, weight: Operand) -> Value:
    wide = g.compute_dtype(g.dtype, weight)
    return g.cast(g.op("Lerp", *(g.as_type(v, wide) for v in (start, end, weight))), g.dtype)


# ---- limits --------------------------------------------------------------------------------------


def _limit(g: Ops, kind: str, x: Value, bound: Operand) -> Value:
    return x if bound is None else g.binary(kind, x, bound)


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(g: Ops, x: Value, min: Operand = None, max: Operand = None) -> Value:
    return _limit(g, "Minimum", _limit(g, "Maximum", g.cast(x, g.dtype), min), max)


RULES.update({
    (aten.clamp_min.default, aten.clamp_min.Tensor): lambda g, x, min: _limit(g, "Maximum", x, min),
    (aten.clamp_max.default, aten.clamp_max.Tensor): lambda g, x, max: _limit(g, "Minimum", x, max),
})  # fmt: skip


def _prefer_number(kind: str) -> Any:
    """The larger or smaller operand; where one is NaN, the other."""

    def apply(g: Ops, x: Value, y: Value) -> Value:
        x, y = g.cast(x, g.dtype), g.cast(y, g.dtype)
        result = g.op(kind, x, y)
        if not g.dtype.is_floating_point:
            return result
        result = g.op("Select", g.op("IsNan", y), g.broadcast(x, result.shape), result)
        return g.op("Select", g.op("IsNan", x), g.broadcast(y, result.shape), result)

    return apply


RULES.add(aten.fmax.default, _prefer_number("Maximum"))
RULES.add(aten.fmin.default, _prefer_number("Minimum"))


@rule(aten.nan_to_num.default)
def nan_to_num(g: Ops, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    if not x.dtype.is_floating_point:
        return x
    info = torch.finfo(x.dtype)
    top = info.max if posinf is None else posinf
    bottom = info.min if neginf is None else neginf
    result = g.where(g.op("IsNan", x), 0.0 if nan is None else nan, x, x.dtype)
    result = g.where(g.op("Equal", x, g.const(math.inf, x.dtype)), top, result, x.dtype)
    return g.where(g.op("Equal", x, g.const(-math.inf, x.dtype)), bottom, result, x.dtype)


# ---- selection and conversion --------------------------------------------------------------------


@rule(prims.convert_element_type.default)
def convert(g: Ops, x: Value, dtype: torch.dtype) -> Value:
    return g.cast(x, dtype) if x.dtype != dtype else g.op("Identity", x)


@rule(aten.round.decimals)
def round_decimals(g: Ops, x: Value, decimals: int = 0) -> Value:
    if decimals == 0:
        return _rounding("Round")(g, x)
    if not x.dtype.is_floating_point:
        raise NoRule("integers rounded to digits, which eager refuses")
    scale = power_of_ten(abs(decimals))
    first, second = ("Mul", "Div") if decimals > 0 else ("Div", "Mul")
    wide = g.wide(x)
    inner = g.op("Round", g.op(first, wide, g.const(scale, wide.dtype)))
    return g.cast(g.op(second, inner, g.const(scale, wide.dtype)), x.dtype)


@rule(aten.hypot.default)
def hypot(g: Ops, x: Value, y: Value) -> Value:
    """Scaled by the larger operand, so that squares stay finite."""
    a, b = (g.op("Abs", g.wide(g.cast(v, g.dtype))) for v in (x, y))
    large, small = g.op("Maximum", a, b), g.op("Minimum", a, b)
    ratio = g.div(small, large)
    root = g.mul(large, g.op("Sqrt", g.add(g.op("Square", ratio), 1.0)))
    plain = g.op("LogicalOr", g.op("Equal", large, g.number(0, large.dtype)), g.op("IsInf", small))
    result = g.op("Select", plain, large, root)
    infinite = g.op("LogicalOr", g.op("IsInf", a), g.op("IsInf", b))
    return g.cast(g.where(infinite, math.inf, result, result.dtype), g.dtype)


@rule(prims.bessel_i0.default)
def bessel_i0(g: Ops, x: Value) -> Value:
    """The operator is the function scaled by e^-|x|."""
    return g.op("Mul", g.op("BesselI0e", x), g.op("Exp", g.op("Abs", x)))


@rule(aten.heaviside.default)
def heaviside(g: Ops, x: Value, values: Value) -> Value:
    zero = g.number(0, x.dtype)
    step = g.cast(g.op("Greater", x, zero), g.dtype)
    step = g.where(g.op("IsNan", x), 0, step, g.dtype) if x.dtype in REDUCED_FLOATS else step
    return g.op("Select", g.op("Equal", x, zero), g.cast(values, g.dtype), step)


@rule(aten.xlogy.Tensor)
def xlogy(g: Ops, x: Value, y: Value) -> Value:
    """x log y, where 0 log anything but NaN is 0."""
    a, b = g.wide(g.cast(x, g.dtype)), g.wide(g.cast(y, g.dtype))
    product = g.mul(a, g.op("Log", b))
    zero = g.op("Equal", a, g.number(0, a.dtype))
    plain = g.op("LogicalAnd", zero, g.op("LogicalNot", g.op("IsNan", b)))
    return g.cast(g.where(plain, 0.0, product, a.dtype), g.dtype)


RULES.update({
    (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar):
        lambda g, condition, x, y: g.where(g.truth(condition), x, y, g.dtype),
    (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        lambda g, x, mask, value: g.where(mask, value, x, g.dtype),
    aten._to_copy.default: lambda g, x, **options: convert(g, x, g.dtype),
    prims.bessel_i0e.default: lambda g, x: g.op("BesselI0e", x),
})  # fmt: skip
