"""Decomposed GELU, by the error function or its tanh approximation, replaced by `aten.gelu`.

The constants are those of GELU's definition. They match with a relative tolerance of 1e-6, because
programs write them with few digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.values import value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import Literal, Match, Term, cast, one_of, op, rounded
from dicp.dynamo_bridge.passes.base import PassContext

aten = torch.ops.aten

_MUL = [aten.mul.Tensor, aten.mul.Scalar]
_DIV = [aten.div.Tensor, aten.div.Scalar]
_ADD = [aten.add.Tensor, aten.add.Scalar]


def _constant(value: float) -> Literal:
    return Literal(value, 1e-6)


def _times(x: Term, factor: float) -> Term:
    return one_of(op(_MUL, x, _constant(factor)), op(_DIV, x, _constant(1 / factor)))


def _half_times(x: Term, gate: Term) -> Term:
    """x * gate / 2, in any order."""
    return one_of(
        op(aten.mul.Tensor, _times(x, 0.5), gate),
        op(aten.mul.Tensor, x, _times(gate, 0.5)),
        _times(op(aten.mul.Tensor, x, gate), 0.5),
    )


def gelu_erf(x: Term) -> Term:
    # x (1 + erf(x / sqrt(2))) / 2
    source = cast(x)
    gate = op(_ADD, op(aten.erf.default, _times(source, math.sqrt(0.5))), 1)
    return rounded(_half_times(source, gate))


def gelu_tanh(x: Term) -> Term:
    # x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
    source = cast(x)
    square = one_of(op(aten.pow.Tensor_Scalar, source, 2), op(aten.mul.Tensor, source, source))
    cube = one_of(op(aten.pow.Tensor_Scalar, source, 3), op(aten.mul.Tensor, square, source))
    root = math.sqrt(2 / math.pi)
    inner = one_of(
        _times(op(aten.add.Tensor, source, _times(cube, 0.044715)), root),
        op(aten.mul.Tensor, _times(source, root), op(_ADD, _times(square, 0.044715), 1)),
        op(aten.mul.Tensor, _times(source, root),
           op(_ADD, op(aten.mul.Tensor, _times(source, 0.044715), source), 1)),
    )  # fmt: skip
    gate = op(_ADD, op(aten.tanh.default, inner), 1)
    return rounded(_half_times(source, gate))


def _applies(match: Match, context: PassContext) -> bool:
    x = value_of(match["x"])
    root = value_of(match.nodes[0])
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dtype == root.dtype


def _gelu(approximate: str) -> Callable[[Rewriter, fx.Node], fx.Node]:
    def replacement(rw: Rewriter, x: fx.Node) -> fx.Node:
        return rw(aten.gelu.default, x, approximate=approximate)

    return replacement


PATTERNS = (
    Pattern("gelu", "erf", gelu_erf, _gelu("none"), _applies, (frozenset({aten.erf.default}),)),
    Pattern("gelu", "tanh", gelu_tanh, _gelu("tanh"), _applies, (frozenset({aten.tanh.default}),)),
)
