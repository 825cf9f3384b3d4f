"""Unfused attention in a training graph, forward and backward, replaced by PyTorch's fused pair.

    s = scale * q k^T + mask      dP = dO v^T
    P = softmax(s)                dS = P * (dP - rowsum(P * dP))
    O = P v                       dv = P^T dO,  dq = scale * dS k,  dk = scale * dS^T q

With dropout, D has entries 0 and 1 / (1 - dropout_p):

    O = (P * D) v                 dv = (P * D)^T dO,  dP = (dO v^T) * D

The pattern for inference matches the forward part. The backward part is what automatic
differentiation derives from it, recognized by the nodes that it shares with the forward part. The
pass replaces both or neither: neither where another node reads scores or probabilities (a returned
attention map, a dropout mask, a scale with a gradient of its own). The fused pair neither stores
the probabilities nor saves them for backward.

dS is also the gradient of an additive mask (a learned position bias). Other nodes may read it where
PyTorch's operator returns it: unreduced and in the queries' dtype. (A wider gradient, summed
over a batch, would lose precision; such attention stays unfused.)

Where the program recomputes a region in backward, the fused operator is saved nevertheless: its
result and the log-sum-exp of its rows are small. To recompute it, PyTorch would run it eagerly, in
order to restore a random state that it does not use.

A row whose scores are all -inf is NaN, and so are the gradients that depend on it: the pass
puts NaN into the gradient of its result. A row with a huge negative number added to every score has
equal probabilities. The operator saves the log-sum-exp of that row, in which the number absorbs the
logarithm of the key count, so that the backward operator computes each probability as 1: the pass
divides the gradient of the result by that count. Where a fill replaces scores, no gradient flows
back through the replaced ones, which the fused operator only sees as probabilities of zero: the
pass requires a proof that every row has a key.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.aliases import reachable
from dicp.dynamo_bridge.analysis.constants import (
    cast_source,
    last_two_swapped,
    permutation_of,
    uniform_value,
)
from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.dynamo_bridge.attention.forward import Call, gradient_arguments, training_attention
from dicp.dynamo_bridge.attention.matcher import DECOMPOSED
from dicp.dynamo_bridge.attention.replacement import (
    as_required,
    as_root,
    mask_of,
    nan_where_hidden,
    operands,
    unit_stride,
)
from dicp.dynamo_bridge.fuse.engine import Rewriter, erase, fits, substitute
from dicp.dynamo_bridge.fuse.terms import Match, reshape_source, rounded_source
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead
from dicp.dynamo_bridge.thresholds import FEW_ROWS
from dicp.torch_private import saved_for_backward

aten = torch.ops.aten

_SOFTMAX_BACKWARD = aten._softmax_backward_data.default
_SAME = frozenset({aten.detach.default, aten.alias.default})
_ABSORBS_LOG_SUM = {torch.float32: -(2.0**28), torch.float64: -(2.0**57)}
"""By dtype of the sums: a mask value below this absorbs a score and the logarithm of a sum."""
_SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_SELECTS = frozenset({aten.where.self, aten.masked_fill.Scalar})


@dataclass(frozen=True, eq=False)
class _Pair:
    """One attention with its backward part; a gradient that the graph does not compute is None."""

    match: Match
    out: fx.Node
    """The result, in the shape that the pattern matched."""
    grad: fx.Node
    """The gradient of the result, as the products read it."""
    dq: fx.Node | None
    dk: fx.Node | None
    """The gradient of the transposed keys, which the product reads."""
    dv: fx.Node | None
    dmask: tuple[fx.Node, ...]
    """The gradient of the scores, in the forms that other nodes read."""
    inner: frozenset[fx.Node]
    """The nodes that no other node may read, except those in `dmask`."""

    def gradients(self) -> list[fx.Node]:
        return [n for n in (self.dq, self.dk, self.dv, *self.dmask) if n is not None]


def fuse_training_attention(gm: fx.GraphModule, context: PassContext) -> bool:
    """Replaces each unfused attention together with its backward part; true if any was replaced."""
    if not context.facts.attention or not context.config.fuse:
        return False
    changed = False
    for last in gm.graph.find_nodes(op="call_function", target=_SOFTMAX_BACKWARD):
        if last.users:  # none where its attention has just been replaced
            pair = _pair_around(last, context)
            changed |= pair is not None and _replace(pair, context)
    if changed:
        remove_dead(gm.graph)
    return changed


# ---- matching ------------------------------------------------------------------------------------


def _source(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` aliases, reshapes or converts."""
    if node.target in _SAME:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return cast_source(node) or reshape_source(node)


def _root(node: Any) -> Any:
    """The tensor at the end of the chain of reshapes and conversions that starts at `node`."""
    while isinstance(node, fx.Node) and (source := _source(node)) is not None:
        node = source
    return node


def _aliases(node: fx.Node) -> set[fx.Node]:
    """`node` with all its aliases, reshapes and conversions."""
    return reachable([node], lambda n: (user for user in n.users if _source(user) is not None))


def _readers(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    nodes = set(nodes)
    return (user for node in nodes for user in node.users if user not in nodes)


def _is_transposed(node: Any, of: Any) -> bool:
    """Whether `node` is `of` with its last two dimensions swapped."""
    if not isinstance(node, fx.Node):
        return False
    order = permutation_of(node)
    return order is not None and order == last_two_swapped(len(order)) and node.args[0] is of


def _pair_around(last: fx.Node, context: PassContext) -> _Pair | None:
    soft = _root(last.args[1])
    if not isinstance(soft, fx.Node) or soft.target is not aten._softmax.default:
        return None
    if _must_be_saved(soft):
        return None
    probabilities = _aliases(soft)
    for dropout in _dropouts(probabilities):
        probabilities |= _aliases_of_result(dropout, 0)
    for product in _readers(probabilities):
        if product.target is aten.bmm.default and product.args[0] in probabilities:
            for out in (*product.users, product):
                match = _matched(out, context)
                if match is not None and soft in match.nodes:
                    return _pair(match, out, product, soft, last)
    return None


def _must_be_saved(probabilities: fx.Node) -> bool:
    """Whether probabilities are few, or must be more exact than recomputed ones.

    Those that a backward operator recomputes are off by the rounding error of a log-sum-exp, which
    grows with the scores: that of a single key is no longer 1, and its gradient not 0.
    """
    value = value_of(probabilities)
    if value.dim() < 2:
        return True  # of no attention
    *_, rows, keys = value.shape
    few = isinstance(rows, int) and rows < FEW_ROWS
    return few or (isinstance(keys, int) and keys == 1) or bool(value.dtype == torch.float64)


def _dropouts(probabilities: set[fx.Node]) -> list[fx.Node]:
    return [n for n in _readers(probabilities) if n.target is aten.native_dropout.default]


def _aliases_of_result(dropout: fx.Node, position: int) -> set[fx.Node]:
    """A result of `dropout` (0: the kept values, 1: their mask) with its aliases and reshapes."""
    results = [n for n in dropout.users if n.args[1] == position]
    return set().union(*map(_aliases, results))


def _matched(out: fx.Node, context: PassContext) -> Match | None:
    if out.target not in DECOMPOSED.term.roots():
        return None
    found = DECOMPOSED.term.match(out, Match({}))
    return next((m for m in found if DECOMPOSED.guard(m, context)), None)


def _pair(
    match: Match, out: fx.Node, product: fx.Node, soft: fx.Node, last: fx.Node
) -> _Pair | None:
    """The attention `match` with its backward part, whose softmax backward is `last`."""
    scores = [n for n in match.nodes if n.target is aten.bmm.default and n is not product]
    dropping = _through_dropout(match, last)
    if len(scores) != 1 or dropping is None:
        return None
    given, dropped = dropping
    d_probabilities = _root(given)
    if getattr(d_probabilities, "target", None) is not aten.bmm.default:
        return None
    grad, vt = d_probabilities.args
    chain = _score_gradients(last, match)
    if chain is None or not _is_transposed(vt, product.args[1]):
        return None
    for_v = [n for n in grad.users if n.target is aten.bmm.default
             and _is_transposed(n.args[0], product.args[0]) and n.args[1] is grad]  # fmt: skip
    products = (*_factor_gradients(chain, scores[0]), for_v)
    if any(len(found) > 1 for found in products):
        return None
    matched = set(match.nodes)
    forward = reachable(scores, lambda n: matched.intersection(n.users)) - {out, product}
    inner = {last, *forward, *_aliases(soft), *dropped, *_chain_to(given, d_probabilities), *chain}
    inner |= {n.args[0] for n in for_v} | ({product} - {out})
    if any(_rounds_apart(node, out) for node in inner):
        return None
    own = {out, product, *inner}.union(*products)
    read = {node for node in inner if any(user not in own for user in node.users)}
    dmask = tuple(read & _aliases(last))
    if len(read) > len(dmask) or (dmask and "bias" not in match.bound):
        return None  # another node reads scores or probabilities
    dq, dk, dv = (found[0] if found else None for found in products)
    pair = _Pair(match, out, grad, dq, dk, dv, dmask, frozenset(inner))
    return pair if pair.gradients() else None


def _rounds_apart(node: fx.Node, out: fx.Node) -> bool:
    """Whether `node` is a conversion that rounds where the fused operator does not.

    A boolean (the dropout mask) converts exactly to any dtype.
    """
    source = cast_source(node)
    if source is None or value_of(source).dtype == torch.bool:
        return False
    return rounded_source(node, out) is None


def _through_dropout(match: Match, last: fx.Node) -> tuple[Any, set[fx.Node]] | None:
    """The gradient of the probabilities after dropout, and the nodes that apply the dropout mask.

    None where the backward part does not multiply it by the forward part's mask and 1 / (1 -
    dropout_p).
    """
    dropout_p = match.bound.get("dropout_p")
    if dropout_p is None:
        return last.args[0], set()
    (dropout,) = (n for n in match.nodes if n.target is aten.native_dropout.default)
    masks, step = _aliases_of_result(dropout, 1), _root(last.args[0])
    if getattr(step, "target", None) is not aten.mul.Tensor:
        return None
    masked, number = _root(step.args[0]), uniform_value(step.args[1])
    if getattr(masked, "target", None) is not aten.mul.Tensor or masked.args[1] not in masks:
        return None
    if number is None or abs(float(number) * (1.0 - dropout_p) - 1.0) > 1e-7:
        return None
    inner = {dropout, *dropout.users, *masks, *_aliases_of_result(dropout, 0), *_aliases(masked)}
    return masked.args[0], inner | {*_chain_to(last.args[0], step)}


def _chain_to(node: Any, end: fx.Node) -> Iterator[fx.Node]:
    """The nodes from `node` through its sources to `end`."""
    while node is not end:
        yield node
        node = _source(node)
    yield end


def _score_gradients(last: fx.Node, match: Match) -> set[fx.Node] | None:
    """The nodes that take the gradient of the scores to the products.

    None unless they scale and mask it as the forward part scales and masks the scores.
    """
    chain = _aliases(last)
    passed = {"scale": 0, "select": 0}
    while True:
        steps = [n for n in _readers(chain) if n.target in _SCALES | _SELECTS]
        if not steps:
            break
        for step in steps:
            if step.target in _SCALES and _has_scale_of(step, match):
                passed["scale"] += 1
            elif step.target in _SELECTS and _has_mask_of(step, match, chain):
                passed["select"] += 1
            else:
                return None
            chain |= _aliases(step)
    bound = match.bound
    wanted = {
        "scale": int("scale" in bound or "inverse" in bound),
        "select": int("mask" in bound or "inverted_mask" in bound),
    }
    return chain if passed == wanted else None


def _has_scale_of(step: fx.Node, match: Match) -> bool:
    """Whether `step` multiplies the gradient by the scale of the scores."""
    factor, wanted = uniform_value(step.args[1]), _scale_of(match)
    if factor is None or not isinstance(step.args[0], fx.Node) or wanted is None:
        return False
    is_product = step.target in (aten.mul.Tensor, aten.mul.Scalar)
    own = float(factor) if is_product else 1.0 / float(factor)
    return abs(own - wanted) <= 1e-7 * abs(wanted)


def _scale_of(match: Match) -> float | None:
    scale, inverse = (uniform_value(match.bound.get(name)) for name in ("scale", "inverse"))
    if scale is not None:
        return float(scale)
    return None if inverse is None else 1.0 / float(inverse)


def _has_mask_of(step: fx.Node, match: Match, chain: set[fx.Node]) -> bool:
    """Whether `step` zeroes the gradient exactly where the scores were masked."""
    bound = match.bound
    if step.target is aten.masked_fill.Scalar:
        value, test, fill = step.args
        given = test is bound.get("inverted_mask", ())
        return value in chain and uniform_value(fill) == 0 and given
    test, kept, dropped = step.args
    if test is bound.get("mask", ()):
        return kept in chain and uniform_value(dropped) == 0
    return test is bound.get("inverted_mask", ()) and dropped in chain and uniform_value(kept) == 0


def _factor_gradients(chain: set[fx.Node], scores: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The products that compute the gradients of q and of k transposed."""
    products = [n for n in _readers(chain) if n.target is aten.bmm.default]
    q, kt = scores.args
    dq = [n for n in products if n.args[0] in chain and _is_transposed(n.args[1], kt)]
    dk = [n for n in products if n.args[1] in chain and _is_transposed(n.args[0], q)]
    return dq, dk


# ---- replacement ---------------------------------------------------------------------------------


def _replace(pair: _Pair, context: PassContext) -> bool:
    order = {node: k for k, node in enumerate(pair.out.graph.nodes)}
    products = [node for node in (pair.dq, pair.dk, pair.dv) if node is not None]
    results = [*(_as_read(node, pair.out) for node in products), *pair.dmask]
    first = min(pair.gradients(), key=order.__getitem__)
    if order[first] < order[pair.out]:
        return False
    forward = Rewriter(pair.out, pair.match, context)
    backward = Rewriter(first, Match({}, tuple(sorted(pair.inner, key=order.__getitem__))), context)
    made = _fused(pair, forward, backward)
    swaps = [] if made is None else list(zip((pair.out, *results), made, strict=True))
    if not swaps or not all(fits(old, new) for old, new in swaps):
        backward.undo()
        forward.undo()
        return False
    for old, new in swaps:
        substitute(old, new, context)
    erase((*pair.match.nodes, *pair.inner, *results, *pair.gradients()))
    return True


def _as_read(gradient: fx.Node, out: fx.Node) -> fx.Node:
    """The gradient, or its only reader where that views it with the batch of `out`."""
    batch = (sizes_of(out) or ())[:-2]
    views = [u for u in gradient.users if reshape_source(u) is gradient]
    fitting = [u for u in views if (sizes_of(u) or ())[:-2] == batch]
    return fitting[0] if len(fitting) == 1 and len(gradient.users) == 1 else gradient


def _fused(pair: _Pair, forward: Rewriter, backward: Rewriter) -> list[fx.Node] | None:
    """The result, then the gradients that the graph computes, in the shapes they have there."""
    bound, scale = pair.match.bound, _scale_of(pair.match)
    found = operands(forward, *(bound[name] for name in ("q", "kt", "v")))
    if found is None or (scale is None and ("scale" in bound or "inverse" in bound)):
        return None
    q, k, v = (unit_stride(forward, x) for x in found)
    mask = mask_of(forward, (q, k, v))
    if mask is None or (bound.get("fill") is not None and not mask.has_visible_key):
        return None
    bias = as_required(forward, mask.bias, q)
    asked = Call(mask.causal, 1.0 if scale is None else scale, bound.get("dropout_p") or 0.0)
    wanted = bool(pair.dmask)
    if wanted and bias is None:
        return None  # the mask became the causal flag, which has no gradient
    call = training_attention(forward, q, k, v, bias, asked, wanted)
    grad = _gradient(pair, backward)
    if call is None or grad is None:
        return None
    out: fx.Node = forward(operator.getitem, call, 0)
    out = nan_where_hidden(forward, out, call, mask)
    grad = nan_where_hidden(backward, grad, call, mask)
    if not mask.has_visible_key and mask.bias is not None:
        grad = _divided_among_maxima(backward, grad, mask.bias)
    back_op, args, kwargs = gradient_arguments(forward, call, grad, wanted)
    results = backward(back_op, *args, **kwargs)
    slopes = [backward(operator.getitem, results, k) for k in range(3)]
    if mask.replaced is not None:  # every key has a weight of NaN in a row of NaN
        zeros = backward(aten.mul.Scalar, grad, 0.0)
        spoiled = backward(aten.sum.dim_IntList, zeros, [2], True)
        slopes[1:] = [backward(aten.add.Tensor, x, spoiled) for x in slopes[1:]]
    for node in (call, *call.users):
        saved_for_backward(node)
    gradients = [
        _shaped(backward, slopes[k], pair.out, transposed=k == 1)
        for k, node in enumerate((pair.dq, pair.dk, pair.dv)) if node is not None
    ]  # fmt: skip
    if wanted:
        dmask = _shaped(
            backward, backward(operator.getitem, results, 3), pair.out, transposed=False
        )
        gradients += [dmask] * len(pair.dmask)
    return [as_root(forward, out), *gradients]


def _divided_among_maxima(rw: Rewriter, grad: fx.Node, bias: fx.Node) -> fx.Node:
    """Where the mask absorbs a row's scores: `grad` divided by the number of maximal keys."""
    dtype = value_of(grad).dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row_max = rw(aten.amax.default, bias, [-1], True)
    count = rw(aten.sum.dim_IntList, rw(aten.eq.Tensor, bias, row_max), [-1], True, dtype=wide)
    parts = rw.cast(rw(aten.div.Tensor, grad, count), dtype)
    alone = rw(aten.lt.Scalar, row_max, _ABSORBS_LOG_SUM[wide])
    return rw(aten.where.self, alone, parts, grad)


def _gradient(pair: _Pair, rw: Rewriter) -> fx.Node | None:
    """The gradient of the result in four dimensions."""
    sizes = sizes_of(pair.out) or ()
    found: fx.Node | None = pair.grad
    while found is not None and sizes_of(found) != sizes:
        found = reshape_source(found)
    if found is None:
        return None
    found = found if len(sizes) == 4 else rw(aten.unsqueeze.default, found, 0)
    return unit_stride(rw, found)


def _shaped(rw: Rewriter, node: fx.Node, out: fx.Node, transposed: bool) -> fx.Node:
    if transposed:
        node = rw(aten.permute.default, node, [0, 1, 3, 2])
    return rw(aten.squeeze.dim, node, 0) if len(sizes_of(out) or ()) == 3 else node


TRAINING_ATTENTION = Pass("attention in training", fuse_training_attention)
