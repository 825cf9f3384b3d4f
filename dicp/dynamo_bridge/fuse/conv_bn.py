"""Batch norm after a convolution in inference, folded into the convolution.

    bn(conv(x, w, b)) = conv(x, w s, (b - mean) s + beta),   s = gamma / sqrt(var + eps)

Parameters are inputs of the graph, so the fold stays in the graph as arithmetic on the weight. It
saves a pass over the activation, which pays where the weight is smaller than the activation, or
where the parameters do not change between calls (the option `freeze`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.values import value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import Match, Number, Term, Var, one_of, op
from dicp.dynamo_bridge.passes.base import PassContext
from dicp.dynamo_bridge.thresholds import MIN_FOLD_RATIO
from dicp.torch_private import hint_of

aten = torch.ops.aten


def folded(
    x: Term, w: Term, b: Term, stride: Term, padding: Term, dilation: Term, transposed: Term,
    output_padding: Term, groups: Term, gamma: Term, beta: Term, mean: Term, var: Term,
    eps: Number,
) -> Term:  # fmt: skip
    convolution = op(aten.convolution.default, x, w, b, stride, padding, dilation, transposed,
                     output_padding, groups)  # fmt: skip
    running = (gamma, beta, mean, var)
    norm = one_of(
        op(aten._native_batch_norm_legit_no_training.default, convolution, *running,
           Var("momentum"), eps),
        op(aten.native_batch_norm.default, convolution, *running, False, Var("momentum"), eps),
    )  # fmt: skip
    return op(operator.getitem, norm, 0)


def _applies(match: Match, context: PassContext) -> bool:
    if context.kind != "inference" or match["transposed"] is not False:
        return False
    x, w, out = value_of(match["x"]), value_of(match["w"]), value_of(match.nodes[0])
    if x.dtype not in (torch.float32, torch.float64) or match["mean"] is None:
        return False
    if any(value_of(match[name]) is not None and value_of(match[name]).dtype != x.dtype
           for name in ("gamma", "beta", "mean", "var")):  # fmt: skip
        return False
    return context.config.freeze or _count(out) >= MIN_FOLD_RATIO * _count(w)


def _count(value: torch.Tensor) -> int:
    """The number of elements; symbolic sizes count as the value they were traced with."""
    return math.prod(map(hint_of, value.shape))


def _replace(
    rw: Rewriter, x: fx.Node, w: fx.Node, b: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: Any, gamma: Any, beta: Any, mean: fx.Node,
    var: fx.Node, eps: float,
) -> fx.Node:  # fmt: skip
    factor = rw(aten.rsqrt.default, rw(aten.add.Scalar, var, float(eps)))
    if gamma is not None:
        factor = rw(aten.mul.Tensor, factor, gamma)
    shift = mean if b is None else rw(aten.sub.Tensor, mean, b)
    shift = rw(aten.neg.default, rw(aten.mul.Tensor, shift, factor))
    if beta is not None:
        shift = rw(aten.add.Tensor, shift, beta)
    column = factor
    for dim in range(1, value_of(w).dim()):
        column = rw(aten.unsqueeze.default, column, dim)
    weight = rw(aten.mul.Tensor, w, column)
    return rw(aten.convolution.default, x, weight, shift, stride, padding, dilation, transposed,
              output_padding, groups)  # fmt: skip


_NORMS = frozenset({
    aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default,
})  # fmt: skip

PATTERNS = (
    Pattern("conv_bn", "inference", folded, _replace, _applies,
            (frozenset({aten.convolution.default}), _NORMS)),
)  # fmt: skip
