"""Decompositions that PyTorch lacks, or that replace its own.

Where a target has rules for a forward operator only, or for its gradient only, the other runs
eagerly: so what a decomposed forward operator saves for its gradient has eager's dtypes, sizes and
numbers. PyTorch's own decompositions differ there for attention, and for norms of 16-bit floats
with float32 weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp import torch_private
from dicp.dtypes import REDUCED_FLOATS, Number, converted, opmath_dtype
from dicp.dynamo_bridge.cells import CELLS
from dicp.dynamo_bridge.interpolation import interpolate_cubically, interpolate_linearly
from dicp.torch_private import ATTENTION_FORWARD, HOST, OpOverload, all_decompositions, pytree

aten = torch.ops.aten


def _copy_of(view: OpOverload) -> Callable[..., Any]:
    """The decomposition of a view's copying form: the view, cloned to contiguous memory."""

    def copied(part: Any) -> Any:
        return part.clone(memory_format=torch.contiguous_format)

    def rule(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(copied, view(*args, **kwargs))

    return rule


def ldexp(x: Tensor, exponent: Tensor) -> Any:
    """x * 2^exponent as a product, as eager computes it for an integer `x` or a float exponent.

    For a float and an integer exponent eager changes the exponent of `x`, since the power alone may
    overflow or vanish. PyTorch's own decomposition multiplies there, too.
    """
    if x.is_floating_point() and not exponent.is_floating_point():
        return NotImplemented
    of_number = _raises_number(x) or not exponent.is_floating_point()
    return x * torch.pow(2.0 if of_number else x.new_full((), 2.0), exponent)


def _raises_number(x: Tensor) -> bool:
    """Whether eager's `ldexp` of `x` computes its power from the number 2, which makes the power
    contiguous, rather than from a tensor without dimensions."""
    return x.dtype == torch.float32 or not (x.is_floating_point() or x.is_complex())


def ldexp_of_number(x: Tensor, exponent: Tensor) -> Any:
    """`ldexp` where eager computes the power from a number; of targets that have the operator, too:
    PyTorch's inference does not, and gives the power other strides and dtypes."""
    return ldexp(x, exponent) if _raises_number(x) else NotImplemented


def _eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """PyTorch's own decomposition numbers over 255 rows in uint16, which eager `arange` lacks."""
    rows = torch.arange(n, device=device)
    columns = rows if m is None else torch.arange(m, device=device)
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """softmax(scores) v in eager's strides, and log sum exp(scores) of each row.

    PyTorch's own decomposition gives the weights in place of the logarithms, which the gradient of
    attention reads.
    """
    if dropout_p:
        return NotImplemented
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    shared = query.shape[1] // key.shape[1]
    if shared != 1:
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    wide = opmath_dtype(query.dtype)
    scores = (query.to(wide) @ key.to(wide).mT) * factor
    if is_causal:
        inside = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(inside, scores, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(row_max == -math.inf, 0.0, row_max)  # of a row without any key
    exp_scores = (scores - row_max).exp()
    total = exp_scores.sum(-1, keepdim=True)
    out = torch.where(total == 0, 0.0, exp_scores / total).to(value.dtype) @ value
    if query.transpose(1, 2).is_contiguous():
        out = _transposed(out)
    return out, _transposed((total.log() + row_max).squeeze(-1))


def _transposed(x: Tensor) -> Tensor:
    """`x` in memory whose dimensions 1 and 2 are exchanged."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def multilabel_margin_loss(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """torch.nn.functional.multilabel_margin_loss: max(0, 1 - x[label] + x[other]) over all others.

    The labels of a row end at the first -1; PyTorch's own decomposition, which tracing does in any
    case, adds what comes after it.
    """
    x = _for_loss(input)
    if not x.is_floating_point():
        return _whole(F.multilabel_margin_loss, x, target, reduction=reduction)
    x, labels = (torch.atleast_2d(t) for t in (x, target))
    count = x.shape[1]
    classes = torch.arange(count, device=x.device)
    end = torch.where(labels == -1, classes, count).amin(-1, keepdim=True)
    present = classes < end
    is_label = ((classes == labels.unsqueeze(-1)) & present.unsqueeze(-1)).any(1)
    # Eager refuses wrong labels after the end, too: the gather's check must see them.
    own = x.gather(1, torch.where(labels == -1, 0, labels)).unsqueeze(-1)
    margins = 1 - own + x.unsqueeze(1)
    # A margin of NaN counts nothing, and one of 0 has no gradient.
    counted = present.unsqueeze(-1) & ~is_label.unsqueeze(1) & (margins > 0)
    loss = torch.where(counted, margins / count, 0).sum((1, 2))
    return _reduced(loss, target.shape[:-1], reduction)


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
) -> Tensor:
    """torch.nn.functional.multi_margin_loss: max(0, margin - x[label] + x[other]) ** p.

    PyTorch's own decomposition, which tracing does in any case, counts a margin of NaN and has a
    gradient where one is 0.
    """
    x = _for_loss(input)
    if not x.is_floating_point():
        return _whole(F.multi_margin_loss, x, target, p, margin, weight, reduction=reduction)
    x, labels = torch.atleast_2d(x), torch.atleast_1d(target).unsqueeze(1)
    margins = margin - x.gather(1, labels) + x
    counted = (torch.arange(x.shape[1], device=x.device) != labels) & (margins > 0)
    positive = torch.where(counted, margins, 0)
    powers = positive if p == 1 else positive * positive
    loss = (powers if weight is None else powers * weight[labels]).mean(1)
    return _reduced(loss, target.shape, reduction)


def pad(
    x: Tensor, sizes: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """torch.nn.functional.pad; circular padding is a concatenation.

    Tracing makes it copies of slices into a tensor, one after another.
    """
    if mode != "circular" or any(size < 0 for size in sizes):
        return torch_private.pad(x, sizes, mode, value)
    for k in range(len(sizes) // 2):
        dim, (left, right) = -1 - k, sizes[2 * k : 2 * k + 2]
        n = x.shape[dim]
        before = [x.narrow(dim, n - left, left)] if left else []
        after = [x.narrow(dim, 0, right)] if right else []
        x = torch.cat([*before, x, *after], dim)
    return x.contiguous()


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """torch.nn.functional.affine_grid, a matrix product where tracing does not give eager's result:
    under autocast, which computes it in 16 bits, and for images of a single row or column, of which
    the gradient makes a tensor of a number.
    """
    lengths = size[2:]
    if not torch.is_autocast_enabled(theta.device.type) and all(n != 1 for n in lengths):
        return F.affine_grid(theta, size, align_corners)  # type: ignore[arg-type]

    def line(length: int) -> Tensor:
        if length == 1:
            return theta.new_zeros(1)
        ends = torch.linspace(-1, 1, length, dtype=theta.dtype, device=theta.device)
        return ends if align_corners else ends * (length - 1) / length

    axes = torch.meshgrid(*map(line, lengths), indexing="ij")
    base = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)
    rows = base.view(1, -1, len(lengths) + 1).expand(size[0], -1, -1)
    return (rows @ theta.mT).view(size[0], *lengths, len(lengths))


def hardshrink(input: Tensor, lambd: Number = 0.5) -> Tensor:
    """torch.nn.functional.hardshrink, which eager computes in floating point alone."""
    if input.is_floating_point():
        return F.hardshrink(input, lambd)
    return _whole(F.hardshrink, input, lambd)


def _whole(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A call that eager refuses, and that tracing otherwise decomposes to differentiate it."""
    with torch_private.below_autograd():
        return function(*args, **kwargs)


def _for_loss(x: Tensor) -> Tensor:
    """`x` in float32 under autocast, which computes losses of 16-bit values in it."""
    is_cast = x.dtype in REDUCED_FLOATS and torch.is_autocast_enabled(x.device.type)
    return x.float() if is_cast else x


def _reduced(loss: Tensor, shape: Any, reduction: str) -> Tensor:
    """The losses of all rows, in `shape` if they are not reduced."""
    if reduction == "none":
        return loss.reshape(shape)
    return loss.mean() if reduction == "mean" else loss.sum()


def angle(x: Tensor) -> Tensor:
    """The argument of numbers on the complex plane: of real ones 0, pi, or NaN.

    Eager's result for complex numbers is contiguous, which PyTorch's inference does not know.
    """
    if x.is_complex():
        return torch.atan2(x.imag, x.real).contiguous()
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    half_turn = torch.scalar_tensor(math.pi, dtype=dtype, device=x.device)
    result = torch.where(x < 0, half_turn, 0.0)
    return torch.where(torch.isnan(x), x, result) if x.is_floating_point() else result


def sgn(x: Tensor) -> Tensor:
    """The sign of each number; of a complex one, each part divided by the absolute value.

    PyTorch's own decomposition divides complex numbers, and an infinite part makes both parts NaN.
    """
    if not x.is_complex():
        return x.sign()
    size = x.abs()
    return torch.complex(*(torch.where(size == 0, 0.0, part / size) for part in (x.real, x.imag)))


def log_ndtr(x: Tensor) -> Tensor:
    """log((1 + erf(x / sqrt(2))) / 2), by eager's formulas below -1 and above it.

    PyTorch's own decomposition takes the first one up to 1, where it is the difference of two
    numbers that are larger than the result.
    """
    if x.is_complex():
        return NotImplemented
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    t = x * math.sqrt(0.5)
    tail = torch.log(torch.special.erfcx(-t) / 2) - t * t
    return torch.where(x < -1.0, tail, torch.log1p(-torch.erfc(t) / 2))


def ndtr(x: Tensor) -> Tensor:
    """torch.special.ndtr: erfc(-x / sqrt(2)) / 2.

    PyTorch's own decomposition, which tracing does in any case, subtracts equal numbers below 0.
    """
    if x.is_complex():
        return torch.special.ndtr(x)  # which eager refuses
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    wide = x.to(opmath_dtype(dtype))
    return (torch.erfc(wide * -math.sqrt(0.5)) / 2).to(dtype)


def elu(x: Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Tensor:
    """Eager's formula; PyTorch's own decomposition rounds each step to 16 bits, and gives
    alpha (e^0 - 1) in place of 0."""
    wide = x.to(opmath_dtype(x.dtype))
    low = torch.expm1(wide * input_scale) * (alpha * scale)
    return torch.where(wide < 0, low, wide * scale).to(x.dtype)


def celu(x: Tensor, alpha: Any = 1) -> Tensor:
    """As eager, by `elu`."""
    return aten.elu.default(x, alpha, 1, 1 / alpha)


def hardshrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


def index_put(
    x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """`unsafe` allows eager to skip the check of the indices: it changes no result."""
    return aten.index_put.default(x, indices, values, accumulate)


def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """torch.nn.functional.pixel_unshuffle; on the host, of an empty tensor a copy, in its shape."""
    empty = x.device.type == HOST and torch_private.statically_known_true(x.numel() == 0)
    if not empty or x.dim() < 3 or downscale_factor <= 0:
        return all_decompositions[aten.pixel_unshuffle.default](x, downscale_factor)
    for size in x.shape[-2:]:
        torch_private.check_size(
            size % downscale_factor == 0,
            lambda: f"pixel_unshuffle expects sizes that {downscale_factor} divides",
        )
    return x.clone()


NORM_WEIGHTS: dict[OpOverload, int] = {
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit_functional.default: 1,
    aten._native_batch_norm_legit.no_stats: 1,
    aten._batch_norm_with_update_functional.default: 1,
}
"""Norms that save statistics for their gradient, and which argument is the weight."""


def in_one_dtype(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for a norm whose weight may have another dtype than its input.

    Eager computes and saves statistics in the weight's dtype then; PyTorch's inference says that
    they have the input's.
    """

    def norm(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = NORM_WEIGHTS[op] - 1
        weight = args[place] if place < len(args) else None
        if weight is None or weight.dtype == x.dtype:
            return rule(x, *args, **kwargs)
        out, *saved = op(x.to(weight.dtype), *args, **kwargs)
        return out.to(x.dtype), *saved

    return norm


def unless_of_one_row(rule: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decomposition of affine grids, which makes a tensor of a number where the image has
    a single row or column: AOTAutograd rejects that."""

    def grid(theta: Tensor, size: Any, align_corners: bool) -> Any:
        if any(length == 1 for length in size[2:]):
            return NotImplemented
        return rule(theta, size, align_corners)

    return grid


MAX_POOLS = {
    aten.adaptive_max_pool2d.default: aten.max_pool2d_with_indices.default,
    aten.adaptive_max_pool3d.default: aten.max_pool3d_with_indices.default,
}
"""Adaptive pooling, and pooling by windows of one size."""


def of_last_nan(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decomposition of adaptive maxima, which takes the first NaN of a whole image where
    eager's pooling takes the last."""

    def pool(input: Tensor, output_size: Sequence[Any]) -> Any:
        found = rule(input, output_size)
        if found is NotImplemented or any(size != 1 for size in output_size):
            return found
        return found[0], MAX_POOLS[op](input, input.shape[-len(output_size) :])[1]

    return pool


def no_dropout(input: Tensor, p: float, train: bool | None = True) -> Any:
    """`native_dropout` that drops nothing: a copy, where PyTorch's inference returns the input."""
    if train is not False and not (isinstance(p, (int, float)) and p == 0):
        return NotImplemented
    return input.clone(), torch.ones_like(input, dtype=torch.bool)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch.nn.functional.dropout, which returns its input where it drops nothing; PyTorch's
    decomposition, which tracing does in any case, copies it."""
    if p == 0 or (not training and 0 <= p <= 1):
        return input
    return F.dropout(input, p, training, inplace)


def polygamma_in_place(x: Tensor, n: int) -> Tensor:
    """Tensor.polygamma_, which AOTAutograd refuses to make functional."""
    return x.copy_(torch.polygamma(n, x)) if x.is_floating_point() else x.polygamma_(n)


def pinv_of_complex(
    x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """The pseudoinverse of complex matrices by singular values.

    PyTorch's kernel forgets to conjugate a factor under a dispatch mode, in which AOTAutograd runs
    each graph's first call.
    """
    if not x.is_complex() or hermitian or x.numel() == 0:
        return NotImplemented
    if atol is None:
        atol = torch.zeros((), dtype=torch.float64, device=x.device)
    if rtol is None:
        rtol = torch.where(atol > 0, 0.0, torch.finfo(x.dtype).eps * max(x.shape[-2:]))
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    least = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * values[..., :1])
    inverse = torch.where(values > least, values.reciprocal(), 0.0).to(x.dtype)
    return (right.mH * inverse.unsqueeze(-2)) @ left.mH


def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """In eager's strides; PyTorch's own decomposition copies to the memory format of `grad`."""
    return grad * mask * scale


def broadcast_complex(real: Tensor, imaginary: Tensor) -> Any:
    """Complex numbers of parts that are broadcast; of equal shapes it is left whole."""
    if real.shape == imaginary.shape:
        return NotImplemented
    return aten.complex.default(*torch.broadcast_tensors(real, imaginary))


NUMBER_OPERANDS = frozenset({
    aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other,
    aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar,
})  # fmt: skip
"""Operators whose decompositions make a tensor of a number, and refuse those beyond its dtype."""


def with_converted_number(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` of a tensor and a number, rounded to the tensor's dtype: maybe to infinity."""

    def with_number(*operands: Any) -> Any:
        dtype = torch.result_type(*(x for x in operands if isinstance(x, Tensor)), 1.0)
        return rule(*(converted(float(x), dtype) if isinstance(x, Number) else x for x in operands))

    return with_number


LINSPACES = frozenset({
    aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
})  # fmt: skip


def spaced_in_float64(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for floats. For integers eager truncates both ends first and rounds each float64
    product and sum once; PyTorch's own decomposition takes fractions of the ends, in float32."""

    def spaced(
        start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any
    ) -> Any:
        if dtype is None or dtype.is_floating_point or dtype.is_complex or steps < 2:
            return rule(start, end, steps, dtype=dtype, **options)
        first, last = (_truncated(each, dtype, options.get("device")) for each in (start, end))
        index = torch.arange(steps, device=options.get("device"))
        step = (last - first) / (steps - 1)
        from_start = torch.addcmul(first, index.double(), step)
        from_end = torch.addcmul(last, (steps - 1 - index).double(), -step)
        return torch.where(index < steps // 2, from_start, from_end).to(dtype)

    return spaced


def _truncated(end: Any, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """An end of a range of integers, a tensor or a number, as a tensor in float64."""
    if isinstance(end, Tensor):
        return end.to(device=device, dtype=dtype).double()
    return torch.full((), torch.sym_int(end), dtype=torch.float64, device=device)


MEAN_GRADIENTS = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
})  # fmt: skip
"""Gradients of means whose decompositions divide a number by the number of elements."""


def unless_empty(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for the gradient of a loss, which has no elements where the input has none."""

    def gradient(grad: Tensor, x: Tensor, *options: Any) -> Any:
        if torch_private.statically_known_true(x.numel() == 0):
            return torch.zeros_like(x)
        return rule(grad, x, *options)

    return gradient


def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, *options: Any) -> Tensor:
    """NaN where an operand is NaN, as in eager, where PyTorch's own decomposition has 0."""
    result = all_decompositions[aten.smooth_l1_loss_backward.default](grad, x, target, *options)
    difference = x - target
    return torch.where(difference.isnan(), difference.to(result.dtype), result)


def soft_margin_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1
) -> Tensor:
    """-t grad sigmoid(-t x): PyTorch's own decomposition, t grad (sigmoid(t x) - 1), subtracts
    nearly equal numbers where t x is large."""
    sign = -target.to(opmath_dtype(x.dtype))
    result = sign * torch.sigmoid(sign * x) * grad
    return (result / x.numel() if reduction == 1 else result).to(x.dtype)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Any:
    """v g / |v| and |v|, rounded once; PyTorch's own decomposition rounds the quotient, too, and
    takes the norm over all of a vector."""
    others = [i for i in range(v.dim()) if i != dim]
    wide = v.to(opmath_dtype(v.dtype))
    norms = torch.linalg.vector_norm(wide, 2, others, keepdim=True) if others else wide.abs()
    saved = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
    return (wide * (g / norms)).to(v.dtype), norms.to(saved)


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> Any:
    """The gradients of v g / |v|, of which PyTorch decomposes the forward operator alone."""
    others = [i for i in range(v.dim()) if i != dim]
    wide = v.to(opmath_dtype(v.dtype))
    products = grad * wide
    of_g = (products.sum(others, keepdim=True) if others else products) / norms
    return ((grad - wide / norms * of_g) * (g / norms)).to(v.dtype), of_g.to(g.dtype)


OWN: dict[Any, Callable[..., Any]] = {
    **CELLS,
    aten.upsample_linear1d.default: interpolate_linearly,
    aten.upsample_bilinear2d.default: interpolate_linearly,
    aten.upsample_trilinear3d.default: interpolate_linearly,
    aten.upsample_bicubic2d.default: interpolate_cubically,
    aten.angle.default: angle,
    aten._index_put_impl.default: index_put,
    aten._is_all_true.default: torch.all,
    aten.elu.default: elu,
    aten.celu.default: celu,
    aten.hardshrink_backward.default: hardshrink_backward,
    aten.linalg_pinv.atol_rtol_tensor: pinv_of_complex,
    aten.ldexp.Tensor: ldexp,
    aten.sgn.default: sgn,
    aten.special_log_ndtr.default: log_ndtr,
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.pixel_unshuffle.default: pixel_unshuffle,
    aten.smooth_l1_loss_backward.default: smooth_l1_loss_backward,
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
    aten._weight_norm_interface.default: weight_norm,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten._efficientzerotensor.default: torch.zeros,
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.select_copy.int: _copy_of(aten.select.int),
    aten.slice_copy.Tensor: _copy_of(aten.slice.Tensor),
    aten.split_copy.Tensor: _copy_of(aten.split.Tensor),
    aten.view_copy.default: _copy_of(aten.reshape.default),  # for any strides
    ATTENTION_FORWARD: _attention,
}
"""Decompositions that PyTorch lacks or that replace its own. Copying forms of views have no
lowering rules of their own: no rule can then return a view in place of the copy."""
