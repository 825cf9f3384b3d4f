"""Softmax cross-entropy: a log-softmax of which the graph reads only the targets' entries.

    gather(log_softmax(x), i) = (gather(x, i) - m) - log(sum(exp(x - m))),  m = max(x)

The log-softmax of a language model's logits (tokens by vocabulary) is its largest tensor. The right
side never stores it: two reductions and a gather remain, which loop fusion merges. Both sides round
alike. In training the backward part reads the log-softmax itself, and the pattern does not match.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dtypes import opmath_dtype
from dicp.dynamo_bridge.analysis.values import value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import ANY, Match, Term, Var, cast, op
from dicp.dynamo_bridge.passes.base import PassContext

aten = torch.ops.aten


def picked_log_softmax(x: Term, dim: Term, index: Term) -> Term:
    # gather(log_softmax(x, dim), dim, index)
    return op(aten.gather.default,
              op(aten._log_softmax.default, cast(x), dim, half_to_float=ANY),
              Var("gather_dim"), index)  # fmt: skip


def _applies(match: Match, context: PassContext) -> bool:
    """Log-softmax and gather along the same dimension, with one entry gathered per row."""
    x, index = value_of(match["x"]), value_of(match["index"])
    dim, picked = match["dim"], match["gather_dim"]
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or not x.dtype.is_floating_point:
        return False
    return dim % x.dim() == picked % x.dim() and index.shape[dim % x.dim()] == 1


def _replace(rw: Rewriter, x: fx.Node, dim: int, index: fx.Node) -> Any:
    value, dtype = value_of(x), value_of(rw.root).dtype
    x = rw.cast(x, opmath_dtype(value.dtype))
    row_max = rw(aten.amax.default, x, [dim], True)
    exp_scores = rw(aten.exp.default, rw(aten.sub.Tensor, x, row_max))
    log_sum = rw(aten.log.default, rw(aten.sum.dim_IntList, exp_scores, [dim], True))
    rows = _rows(rw, x, dim, index)
    entry = rw(aten.gather.default, x, dim, index)
    out = rw(aten.sub.Tensor, rw(aten.sub.Tensor, entry, rows(row_max)), rows(log_sum))
    return rw.cast(out, dtype)


def _rows(rw: Rewriter, x: fx.Node, dim: int, index: fx.Node) -> Any:
    """A function that slices leading rows where the index has fewer than `x` (gather allows it)."""
    sizes, wanted = value_of(x).shape, value_of(index).shape
    rank = len(sizes)
    cut = [d for d in range(rank) if d != dim % rank and sizes[d] is not wanted[d]]

    def show(node: fx.Node) -> fx.Node:
        for d in cut:
            if str(sizes[d]) != str(wanted[d]):
                node = rw(aten.slice.Tensor, node, d, 0, rw.size(index, d))
        return node

    return show


PATTERNS = (
    Pattern("cross_entropy", "picked log-softmax", picked_log_softmax, _replace, _applies,
            (frozenset({aten._log_softmax.default}), frozenset({aten.gather.default}))),
)  # fmt: skip
