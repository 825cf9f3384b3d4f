"""Decomposed layer norm and RMS norm, replaced by one operator over the last dimension.

Models in half precision convert to float32 and back around the norm. The patterns include these
conversions where the weight has the input's dtype: the operator computes in float32 inside.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import LastDim, Match, Number, Term, cast, one_of, op, rounded
from dicp.dynamo_bridge.passes.base import PassContext

aten = torch.ops.aten


def _square(x: Term) -> Term:
    return one_of(op(aten.pow.Tensor_Scalar, x, 2), op(aten.mul.Tensor, x, x))


def _mean(x: Term) -> Term:
    return op(aten.mean.dim, x, LastDim("x"), True)


def _over_root(x: Term, variance: Term, eps: Term) -> Term:
    """x / sqrt(variance + eps), with rsqrt, a division or a reciprocal."""
    inner = op([aten.add.Tensor, aten.add.Scalar], variance, eps)
    root = op(aten.sqrt.default, inner)
    inverse = one_of(
        op(aten.rsqrt.default, inner),
        op(aten.reciprocal.default, root),
        op(aten.pow.Tensor_Scalar, inner, -0.5),
    )
    return one_of(op(aten.mul.Tensor, x, inverse), op(aten.div.Tensor, x, root))


def layer_norm(x: Term, eps: Number) -> Term:
    # (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)
    source = cast(x)
    centered = op(aten.sub.Tensor, source, _mean(source))
    variance = one_of(
        _mean(_square(centered)),
        op(aten.var.correction, source, LastDim("x"), correction=0, keepdim=True),
    )
    return rounded(_over_root(centered, variance, eps))


def layer_norm_weight(x: Term, weight: Term, eps: Number) -> Term:
    return rounded(op(aten.mul.Tensor, layer_norm(x, eps), weight))


def layer_norm_weight_bias(x: Term, weight: Term, bias: Term, eps: Number) -> Term:
    return rounded(op(aten.add.Tensor, layer_norm_weight(x, weight, eps), bias))


def rms_norm(x: Term, eps: Number) -> Term:
    # x / sqrt(mean(x^2) + eps)
    source = cast(x)
    return rounded(_over_root(source, _mean(_square(source)), eps))


def rms_norm_weight(x: Term, weight: Term, eps: Number) -> Term:
    return rounded(op(aten.mul.Tensor, rms_norm(x, eps), weight))


def _applies(match: Match, context: PassContext) -> bool:
    """Floating point, weight and bias of the last dimension's size and the result's dtype."""
    x, root = value_of(match["x"]), value_of(match.nodes[0])
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point or x.dim() == 0:
        return False
    if x.dtype != root.dtype or sizes_of(match["x"]) != sizes_of(match.nodes[0]):
        return False
    return all(
        sizes_of(match[name]) == (sizes_of(match["x"]) or ())[-1:]
        and value_of(match[name]).dtype == x.dtype
        for name in ("weight", "bias")
        if name in match.bound
    )


def _layer(rw: Rewriter, x: fx.Node, eps: float, weight: Any = None, bias: Any = None) -> fx.Node:
    size = rw.size(x, -1)
    out = rw(aten.native_layer_norm.default, x, [size], weight, bias, float(eps))
    return rw(operator.getitem, out, 0)


def _rms(rw: Rewriter, x: fx.Node, eps: float, weight: Any = None) -> fx.Node | None:
    size = rw.size(x, -1)
    if not isinstance(size, int):  # the operator takes no symbolic sizes
        return None
    out = rw(aten._fused_rms_norm.default, x, [size], weight, float(eps))
    return rw(operator.getitem, out, 0)


_NEEDS = (
    frozenset({aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar}),
    frozenset({aten.mean.dim, aten.var.correction}),
)

PATTERNS = (
    Pattern("layer_norm", "weight and bias", layer_norm_weight_bias, _layer, _applies, _NEEDS),
    Pattern("layer_norm", "weight", layer_norm_weight, _layer, _applies, _NEEDS),
    Pattern("layer_norm", "plain", layer_norm, _layer, _applies, _NEEDS),
    Pattern("rms_norm", "weight", rms_norm_weight, _rms, _applies, _NEEDS),
    Pattern("rms_norm", "plain", rms_norm, _rms, _applies, _NEEDS),
)
