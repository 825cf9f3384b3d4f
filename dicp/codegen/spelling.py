"""Scalar operators and reductions in C-family languages: one table row each.

A row is a format string over the operands' names. The functions that rows call are those of
`scalar.h`, which every language of the family includes.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dicp.loop.ir.expr import Const, Expr
from dicp.loop.ir.ops import PHILOX_NEIGHBOURS

SCALAR_HEADER = "scalar.h"

OPERATORS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "fma": "d_fma({0}, {1}, {2})",
    "neg": "-{0}",
    "abs": "d_abs({0})",
    "sign": "d_sign({0})",
    "signbit": "d_signbit({0})",
    "square": "{0} * {0}",
    "reciprocal": "1 / {0}",
    "floor_div": "d_floor_div({0}, {1}, status, {site})",
    "trunc_div": "d_trunc_div({0}, {1}, status, {site})",
    "remainder": "d_remainder({0}, {1}, status, {site})",
    "fmod": "d_fmod({0}, {1}, status, {site})",
    "maximum": "d_maximum({0}, {1})",
    "minimum": "d_minimum({0}, {1})",
    "fmax": "d_fmax({0}, {1})",
    "fmin": "d_fmin({0}, {1})",
    "pow": "d_pow({0}, {1})",
    "exp": "d_exp({0})",
    "exp2": "d_exp2({0})",
    "expm1": "d_expm1({0})",
    "log": "d_log({0})",
    "log2": "d_log2({0})",
    "log10": "d_log10({0})",
    "log1p": "d_log1p({0})",
    "sqrt": "d_sqrt({0})",
    "rsqrt": "1 / d_sqrt({0})",
    "sin": "d_sin({0})",
    "cos": "d_cos({0})",
    "tan": "d_tan({0})",
    "asin": "d_asin({0})",
    "acos": "d_acos({0})",
    "atan": "d_atan({0})",
    "atan2": "d_atan2({0}, {1})",
    "sinh": "d_sinh({0})",
    "cosh": "d_cosh({0})",
    "tanh": "d_tanh({0})",
    "asinh": "d_asinh({0})",
    "acosh": "d_acosh({0})",
    "atanh": "d_atanh({0})",
    "erf": "d_erf({0})",
    "erfc": "d_erfc({0})",
    "normal_cdf": "d_normal_cdf({0})",
    "normal_cdf_tanh": "d_normal_cdf_tanh({0})",
    "erfinv": "d_erfinv({0})",
    "lgamma": "d_lgamma({0})",
    "digamma": "d_digamma({0})",
    "hypot": "d_hypot({0}, {1})",
    "copysign": "d_copysign({0}, {1})",
    "nextafter": "d_nextafter({0}, {1})",
    "sigmoid": "1 / (1 + d_exp(-{0}))",
    "floor": "d_floor({0})",
    "ceil": "d_ceil({0})",
    "trunc": "d_trunc({0})",
    "round": "d_round({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "where": "{0} ? {1} : {2}",
    "logical_not": "!{0}",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_xor": "({0} != 0) ^ ({1} != 0)",
    "bitwise_not": "d_bitwise_not({0})",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "lshift": "d_lshift({0}, {1})",
    "rshift": "d_rshift({0}, {1})",
    "isnan": "d_isnan({0})",
    "isinf": "d_isinf({0})",
}
"""`site` is the number that an error reports; `width` is "d" for float64 and "f" otherwise."""

DRAWN = {
    "philox_word": "d_drawn_word({0}, {1})",
    "philox_uniform": "d_drawn_uniform_{width}({0}, {1})",
    "philox_normal": "d_drawn_normal_{width}({0}, {1})",
    "philox_bits": "d_drawn_bits({0}, {1})",
}
"""What an element takes of the words of a Philox call: the operands are these and its index."""

BESIDE_NUMBER = {"maximum": "{0} <= {1} ? {1} : {0}", "minimum": "{0} >= {1} ? {1} : {0}"}
"""Rows for a constant other than NaN as second operand: a NaN in the first propagates."""
BEHIND_NUMBER = {"maximum": "{0} > {1} ? {0} : {1}", "minimum": "{0} < {1} ? {0} : {1}"}
"""Rows for a constant other than NaN as first operand. For zeros of opposite sign the result is
the second operand, as in PyTorch's vectorized code: a zero keeps its sign beside a clamp's limit
that is the first operand."""

VARIANTS = {
    "exp_weight": "d_exp_weight({0})",
    "exp_short": "d_exp_short({0})",
    "normal_cdf_short": "d_normal_cdf_short({0})",
    "normalized": "d_divided({0}, {1}, {shared})",
    "over_above_one": "d_over_above_one({0}, {1})",
    "over": "d_over({0}, {1}, {number})",
    "scaled": "{0} * {number}",
    "neg_by_bits": "d_flipped({0})",
    "sub_by_bits": "{0} + d_flipped({1})",
}
"""Other forms of operators, which a kernel's schedule chooses. scalar.h has the first and the last
two; a target for GPUs defines the others."""
SHARED = {"normalized": "1 / {1}"}
"""What a row of VARIANTS computes once for all elements with the same second operand."""

COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "d_maximum({0}, {1})",
    "min": "d_minimum({0}, {1})",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
}
"""Combines two partial results of a reduction; argmax and argmin combine pairs (`take`)."""


def operator(expr: Expr, args: list[str], site: str = "") -> str:
    """The operator of `expr` applied to `args`: the cheapest row that is right for its operands."""
    if expr.op in DRAWN:
        return drawn_alone(expr.op, expr, args)
    return _row(expr).format(*args, site=site, width=_width(expr.dtype))


def drawn(op: str, dtype: torch.dtype, words: str, index: str) -> str:
    """The random number, or the word, of the element `index`, whose Philox call gave `words`."""
    return DRAWN[op].format(words, index, width=_width(dtype))


def drawn_alone(op: str, number: Expr, args: list[str]) -> str:
    """As `drawn`, of a Philox call that no other element shares. `args`: seed, site and index."""
    seed, site, index = args
    call = f"d_philox({seed}, {site}, {index} >> {philox_shift(number)})"
    return drawn(op, number.dtype, call, index)


def philox_shift(expr: Expr) -> int:
    """Bits that an element's index has more than the counter of its Philox call."""
    return PHILOX_NEIGHBOURS[expr.op, expr.dtype].bit_length() - 1


def _width(dtype: torch.dtype) -> str:
    return "d" if dtype == torch.float64 else "f"


def _row(expr: Expr) -> str:
    for operand, table in ((expr.args[-1], BESIDE_NUMBER), (expr.args[0], BEHIND_NUMBER)):
        if expr.op in table and isinstance(operand, Const) and operand.value == operand.value:
            return table[expr.op]
    return OPERATORS[expr.op]


def combine(op: str, old: str, value: str) -> str:
    """The result of reduction `op` so far, `old`, combined with `value`."""
    return COMBINE[op].format(old, value)


def take(op: str, value: str, position: str, best: str, best_position: str) -> str:
    """Updates the pair of an argmax or argmin if `value` is better."""
    return f"d_take_{op[3:]}({value}, {position}, {best}, {best_position});"


def header_text() -> str:
    """The text of `scalar.h`."""
    return (Path(__file__).parent / SCALAR_HEADER).read_text()
