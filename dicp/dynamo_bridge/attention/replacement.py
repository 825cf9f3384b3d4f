"""The fused attention call that replaces a match: its operands, mask and scale."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.dtypes import converted
from dicp.dynamo_bridge.analysis.constants import last_two_swapped, permutation_of, uniform_value
from dicp.dynamo_bridge.analysis.values import same_sizes, sizes_of, value_of
from dicp.dynamo_bridge.attention.forward import Call, attention_on, inference_attention
from dicp.dynamo_bridge.attention.mask_values import (
    has_finite_entry,
    has_visible_key,
    is_causal_mask,
    is_roundable,
    numbers_of,
)
from dicp.dynamo_bridge.fuse.engine import Rewriter
from dicp.dynamo_bridge.fuse.terms import Match, copy_source, reshape_source, widened_source
from dicp.torch_private import expression_of

aten = torch.ops.aten


def unflatten(node: Any, batch: tuple[Any, ...]) -> tuple[fx.Node, list[fx.Node]] | None:
    """The operand with batch dimensions `batch` that `node` flattens, and the nodes down to it.

    `node` itself and no nodes where the graph no longer has such an operand.
    """
    chain: list[fx.Node] = []
    matrix = sizes_of(node)
    if not isinstance(node, fx.Node) or matrix is None:
        return None
    found: fx.Node | None = node
    while found is not None and sizes_of(found) != (*batch, *matrix[-2:]):
        chain.append(found)
        found = row_source(found)
    return (node, []) if found is None else (found, chain)


def row_source(node: fx.Node) -> fx.Node | None:
    """The source of a copy, or of a reshape of the leading dimensions."""
    source = reshape_source(node)
    left, right = sizes_of(node), sizes_of(source)
    if source is None or left is None or right is None or left[-2:] != right[-2:]:
        return None
    return source


def fill_of(match: Match) -> float | None:
    """The number that replaces masked scores, converted to the scores' dtype."""
    fill = match.bound.get("fill")
    return None if fill is None else converted(fill, value_of(match["scores"]).dtype)


def fused(
    rw: Rewriter, q: fx.Node, kt: fx.Node, v: fx.Node, scale: Any, inverse: Any,
    dropout_p: float | None, **masks: Any,
) -> fx.Node | None:  # fmt: skip
    """The fused call; `mask_of` reads the masks from the match."""
    found = operands(rw, q, kt, v, grouped=True)
    if found is None:
        return None
    q, factor = _scaled(rw, found[0], scale, inverse)
    q, k, v = (unit_stride(rw, x) for x in (q, *found[1:]))
    added = mask_of(rw, (q, k, v))
    if added is None:
        return None
    call = Call(added.causal, factor, dropout_p or 0.0)
    out = inference_attention(rw, q, k, v, as_required(rw, added.bias, q), call)
    safe = any(node.target is aten._safe_softmax.default for node in rw.match.nodes)
    if out is None:
        return None
    return as_root(rw, out if safe else nan_where_hidden(rw, out, out.args[0], added))


def operands(
    rw: Rewriter, q: fx.Node, kt: fx.Node, v: fx.Node, grouped: bool = False
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Queries, keys and values in four dimensions; None where keys and values differ in size, where
    dtypes differ, and where the fused operator would give 0 for rows of NaN.

    Queries and keys are taken before they were converted to float32 from the values' 16-bit dtype:
    fused operators sum their products, which are exact, in float32 themselves.

    `grouped`: take keys and values before they were repeated for grouped heads.
    """
    dtype = value_of(v).dtype
    q, k = _narrow(q, dtype), _narrow(_transposed(rw, _narrow(kt, dtype)), dtype)
    if not value_of(q).dtype == value_of(k).dtype == dtype:
        return None
    groups, root = [ungrouped(k), ungrouped(v)], sizes_of(rw.root) or ()
    if grouped and len(root) == 4 and all((sizes_of(x) or ())[:1] == root[:1] for x in groups):
        k, v = (x for x in groups if x is not None)
    else:
        k, v = _batched(rw, k), _batched(rw, v)
    if not same_sizes(k, v):
        return None
    q = _batched(rw, q)
    return None if _marks_hidden_rows(rw, q, k, v) is False else (q, k, v)


def _narrow(node: Any, dtype: torch.dtype) -> Any:
    """What `node` converts from this 16-bit dtype to float32, or else `node`."""
    source = widened_source(node)
    return node if source is None or value_of(source).dtype != dtype else source


def _marks_hidden_rows(rw: Rewriter, q: fx.Node, k: fx.Node, v: fx.Node) -> bool | None:
    marks = attention_on(rw.context, q).marks_hidden_rows
    return None if marks is None else marks(*map(value_of, (q, k, v)))


@dataclass(frozen=True, eq=False)
class ScoreMask:
    """What is added to the scores: a tensor in four dimensions, the causal mask as a flag, or both
    where the fused operators take both."""

    bias: fx.Node | None
    causal: bool
    may_hide_all: bool
    """Whether some row may have -inf added to every score."""
    has_visible_key: bool = True
    """Whether every row provably has a key that neither -inf nor a number below HUGE hides."""
    replaced: tuple[fx.Node, fx.Node] | None = None
    """Queries and keys, where the causal flag replaces scores to which eager adds the mask."""


def mask_of(rw: Rewriter, found: tuple[fx.Node, fx.Node, fx.Node]) -> ScoreMask | None:
    """The mask of a fused call; None where the fused operators would change its effect: by adding
    it where it replaces scores, or by rounding it to the queries' dtype."""
    q, k, _ = found
    bias, fill = _as_bias(rw, q), fill_of(rw.match)
    if bias is None:
        return ScoreMask(None, False, False)
    exact = attention_on(rw.context, q).exact_masks
    if is_causal_mask(bias, q, k):
        if exact:
            return ScoreMask(_four_dims(rw, bias), True, False)
        if fill is not None:
            return ScoreMask(None, True, False)
        grouped = (sizes_of(q) or ())[:2] != (sizes_of(k) or ())[:2]
        return None if grouped else ScoreMask(None, True, False, replaced=(q, k))
    if fill is not None and not exact:
        return None
    if _narrower(rw, bias, q) and not is_roundable(bias, value_of(q).dtype):
        return None
    return ScoreMask(_four_dims(rw, bias), False, not has_finite_entry(bias), has_visible_key(bias))


def _narrower(rw: Rewriter, bias: fx.Node, q: fx.Node) -> bool:
    """Whether the operators require the mask in the queries' dtype, and that is narrower."""
    wider = value_of(bias).dtype.itemsize > value_of(q).dtype.itemsize
    return bool(wider) and not attention_on(rw.context, q).any_mask


def _sum(rw: Rewriter) -> Any:
    """The sum of the additive masks that the match binds; one filled with zeros is left out."""
    first, second = (rw.match.bound.get(name) for name in ("bias", "second_bias"))
    if second is None or uniform_value(second) == 0:
        return first
    return second if uniform_value(first) == 0 else rw(aten.add.Tensor, first, second)


def as_required(rw: Rewriter, bias: fx.Node | None, q: fx.Node) -> fx.Node | None:
    """The mask with the dtype and last stride that the fused operators require."""
    value = value_of(q)
    attention = attention_on(rw.context, q)
    if bias is not None and attention.exact_masks and fill_of(rw.match) is not None:
        return _visible(rw)
    if bias is None or attention.any_mask:
        return bias
    if _narrower(rw, bias, q):
        # The lowest number of the wider dtype would round to -inf, which hides all keys of a row.
        least = torch.finfo(value.dtype).min
        known = numbers_of(bias)
        if known is None or any(float("-inf") < x < least for x in known):
            hidden = rw(aten.eq.Scalar, bias, float("-inf"))
            bias = rw(aten.where.self, hidden, bias, rw(aten.clamp_min.default, bias, least))
    return unit_stride(rw, rw.cast(bias, value.dtype))


def as_root(rw: Rewriter, out: fx.Node) -> fx.Node:
    """`out` in the shape and dtype of the root."""
    if len(sizes_of(rw.root) or ()) == 3:
        out = rw(aten.squeeze.dim, out, 0)
    return rw.cast(out, value_of(rw.root).dtype)


def _batched(rw: Rewriter, node: fx.Node) -> fx.Node:
    """`node` in four dimensions, with the batch dimensions of the root."""
    root = sizes_of(rw.root)
    assert root is not None
    if len(root) == 3:
        return rw(aten.unsqueeze.default, _original(node), 0)
    found, chain = unflatten(node, root[:-2]) or (node, [])
    if chain or sizes_of(found) == (*root[:-2], *(sizes_of(found) or ())[-2:]):
        return _original(found)
    batch = rw.root.args[1]
    assert isinstance(batch, (list, tuple))
    sizes = [*batch[:2], rw.size(node, -2), rw.size(node, -1)]
    return rw.view(node, sizes)


def _original(node: fx.Node) -> fx.Node:
    """The source of a copy: fused operators accept any strides of the leading dimensions."""
    while (source := copy_source(node)) is not None:
        node = source
    return node


def _transposed(rw: Rewriter, kt: fx.Node) -> fx.Node:
    """`kt` with its last two dimensions swapped back."""
    node: fx.Node | None = kt
    while node is not None:
        swap = last_two_swapped(len(sizes_of(node) or ()))
        if permutation_of(node) == swap and isinstance(node.args[0], fx.Node):
            return node.args[0]
        node = row_source(node)
    return rw(aten.permute.default, _original(kt), last_two_swapped(len(sizes_of(kt) or ())))


def _scaled(rw: Rewriter, q: fx.Node, scale: Any, inverse: Any) -> tuple[fx.Node, float]:
    """The queries and the number that scales the scores; a tensor scale multiplies the queries.

    (Sizes and floats that may change between calls arrive as tensors of one element.)
    """
    number = uniform_value(scale if scale is not None else inverse)
    if number is not None:
        return q, float(number) if scale is not None else 1.0 / float(number)
    if scale is None and inverse is None:
        return q, 1.0
    target = aten.mul.Tensor if scale is not None else aten.div.Tensor
    scaled = rw(target, q, scale if scale is not None else inverse)
    return rw.cast(scaled, value_of(q).dtype), 1.0


def ungrouped(node: fx.Node) -> fx.Node | None:
    """Keys or values (batch, heads, rows, size) before they were repeated for grouped heads."""
    matrix = (sizes_of(node) or ())[-2:]
    found = reshape_source(node)
    while found is not None and found.target is not aten.expand.default:
        found = reshape_source(found)
    if found is None or not isinstance(found.args[0], fx.Node):
        return None
    narrow, wide = found.args[0], sizes_of(found)
    before = sizes_of(narrow)
    if wide is None or before is None or len(wide) != 5 or len(before) != 5:
        return None
    repeated = before[2] == 1 and (*before[:2], *before[3:]) == (*wide[:2], *wide[3:])
    if not repeated or wide[3:] != matrix or narrow.target is not aten.unsqueeze.default:
        return None
    heads = narrow.args[0]
    return heads if narrow.args[1] in (2, -3) and isinstance(heads, fx.Node) else None


def unit_stride(rw: Rewriter, node: fx.Node) -> fx.Node:
    """`node`, copied unless its last dimension has stride 1, which fused operators assume."""
    if expression_of(value_of(node).stride(-1)) == 1:
        return node
    return rw.contiguous(node)


def _as_bias(rw: Rewriter, q: fx.Node) -> fx.Node | None:
    """The masks that the match binds in additive form; None where there is none."""
    added, dtype = _sum(rw), value_of(q).dtype
    if added is not None:
        given = value_of(added).dtype
        if given == dtype or (given == torch.float32 and dtype != torch.float64):
            return added  # type: ignore[no-any-return]
        return rw.cast(added, dtype)
    mask, inverted_mask = _boolean_masks(rw)
    if mask is None and inverted_mask is None:
        return None
    constant = {"dtype": torch.float64 if dtype == torch.float64 else torch.float32,
                "device": value_of(q).device}  # fmt: skip
    zero = rw(aten.full.default, [], 0.0, **constant)
    low = rw(aten.full.default, [], fill_of(rw.match), **constant)
    if mask is not None:
        return rw(aten.where.self, mask, zero, low)
    return rw(aten.where.self, inverted_mask, low, zero)


def _boolean_masks(rw: Rewriter) -> tuple[Any, ...]:
    """The mask that is true for visible scores, and that which is true for hidden ones; both before
    they were expanded to all heads, which need not be read or computed."""
    masks = [rw.match.bound.get("mask"), rw.match.bound.get("inverted_mask")]
    return tuple(map(_unexpanded, masks))


def _unexpanded(mask: fx.Node | None) -> fx.Node | None:
    while mask is not None and mask.target is aten.expand.default:
        mask = mask.args[0]  # type: ignore[assignment]
    return mask


def _visible(rw: Rewriter) -> fx.Node:
    """Where the boolean mask that the match binds leaves scores as they are; of uint8 where it
    replaces others by a finite number."""
    mask, inverted_mask = _boolean_masks(rw)
    visible = rw(aten.logical_not.default, inverted_mask) if mask is None else mask
    if fill_of(rw.match) != -math.inf:
        visible = rw.cast(visible, torch.uint8)
    return _four_dims(rw, visible)


def _four_dims(rw: Rewriter, bias: fx.Node) -> fx.Node:
    while len(sizes_of(bias) or ()) < 4:
        bias = rw(aten.unsqueeze.default, bias, 0)
    return bias


def nan_where_hidden(rw: Rewriter, rows: fx.Node, call: Any, mask: ScoreMask) -> fx.Node:
    """`rows`, a result of the fused `call` or its gradient, with NaN where all scores are -inf, or
    where eager adds the causal mask to a score of NaN or +inf."""
    if mask.replaced is not None:
        rows = _nan_where(rw, _has_nonfinite_score(rw, *mask.replaced), rows)
    known = attention_on(rw.context, rows).marks_hidden_rows is not None  # of a single operator
    if known and _marks_hidden_rows(rw, *call.args[:3]):
        row_max = rw(aten.unsqueeze.default, rw(operator.getitem, call, 1), -1)
    elif mask.may_hide_all and mask.bias is not None:
        row_max = rw(aten.amax.default, mask.bias, [-1], True)
    else:
        return rows
    return _nan_where(rw, rw(aten.eq.Scalar, row_max, float("-inf")), rows)


def _has_nonfinite_score(rw: Rewriter, q: fx.Node, k: fx.Node) -> fx.Node:
    """Whether a row has a score of NaN or +inf: one of its products with a number of some key is.
    The largest of these is that with the largest or with the smallest number in the column."""
    dtype = torch.promote_types(value_of(q).dtype, torch.float32)
    ends = [rw(end, k, [2], True) for end in (aten.amax.default, aten.amin.default)]
    wide = [rw.cast(x, dtype) for x in (q, *ends)]
    products = [rw(aten.mul.Tensor, wide[0], end) for end in wide[1:]]
    largest = rw(aten.amax.default, rw(aten.maximum.default, *products), [-1], True)
    return rw(aten.logical_not.default, rw(aten.lt.Scalar, largest, math.inf))


def _nan_where(rw: Rewriter, test: fx.Node, rows: fx.Node) -> fx.Node:
    value = value_of(rows)
    nan = rw(aten.full.default, [], math.nan, dtype=value.dtype, device=value.device)
    return rw(aten.where.self, test, nan, rows)


def with_fewer_heads(rw: Rewriter, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
    few = [unit_stride(rw, x) for x in (ungrouped(k), ungrouped(v)) if x is not None]
    return rw(rw.root.target, q, *few, *rw.root.args[3:], **rw.root.kwargs)
