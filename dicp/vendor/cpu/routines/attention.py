"""Scaled dot-product attention, forward and backward, without storing all its scores."""

from __future__ import annotations

import struct
from typing import Any

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import attention_rule, rows_of
from dicp.torch_private import ATTENTION_BACKWARD, ATTENTION_FORWARD, expression_of
from dicp.vendor.cpu.routines.common import Shaped, are_supported, call, is_few
from dicp.vendor.cpu.thresholds import MAX_HEAD

ATTENTION = RuleTable()
_MASK_VALUES = {torch.float32: 0, torch.bool: 2, torch.uint8: 3}
"""`d_mask_values` by dtype of the mask; 1 for any other."""


def _number(value: float) -> int:
    """The bits of a double as an integer, to pass it among the sizes."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def are_attended(q: Shaped, k: Shaped, v: Shaped) -> bool:
    """Whether the kernels support queries, keys and values of these shapes, where they support the
    dtype."""
    if any(len(x.shape) != 4 for x in (q, k, v)):
        return False
    heads, groups, values = (expression_of(x.shape[1]) for x in (q, k, v))
    fits = groups == values and (heads == groups or _divides(groups, heads))
    depths = [x.shape[3] for x in (q, k, v)]
    if not (fits and all(isinstance(n, int) for n in depths)) or _are_few(q, heads, groups):
        return False
    return depths[0] == depths[1] and max(depths) <= MAX_HEAD  # type: ignore[type-var, operator]


def _are_few(q: Shaped, heads: Any, groups: Any) -> bool:
    """Whether there are so few rows of queries that the library is faster.

    Heads that share keys are rows of one product where each has a single row. In bfloat16 the
    library takes 1.7 to 2 times as long as our kernel for 2 and 4 rows and 4 to 8 times for 1.
    """
    if q.dtype == torch.bfloat16:
        return False
    return is_few(heads // groups if q.shape[2] == 1 and heads != groups else q.shape[2])


def _divides(part: Any, whole: Any) -> bool:
    return isinstance(part, int) and isinstance(whole, int) and whole % part == 0


def _fits(q: Value, k: Value, v: Value, mask: Value | None, dropout: float) -> bool:
    """Whether the kernels support these operands."""
    if dropout or not (are_supported(q, k, v) and are_attended(q, k, v)):
        return False
    dtypes = (q.dtype, *_MASK_VALUES)
    return mask is None or (mask.dtype in dtypes and mask.ndim in (2, 4))


def _problem(
    q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float | None
) -> list[Size]:
    values = 0 if mask is None else _MASK_VALUES.get(mask.dtype, 1)
    factor = q.shape[3] ** -0.5 if scale is None else scale  # type: ignore[operator]
    return [*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
            int(causal), _number(factor), values]  # fmt: skip


def _operands(
    lw: Lowering, q: Value, k: Value, v: Value, mask: Value | None
) -> tuple[list[Ref], list[Size]]:
    """q, k, v and the mask in memory, and their strides."""
    refs = [rows_of(lw, x) for x in (q, k, v)]
    steps = [s for ref in refs for s in ref.strides[:3]]
    if mask is not None:
        refs.append(lw.realize(lw.expand(mask, (*q.shape[:3], k.shape[2]))))
        steps += refs[-1].strides
    return refs, steps


def _tag(name: str, mask: Value | None) -> str:
    return name if mask is None else f"{name}_masked"


@ATTENTION.register(ATTENTION_FORWARD, kind="library")
def attention(
    lw: Lowering, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    outs = lw.results()
    plain_number = scale is None or isinstance(scale, (int, float))
    laid_out = outs[0].strides[-1] == 1 and outs[1].shape == q.shape[:3]
    if not (plain_number and laid_out and _fits(q, k, v, attn_mask, dropout_p)):
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        return attention_rule(ATTENTION_FORWARD)(lw, q, k, v, dropout_p, is_causal, **kwargs)
    refs, steps = _operands(lw, q, k, v, attn_mask)
    sizes = [*_problem(q, k, v, attn_mask, is_causal, scale), *steps]
    sizes += [*outs[0].strides[:3], *outs[1].strides]
    name = _tag("dicp_attention", attn_mask)
    return call(lw, name, refs, outs, sizes)


@ATTENTION.register(ATTENTION_BACKWARD, kind="library")
def attention_gradients(
    lw: Lowering, grad: Value, q: Value, k: Value, v: Value, out: Value, sums: Value,
    dropout_p: float, is_causal: bool, *, attn_mask: Value | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    outs = lw.results()
    plain_number = scale is None or isinstance(scale, (int, float))
    laid_out = all(o.strides[-1] == 1 for o in outs) and sums.shape == q.shape[:3]
    typed = grad.dtype == out.dtype == q.dtype and sums.dtype == torch.float32
    fits = plain_number and laid_out and typed
    if not (fits and _fits(q, k, v, attn_mask, dropout_p)):
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        args = (grad, q, k, v, out, sums, dropout_p, is_causal)
        return attention_rule(ATTENTION_BACKWARD)(lw, *args, **kwargs)
    refs, steps = _operands(lw, q, k, v, attn_mask)
    refs += [rows_of(lw, grad), rows_of(lw, out), lw.realize(sums)]
    sizes = [*_problem(q, k, v, attn_mask, is_causal, scale), *steps]
    sizes += [s for ref in (*refs[-3:], *outs) for s in ref.strides[:3]]
    name = _tag("dicp_attention_gradients", attn_mask)
    return call(lw, name, refs, outs, sizes)
