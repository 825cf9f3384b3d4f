"""Operators lowered to PyTorch library calls: products, convolution, attention, sorting, sampling.

Out-variants are called where they exist, so that results are written into the planned workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import contiguous_strides
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.reduction import total
from dicp.rules import RuleTable
from dicp.torch_private import ATTENTION_BACKWARD, ATTENTION_FORWARD

aten = torch.ops.aten
LIBRARY = RuleTable()


def _product_rule(op: Any) -> Any:
    def lowered(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
        return lw.call(op.default, args, kwargs, out_variant=op.out)[0]

    return lowered


for _op in (aten.mm, aten.bmm, aten.baddbmm, aten.addmm, aten.addbmm, aten.addmv, aten.mv,
            aten.dot, aten.vdot, aten.addr):  # fmt: skip
    LIBRARY.add(_op.default, _product_rule(_op), "library")


def library_rule(op: Any) -> Any:
    """A rule that calls `op`, whose results are fresh tensors; None for a gradient that is not
    requested."""

    def lowered(lw: Lowering, *args: Any, **kwargs: Any) -> Any:
        metas = lw.node.meta["val"]
        if not isinstance(metas, (tuple, list)):
            return lw.call(op, args, kwargs)[0]
        requested = [m is not None for m in metas]
        results = lw.call(op, args, kwargs, outs=_full_outs(metas, requested))
        return [result if on else None for result, on in zip(results, requested, strict=True)]

    return lowered


for _op in (
    aten.convolution.default,
    aten._cdist_forward.default, aten._cdist_backward.default,
    aten._pdist_forward.default, aten._pdist_backward.default,
    aten._embedding_bag.default, aten._embedding_bag_forward_only.default,
    aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
    aten.masked_scatter.default, aten.masked_scatter_backward.default, aten.randperm.default,
    aten.histc.default, aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
    aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default,
    aten._ctc_loss.default, aten._ctc_loss_backward.default,
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
    aten.searchsorted.Tensor, aten.searchsorted.Scalar,
    aten.bucketize.Tensor, aten.bucketize.Scalar,
    aten.upsample_bicubic2d.default,
    aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default,
    aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default,
):  # fmt: skip
    LIBRARY.add(_op, library_rule(_op), "library")


def library_call(lw: Lowering, *args: Any, **kwargs: Any) -> Any:
    """Calls PyTorch's operator, which allocates its results."""
    return lw.eager(lw.node)


# An assertion raises its error from the host.
LIBRARY.add(aten._assert_async, library_call, "library")


def rows_of(lw: Lowering, value: Value) -> Ref:
    """`value` in memory, contiguous along its last axis."""
    ref = lw.realize(value)
    return ref if ref.strides[-1] == 1 else lw.realize(value, contiguous_strides(value.shape))


def attention_rule(op: Any) -> Any:
    """A rule that calls attention `op`, which assumes a last stride of 1.

    Layouts are assigned after attention was found: an operand may have been converted since. A mask
    beside the causal flag hides the same keys, and more exactly.
    """

    def lowered(lw: Lowering, *args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        rows = [rows_of(lw, each) if isinstance(each, Value) else each for each in args]
        if attn_mask is not None:
            kwargs["attn_mask"] = rows_of(lw, attn_mask)
            rows = [False if each is True else each for each in rows]
        return library_rule(op)(lw, *rows, **kwargs)

    return lowered


for _op in (ATTENTION_FORWARD, ATTENTION_BACKWARD):
    LIBRARY.add(_op, attention_rule(_op), "library")


@LIBRARY.register(aten.convolution_backward.default, kind="library")
def convolution_backward(lw: Lowering, *args: Any, row_major: bool = False) -> Any:
    """The library computes input and weight gradients; the bias gradient, a sum, is generated.

    `row_major`: the operands are, and so are the library's gradients, whatever the node's are.
    """
    grad, mask = args[0], list(args[-1])
    # The node may return tensors for gradients that the mask does not request.
    metas = [m if on else None for m, on in zip(lw.node.meta["val"], mask, strict=True)]
    if row_major:
        metas = [m if m is None else m.new_empty(m.shape) for m in metas]
    wanted_bias = mask[2]
    mask[2] = False
    outs = [m for m, on in zip(metas, mask, strict=True) if on]
    results: list[Any] = [None, None, None]
    if outs:
        found = lw.call(
            aten.convolution_backward.default, (*args[:-1], mask), outs=_full_outs(metas, mask)
        )
        for k in range(2):
            results[k] = found[k] if mask[k] else None
    if wanted_bias:
        results[2] = bias_gradient(lw, grad)
    return results


def bias_gradient(lw: Lowering, grad: Value) -> Value:
    """The sum of `grad` over everything but channels."""
    axes = [i for i in range(grad.ndim) if i != 1]
    return lw.cast(lw.squeeze(total(lw, grad, axes, opmath_dtype(grad.dtype)), axes), grad.dtype)


def _full_outs(metas: Sequence[Any], mask: Sequence[bool]) -> list[torch.Tensor]:
    """One FakeTensor per result; a gradient not requested is an empty tensor that is never read."""
    like = next(m for m in metas if isinstance(m, torch.Tensor))
    return [
        m if on and isinstance(m, torch.Tensor) else like.new_empty((0,))
        for m, on in zip(metas, mask, strict=True)
    ]
