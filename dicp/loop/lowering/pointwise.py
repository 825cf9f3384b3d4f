"""Elementwise operators: one table row each where the operator is one scalar operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS, power_of_ten
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const, opmath
from dicp.loop.ir.index import Index
from dicp.loop.lowering.conditions import compare, is_nan, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import HOST

aten = torch.ops.aten
POINTWISE = RuleTable()
rule = POINTWISE.register


def is_number(x: Any) -> bool:
    """Whether an operand is a number, and no tensor."""
    return not isinstance(x, Value)


def elementwise(
    lw: Lowering,
    args: tuple[Any, ...],
    fn: Callable[..., Expr],
    compute: torch.dtype | None = None,
    out: torch.dtype | None = None,
) -> Value:
    """`fn` over the broadcast elements of `args`, each converted to the dtype `compute`."""
    meta = lw.meta()
    dtype = meta.dtype if compute is None else compute
    shape = sizes_of(meta.shape)

    def body(idx: tuple[Index, ...]) -> Expr:
        operands = [
            lw.scalar(a, dtype) if is_number(a) else opmath(a.broadcast_at(idx), dtype)
            for a in args
        ]
        return fn(*operands)

    return lw.pointwise(shape, out or meta.dtype, body)


def promoted(lw: Lowering) -> torch.dtype:
    """The dtype that comparison operands are promoted to."""
    operands = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in lw.node.args[:2]]
    if len(operands) == 1:
        return operands[0].dtype  # type: ignore[no-any-return]
    operands = [_plain(a) for a in operands]
    return torch.result_type(operands[0], operands[1])


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymBool)):
        return 1
    return 1.0 if isinstance(value, torch.SymFloat) else value


def round_operands(lw: Lowering, args: Sequence[Any]) -> None:
    """See `Lowering.round_elements`."""
    for value in args:
        if isinstance(value, Value):
            lw.round_elements(value)


def same(op: str) -> Callable[..., Value]:
    """Operands and result share the result's dtype, to which eager rounds those of another."""

    def lowered(lw: Lowering, *args: Any) -> Value:
        dtype = lw.meta().dtype
        other = [is_number(a) or a.dtype != dtype for a in args]
        if op in JUMPING:
            round_operands(lw, args)

        def body(*operands: Expr) -> Expr:
            taken = (
                ir.as_stored(e) if rounds else e for e, rounds in zip(operands, other, strict=True)
            )
            return apply(op, dtype, *taken)

        return elementwise(lw, args, body)

    return lowered


def compared(op: str) -> Callable[..., Value]:
    """A comparison of operands rounded as when stored, so that fusion cannot change the result."""

    def test(*operands: Expr) -> Expr:
        return apply(op, torch.bool, *map(ir.as_stored, operands))

    def lowered(lw: Lowering, *args: Any) -> Value:
        round_operands(lw, args)
        return elementwise(lw, args, test, compute=promoted(lw), out=torch.bool)

    return lowered


def tested(op: str) -> Callable[..., Value]:
    """A predicate of one tensor. Rounding changes neither a sign nor whether a number is NaN."""

    def lowered(lw: Lowering, x: Value) -> Value:
        if op in ("isinf", "isnan", "signbit") and not x.dtype.is_floating_point:
            if op != "signbit" or x.dtype == torch.bool:
                return lw.pointwise(x.shape, torch.bool, lambda idx: const(False, torch.bool))
        if op not in ("isnan", "signbit"):
            lw.round_elements(x)
        return elementwise(lw, (x,), lambda e: apply(op, torch.bool, e), x.dtype, torch.bool)

    return lowered


SAME = {
    "abs": aten.abs, "neg": aten.neg, "sign": aten.sign, "reciprocal": aten.reciprocal,
    "maximum": aten.maximum, "minimum": aten.minimum, "fmax": aten.fmax, "fmin": aten.fmin,
    "exp": aten.exp, "exp2": aten.exp2, "expm1": aten.expm1,
    "log": aten.log, "log2": aten.log2, "log10": aten.log10, "log1p": aten.log1p,
    "sqrt": aten.sqrt, "rsqrt": aten.rsqrt, "sin": aten.sin, "cos": aten.cos, "tan": aten.tan,
    "asin": aten.asin, "acos": aten.acos, "atan": aten.atan, "atan2": aten.atan2,
    "sinh": aten.sinh, "cosh": aten.cosh, "tanh": aten.tanh, "asinh": aten.asinh,
    "acosh": aten.acosh, "atanh": aten.atanh, "erf": aten.erf, "erfc": aten.erfc,
    "erfinv": aten.erfinv, "lgamma": aten.lgamma, "digamma": aten.digamma,
    "hypot": aten.hypot, "copysign": aten.copysign,
    "sigmoid": aten.sigmoid, "fmod": aten.fmod, "bitwise_not": aten.bitwise_not,
    "bitwise_and": aten.bitwise_and, "bitwise_or": aten.bitwise_or,
    "bitwise_xor": aten.bitwise_xor, "lshift": aten.bitwise_left_shift,
    "rshift": aten.bitwise_right_shift, "remainder": aten.remainder,
}  # fmt: skip
JUMPING = frozenset({"fmod", "remainder", "sign"})
"""Those of SAME whose result jumps; see `Lowering.round_elements`."""
for _name, _op in SAME.items():
    POINTWISE.add(_op, same(_name))


@rule(aten.nextafter)
def nextafter(lw: Lowering, x: Value, y: Value) -> Value:
    if x.dtype in REDUCED_FLOATS:
        raise NoRule("the neighbour of a 16-bit float is not that of a wider one")
    return same("nextafter")(lw, x, y)


POINTWISE.add(aten.__lshift__, same("lshift"))
POINTWISE.add(aten.__rshift__, same("rshift"))

COMPARED = {
    "eq": aten.eq, "ne": aten.ne, "lt": aten.lt, "le": aten.le, "gt": aten.gt, "ge": aten.ge,
    "logical_and": aten.logical_and, "logical_or": aten.logical_or,
    "logical_xor": aten.logical_xor,
}  # fmt: skip
for _name, _op in COMPARED.items():
    POINTWISE.add(_op, compared(_name))

for _name, _op in {
    "isnan": aten.isnan,
    "isinf": aten.isinf,
    "signbit": aten.signbit,
    "logical_not": aten.logical_not,
}.items():
    POINTWISE.add(_op, tested(_name))


def _rounded(op: str) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, decimals: int = 0) -> Value:
        if not x.dtype.is_floating_point:
            if decimals:
                raise NoRule("integers rounded to digits, which eager refuses")
            return lw.copy(x)
        lw.round_elements(x)
        if not decimals:
            return elementwise(lw, (x,), lambda e: apply(op, x.dtype, e))
        scale = power_of_ten(abs(decimals))

        def body(e: Expr) -> Expr:
            if decimals > 0:
                return apply("round", x.dtype, e * scale) / scale
            return apply("round", x.dtype, e / scale) * scale

        return elementwise(lw, (x,), body)

    return lowered


for _name, _op in {
    "floor": aten.floor, "ceil": aten.ceil, "trunc": aten.trunc, "round": aten.round,
}.items():  # fmt: skip
    POINTWISE.add(_op, _rounded(_name))
POINTWISE.add(aten.fix, _rounded("trunc"))


@rule(aten.add.Tensor, aten.add.Scalar)
def add(lw: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    dtype = lw.meta().dtype
    if dtype == torch.bool:
        return elementwise(lw, (a, b), lambda x, y: _either(lw, x, y, alpha))
    return elementwise(lw, (a, b), lambda x, y: _plus(lw, x, y, alpha))


def _either(lw: Lowering, x: Expr, y: Expr, alpha: Any) -> Expr:
    """x or (alpha and y)."""
    if not isinstance(alpha, (int, float)):  # a symbol
        y = apply("logical_and", torch.bool, y, compare("ne", lw.scalar(alpha, torch.int64), 0))
    return x if alpha in (0, False) else apply("logical_or", torch.bool, x, y)


def _plus(lw: Lowering, x: Expr, y: Expr, alpha: Any) -> Expr:
    """x + alpha * y, rounded once as eager does it."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x + y
    return apply("fma", x.dtype, y, lw.scalar(alpha, x.dtype), x)


def _minus(lw: Lowering, x: Expr, y: Expr, alpha: Any) -> Expr:
    """x - alpha * y, rounded once as eager does it."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x - y
    return apply("fma", x.dtype, y, -lw.scalar(alpha, x.dtype), x)


def _scaled(lw: Lowering, x: Expr, alpha: Any) -> Expr:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x
    return x * lw.scalar(alpha, x.dtype)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(lw: Lowering, a: Any, b: Any) -> Value:
    if lw.meta().dtype == torch.bool:
        return elementwise(lw, (a, b), lambda x, y: apply("logical_and", torch.bool, x, y))
    return elementwise(lw, (a, b), lambda x, y: x * y)


@rule(
    aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode,
    aten.true_divide.Tensor, aten.true_divide.Scalar,
)  # fmt: skip
def div(lw: Lowering, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    dtype = lw.meta().dtype
    if rounding_mode is None:
        return elementwise(lw, (a, b), lambda x, y: x / y)
    op = "floor_div" if rounding_mode == "floor" else "trunc_div"
    round_operands(lw, (a, b))
    # eager rounds a dividend that is a number to the dtype, and no divisor
    taken = ir.as_stored if is_number(a) else lambda x: x
    return elementwise(lw, (a, b), lambda x, y: apply(op, dtype, taken(x), y))


@rule(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar)
def pow_(lw: Lowering, a: Any, b: Any) -> Value:
    out = lw.meta()
    if is_number(b) and isinstance(b, (int, float)) and (short := _small_power(b, out)):
        return elementwise(lw, (a,), short)
    return elementwise(lw, (a, b), lambda x, y: apply("pow", out.dtype, x, y))


def _small_power(exponent: float, out: torch.Tensor) -> Callable[[Expr], Expr] | None:
    dtype = out.dtype
    table: dict[float, Callable[[Expr], Expr]] = {
        1: lambda x: x,
        2: lambda x: x * x,
        3: lambda x: x * x * x,
    }
    if dtype.is_floating_point:
        table |= {
            -1: lambda x: apply("reciprocal", dtype, x),
            -2: lambda x: apply("reciprocal", dtype, x * x),
        }
        # eager on the CPU takes no root in float16, which differs from the power for -0.0 and -inf
        if dtype != torch.float16 or out.device.type != HOST:
            table |= {
                0.5: lambda x: apply("sqrt", dtype, x),
                -0.5: lambda x: apply("rsqrt", dtype, x),
            }
    if dtype == torch.bool:
        return None
    return table.get(exponent)


@rule(aten.ldexp.Tensor)
def ldexp(lw: Lowering, x: Value, exponent: Value) -> Value:
    """x * 2^exponent: scaled where a float has an integer exponent, even if the power alone would
    overflow or vanish; else a product with the power, as in eager."""
    dtype, wide = lw.meta().dtype, torch.float64
    if not x.dtype.is_floating_point or exponent.dtype.is_floating_point:
        power = exponent.dtype if exponent.dtype.is_floating_point else torch.float32
        if not exponent.ndim and x.dtype.is_floating_point:  # 2 is a number of the dtype of x
            power = torch.promote_types(x.dtype, power)
        return lw.map(
            lambda x, e: cast(x, dtype) * cast(apply("exp2", power, cast(e, power)), dtype),
            x, exponent, dtype=dtype,
        )  # fmt: skip
    # In float64 the power of a shorter float is exact; that of float64 itself takes three steps.
    steps, most = (3, const(2200.0, wide)) if dtype == wide else (1, const(1000.0, wide))

    def scaled(x: Expr, e: Expr) -> Expr:
        rest = apply("minimum", wide, apply("maximum", wide, e, -most), most)
        for left in range(steps, 0, -1):
            part = rest if left == 1 else apply("trunc", wide, rest / float(left))
            x, rest = x * apply("exp2", wide, part), rest - part
        return cast(x, dtype)

    return elementwise(lw, (x, exponent), scaled, compute=wide)


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(lw: Lowering, condition: Value, a: Any, b: Any) -> Value:
    meta = lw.meta()

    def body(idx: tuple[Index, ...]) -> Expr:
        test = cast(condition.broadcast_at(idx), torch.bool)
        x, y = (
            lw.element(v, meta.dtype) if is_number(v) else opmath(v.broadcast_at(idx), meta.dtype)
            for v in (a, b)
        )
        return apply("where", meta.dtype, test, x, y)

    return lw.pointwise(sizes_of(meta.shape), meta.dtype, body)


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(lw: Lowering, x: Value, low: Any = None, high: Any = None) -> Value:
    dtype = lw.meta().dtype
    args = [v for v in (low, high) if v is not None]

    def limited(op: str, e: Expr, bound: Expr, given: Any) -> Expr:
        return (
            apply(op, dtype, e, bound) if isinstance(given, Value) else apply(op, dtype, bound, e)
        )

    def body(e: Expr, *bounds: Expr) -> Expr:
        rest = list(map(ir.as_stored, bounds))
        if low is not None:
            e = limited("maximum", e, rest.pop(0), low)
        return limited("minimum", e, rest.pop(0), high) if high is not None else e

    return elementwise(lw, (x, *args), body)


@rule(aten.addcmul)
def addcmul(lw: Lowering, x: Value, a: Any, b: Any, *, value: Any = 1) -> Value:
    """x + (value a) b, the second product and the sum rounded once, as eager does it."""

    def body(x: Expr, a: Expr, b: Expr) -> Expr:
        return apply("fma", x.dtype, _scaled(lw, a, value), b, x)

    return elementwise(lw, (x, a, b), body)


def fma(lw: Lowering, a: Any, b: Any, c: Any) -> Value:
    """Dynamo emits it for `addcmul_` and `addcdiv_` if `value` is a number that it traces."""
    return elementwise(lw, (a, b, c), lambda a, b, c: apply("fma", a.dtype, a, b, c))


POINTWISE.add_named("prims::fma", fma)  # Dynamo registers it


@rule(aten.addcdiv)
def addcdiv(lw: Lowering, x: Value, a: Any, b: Any, *, value: Any = 1) -> Value:
    return elementwise(lw, (x, a, b), lambda x, a, b: x + _scaled(lw, a, value) / b)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(lw: Lowering, a: Value, b: Value, weight: Any) -> Value:
    """a + w (b - a), from the nearer end, product and sum rounded once, as eager does it."""

    def body(a: Expr, b: Expr, w: Expr) -> Expr:
        near = compare("lt", apply("abs", w.dtype, w), 0.5)
        return apply("fma", a.dtype, select(near, w, w - 1.0), b - a, select(near, a, b))

    return elementwise(lw, (a, b, weight), body)


@rule(aten.nan_to_num)
def nan_to_num(
    lw: Lowering, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Value:
    if not x.dtype.is_floating_point:
        return lw.copy(x)
    lw.round_elements(x)
    info = torch.finfo(x.dtype)
    top = lw.element(info.max if posinf is None else posinf, x.dtype)
    bottom = lw.element(info.min if neginf is None else neginf, x.dtype)
    instead = lw.element(0.0 if nan is None else nan, x.dtype)

    def body(e: Expr) -> Expr:
        found = select(compare("eq", e, -math.inf), bottom, e)
        found = select(compare("eq", e, math.inf), top, found)
        return select(is_nan(e), instead, found)

    return elementwise(lw, (x,), body)


POINTWISE.update({
    (aten.sub.Tensor, aten.sub.Scalar):
        lambda lw, a, b, alpha=1: elementwise(lw, (a, b), lambda x, y: _minus(lw, x, y, alpha)),
    (aten.rsub.Tensor, aten.rsub.Scalar):
        lambda lw, a, b, alpha=1: elementwise(lw, (a, b), lambda x, y: _minus(lw, y, x, alpha)),
    aten.floor_divide: lambda lw, a, b: div(lw, a, b, "floor"),
    (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        lambda lw, x, mask, value: where(lw, mask, value, x),
    (aten.clamp_min.default, aten.clamp_min.Tensor): lambda lw, x, low: clamp(lw, x, low, None),
    (aten.clamp_max.default, aten.clamp_max.Tensor): lambda lw, x, high: clamp(lw, x, None, high),
    aten.square: lambda lw, x: elementwise(lw, (x,), lambda x: x * x),
})  # fmt: skip
