"""A matrix product with bias and activation, replaced by one `dicp::linear` call.

The product may be flattened to two dimensions and its result viewed in more; the activation
applies to either. The target gains an epilogue that runs while the tile is in cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dicp import operators as ops
from dicp.dynamo_bridge.analysis.constants import permutation_of
from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import (
    As,
    Match,
    Peel,
    Term,
    cast,
    one_of,
    op,
    reshape_source,
    rounded,
)
from dicp.dynamo_bridge.passes.base import PassContext

aten = torch.ops.aten

_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})


def _view_source(node: fx.Node, root: fx.Node) -> fx.Node | None:
    """The source of a reshape that keeps the last dimension."""
    source = reshape_source(node)
    if source is None or (sizes_of(source) or ())[-1:] != (sizes_of(node) or ())[-1:]:
        return None
    return source


def _product(x: Term, w: Term, bias: Term) -> Term:
    """x w + bias, flattened or not."""
    plain = op(aten.mm.default, x, w)
    with_bias = op(aten.addmm.default, bias, x, w)
    added = op(aten.add.Tensor, Peel(plain, _view_source), bias)
    return Peel(one_of(with_bias, added, plain), _view_source)


_ACTIVATIONS: dict[str, Callable[[Term], Term]] = {
    "relu": lambda x: op(aten.relu.default, x),
    "gelu": lambda x: op(aten.gelu.default, x, approximate="none"),
    "gelu_tanh": lambda x: op(aten.gelu.default, x, approximate="tanh"),
    "tanh": lambda x: op(aten.tanh.default, x),
    "sigmoid": lambda x: op(aten.sigmoid.default, x),
    "silu": lambda x: one_of(
        op(aten.silu.default, x),
        rounded(op(aten.mul.Tensor, cast(x), op(aten.sigmoid.default, cast(x)))),
        rounded(op(aten.div.Tensor, cast(x),
                   op(aten.add.Tensor, op(aten.exp.default, op(aten.neg.default, cast(x))), 1))),
    ),
}  # fmt: skip

_OPERATORS = {
    "relu": {aten.relu.default},
    "gelu": {aten.gelu.default},
    "gelu_tanh": {aten.gelu.default},
    "tanh": {aten.tanh.default},
    "sigmoid": {aten.sigmoid.default},
    "silu": {aten.silu.default, aten.sigmoid.default, aten.exp.default},
}


def _find(activation: str) -> Callable[[Term, Term, Term], Term]:
    def find(x: Term, w: Term, bias: Term) -> Term:
        return _ACTIVATIONS[activation](As("product", _product(x, w, bias)))

    return find


def find_bias(x: Term, w: Term, bias: Term) -> Term:
    # mm(x, w) + bias
    return op(aten.add.Tensor, Peel(op(aten.mm.default, x, w), _view_source), bias)


def _applies(match: Match, context: PassContext) -> bool:
    """Real floating point matrices of one dtype, and one bias per column."""
    x, w, root = value_of(match["x"]), value_of(match["w"]), match.nodes[0]
    if value_of(root).dtype != x.dtype or not _has_view(match, root):
        return False
    if not x.dtype.is_floating_point or x.dtype != w.dtype:
        return False
    bias = match.bound.get("bias")
    if bias is None:
        return True
    columns = sizes_of(match["w"])
    sizes = sizes_of(bias)
    return columns is not None and sizes == columns[1:] and value_of(bias).dtype == x.dtype


def _has_view(match: Match, root: fx.Node) -> bool:
    """Whether the root is two-dimensional, or a view in the match has its shape."""
    sizes = sizes_of(root) or ()
    views = [node for node in match.nodes if node.target is aten.view.default]
    return len(sizes) == 2 or any(sizes_of(node) == sizes for node in views)


def _replace(activation: str) -> Callable[..., fx.Node]:
    def replacement(rw: Rewriter, x: fx.Node, w: fx.Node, bias: Any) -> fx.Node:
        source = w.args[0] if permutation_of(w) == [1, 0] else None
        weight = source if isinstance(source, fx.Node) else rw(aten.permute.default, w, [1, 0])
        product = next(node for node in rw.match.nodes if node.target in _PRODUCTS)
        out = rw.emit_as(value_of(product), ops.linear, x, weight, bias, activation)
        sizes = sizes_of(rw.root) or ()
        if len(sizes) == 2:
            return out
        shown = [node for node in rw.match.nodes if node.target is aten.view.default]
        shown = [node for node in shown if sizes_of(node) == sizes]
        return rw.emit_as(value_of(shown[0]), aten.view.default, out, shown[0].args[1])

    return replacement


PATTERNS = (
    *(
        Pattern("linear", name, _find(name), _replace(name), _applies,
                (_PRODUCTS, frozenset(_OPERATORS[name])))
        for name in _ACTIVATIONS
    ),
    Pattern("linear", "bias", find_bias, _replace("none"), _applies,
            (frozenset({aten.mm.default}),)),
)  # fmt: skip
