"""Operators for whose results and gradients PyTorch's inference gives other strides than eager.

Most are corrected at the operands: an operator in `LAYOUTS` is called with copies of its operands,
in strides for which PyTorch's inference gives the result eager's strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.dtypes import REDUCED_FLOATS
from dicp.torch_private import HOST, OpOverload

aten = torch.ops.aten

Operands = Sequence[Any]
Layout = Callable[[OpOverload, Operands], Operands | None]
"""Copies an operator's operands to the strides that it needs; None where they have them."""


def with_layout(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for operands that already have the strides that `LAYOUTS` asks for; for others, the
    operator on copies that have them."""
    layout = LAYOUTS[op]

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        operands = layout(op, args)
        if operands is None:
            return rule(*args, **kwargs)
        return op(*operands, **kwargs)

    return laid_out


BATCH_NORMS: dict[OpOverload, int] = {
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._batch_norm_with_update_functional.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.batch_norm_backward.default: 1,
}
"""Batch norms and their gradients, and which argument is the input."""

FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _contiguous_in(x: Tensor) -> torch.memory_format | None:
    return next((f for f in FORMATS if x.is_contiguous(memory_format=f)), None)


def suggested_format(x: Tensor) -> torch.memory_format:
    """The memory format that `x` resembles by the order of its strides, those of single elements
    included (PyTorch, MemoryFormat.h, is_channels_last_strides_2d)."""
    if x.dim() not in (4, 5) or x.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        size, stride = x.shape[dim], x.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == x.stride(1)):
            return torch.contiguous_format
        least = stride * size
    return FORMATS[x.dim() - 3]


def _batch_norm_format(*tensors: Tensor) -> torch.memory_format:
    """The memory format of a batch norm's result, from its input; or of its gradient, from the
    result's gradient and the input.

    (In eager, a dimension of size 1 of the result's gradient has the result's stride, which is not
    known here: PyTorch's inference takes it from the input.)
    """
    *grad, x = map(_contiguous_in, tensors)
    suggested = suggested_format(tensors[-1])
    return suggested if x is None or any(each != suggested for each in grad) else x


def _in_memory_format(op: OpOverload, args: Operands) -> Operands | None:
    """A batch norm's input, after the result's gradient if it is a gradient, in one memory format.

    PyTorch's inference says that the result and the gradient have the strides of the input and of
    the result's gradient; eager's on the host are dense, in one of two memory formats.
    """
    place = BATCH_NORMS[op]
    tensors, rest = args[: place + 1], args[place + 1 :]
    wanted = _batch_norm_format(*tensors)
    if tensors[-1].device.type != HOST or all(
        x.is_contiguous(memory_format=wanted) for x in tensors
    ):
        return None
    return [*(x.contiguous(memory_format=wanted) for x in tensors), *rest]


FORMAT_SOURCES: dict[OpOverload, int] = {
    aten.reflection_pad2d.default: 0, aten.reflection_pad2d_backward.default: 1,
    aten.reflection_pad3d.default: 0, aten.reflection_pad3d_backward.default: 1,
    aten.replication_pad2d.default: 0, aten.replication_pad2d_backward.default: 1,
    aten.replication_pad3d.default: 0, aten.replication_pad3d_backward.default: 1,
    aten.channel_shuffle.default: 0, aten.max_unpool2d.default: 0,
}  # fmt: skip
"""Operators whose result has the memory format of an argument, and which one that is."""


def in_format_of_input(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule`; for an argument in another memory format than contiguous, the operator on contiguous
    copies, and a result in that format, as in eager. (PyTorch's inference gives a contiguous
    result.)"""
    place = FORMAT_SOURCES[op]

    def followed(*args: Any, **kwargs: Any) -> Any:
        tensors, rest = args[: place + 1], args[place + 1 :]
        wanted = suggested_format(tensors[-1])
        if wanted == torch.contiguous_format or tensors[-1].device.type != HOST:
            return rule(*args, **kwargs)
        # Copies: a tensor with dimensions of size 1 may be contiguous and resemble both formats.
        plain = (x.clone(memory_format=torch.contiguous_format) for x in tensors)
        return op(*plain, *rest, **kwargs).contiguous(memory_format=wanted)

    return followed


def roll_of_slices(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for `roll`. PyTorch's inference gives a contiguous result; eager concatenates two
    slices along one axis after the other, which keeps the memory format of the operand."""

    def rolled(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
        plain = suggested_format(x) == torch.contiguous_format or x.device.type != HOST
        if plain or len(shifts) != len(dims) or x.numel() == 0:
            return rule(x, shifts, dims)
        for shift, dim in zip(shifts, dims, strict=True):
            first = -shift % x.shape[dim]
            last = x.shape[dim] - first
            x = aten.cat.default([x.narrow(dim, first, last), x.narrow(dim, 0, first)], dim)
        return x

    return rolled


def pad_or_crop(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for `constant_pad_nd`, whose result PyTorch's inference takes for contiguous where a
    width is symbolic: of an input that it only crops, eager copies the rest in the input's strides.
    """

    def padded(x: Tensor, pad: Sequence[Any], *value: Any) -> Any:
        known = all(isinstance(width, int) for width in pad)
        # The sign of a width is a guard: it is looked at only where it makes a difference.
        if known or _keeps_format(x, pad) or any(width > 0 for width in pad):
            return rule(x, pad, *value)
        for k, (low, high) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            dim = x.dim() - 1 - k
            x = x.narrow(dim, -low, x.shape[dim] + low + high)
        return x.clone()

    return padded


def _keeps_format(x: Tensor, pad: Sequence[Any]) -> bool:
    """Whether copies of a tensor have the strides of the memory format that it resembles, or a size
    depends on data: the operator then runs eagerly."""
    # Both import sympy, which the device does not need.
    from dicp.dynamo_bridge.analysis.values import strides_of
    from dicp.torch_private import depends_on_data

    if any(map(depends_on_data, (x, *pad))):
        return True
    formats = torch.preserve_format, suggested_format(x)
    copied, inferred = (strides_of(torch.empty_like(x, memory_format=f)) for f in formats)
    return copied == inferred


ON_HOST = frozenset({aten.glu_backward.default, aten.log_sigmoid_forward.default})
"""Operators whose results eager makes contiguous on the host alone."""
CONTIGUOUS = (
    aten._log_softmax_backward_data.default, aten.adaptive_max_pool3d.default,
    aten.huber_loss_backward.default, aten.mse_loss_backward.default,
    aten.native_layer_norm_backward.default, aten.pow.Scalar,
    aten.smooth_l1_loss_backward.default, *ON_HOST,
)  # fmt: skip
"""Operators whose results eager makes contiguous, whatever strides the operands have."""


def _contiguous(op: OpOverload, args: Operands) -> Operands | None:
    tensors = [z for z in args if isinstance(z, Tensor)]
    elsewhere = op in ON_HOST and tensors[0].device.type != HOST
    if elsewhere or all(z.is_contiguous() for z in tensors):
        return None
    return [z.contiguous() if isinstance(z, Tensor) else z for z in args]


STRIDE_SOURCES: dict[OpOverload, int] = {
    aten.binary_cross_entropy.default: 0,
    aten.binary_cross_entropy_backward.default: 1,
    aten.huber_loss.default: 0,
}
"""Losses and gradients that eager writes into a tensor with an argument's strides, and which."""


def with_strides_of_input(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule`, and a copy of its result in the argument's strides where they differ."""
    place = STRIDE_SOURCES[op]

    def strided(*args: Any, **kwargs: Any) -> Any:
        out, like = rule(*args, **kwargs), torch.empty_like(args[place])
        if out is NotImplemented or out.shape != like.shape or out.stride() == like.stride():
            return out
        return aten.copy.default(like, out)

    return strided


ORDERED_BY_BOTH = (
    aten.complex.default, aten.copysign.Tensor, aten.div.Tensor_mode, aten.floor_divide.default,
    aten.heaviside.default, aten.logaddexp.default, aten.logaddexp2.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
    aten.special_xlog1py.default, aten.xlogy.Tensor,
)  # fmt: skip
"""Pointwise operators for which PyTorch's inference orders the strides of the result as those of
one operand; in eager that takes both."""

FLOATING = frozenset({aten.copysign.Tensor, aten.special_xlog1py.default, aten.xlogy.Tensor})
"""Operators of two integers that eager converts to floats before it orders their strides."""


def _in_common_strides(op: OpOverload, args: Operands) -> Operands | None:
    """Both operands in the result's strides, where theirs differ."""
    from dicp.dynamo_bridge.analysis.values import (  # sympy, which the device does not need
        is_contiguous,
        shape_of,
        strides_of,
    )

    x, y = args
    tensors = [z for z in args if isinstance(z, Tensor)]
    differ = len({(shape_of(z), strides_of(z)) for z in tensors}) > 1
    if not differ or all(map(is_contiguous, tensors)):
        return None
    common = torch.result_type(x, y)  # a tensor without dimensions does not promote it
    if op in FLOATING and not common.is_floating_point:
        return [z.to(torch.get_default_dtype()) for z in args]
    like = torch.empty_like(aten.eq.Tensor(x, y))
    laid_out = (torch.empty_like(like, dtype=z.dtype if z.dim() else common) for z in args)
    return list(map(aten.copy.default, laid_out, args))


ORDERED_BY_GRADIENT = (
    aten.elu_backward.default, aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default, aten.hardtanh_backward.default,
    aten.logit_backward.default, aten.softplus_backward.default,
)  # fmt: skip
"""Gradients of which PyTorch's inference orders the strides as those of the input; eager takes the
result's gradient first."""


def _gradient_first(op: OpOverload, args: Operands) -> Operands | None:
    """The input in the strides of the gradient that comes before it."""
    # It imports sympy, which the device does not need.
    from dicp.dynamo_bridge.analysis.values import strides_of

    grad, x = [z for z in args if isinstance(z, Tensor)][:2]
    if strides_of(grad) == strides_of(x):
        return None
    actual, inferred = (aten.eq.Tensor(*pair) for pair in ((grad, x), (x, grad)))
    if strides_of(actual) == strides_of(inferred):
        return None
    copy = aten.copy.default(torch.empty_like(actual, dtype=x.dtype), x)
    return [copy if z is x else z for z in args]


CONVERTED_FIRST = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.atan2.default,
    aten.clamp_max.Tensor, aten.clamp_min.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor,
    aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.fmax.default, aten.fmin.default,
    aten.fmod.Tensor, aten.hypot.default, aten.maximum.default, aten.minimum.default,
    aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.gelu_backward.default,
    aten.mish_backward.default, aten.sigmoid_backward.default, aten.silu_backward.default,
    aten.tanh_backward.default,
)  # fmt: skip
"""Pointwise operators of which PyTorch's inference converts 16-bit floats to float32 before it
orders the strides: an expanded operand is contiguous then."""


def _broadcast_by_operator(op: OpOverload, args: Operands) -> Operands | None:
    """The operands before they were expanded, where the operator broadcasts them as well."""
    x, y = args[:2]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return None
    single = _without_repetition(x, y), _without_repetition(y, x)
    return None if single[0] is x and single[1] is y else [*single, *args[2:]]


def _without_repetition(x: Tensor, other: Tensor) -> Tensor:
    """`x` with size 1 in its expanded dimensions (of stride 0), where `other` is not expanded."""
    if x.dtype not in REDUCED_FLOATS or torch.result_type(x, other) != x.dtype:
        return x  # an operand of another dtype than the result is converted in eager, too
    if x.layout != torch.strided or other.layout != torch.strided:
        return x
    repeated = [
        dim
        for dim in range(-min(x.dim(), other.dim()), 0)
        if _is_zero(x.stride(dim)) and not _is_zero(other.stride(dim))
    ]
    if not repeated:
        return x
    # Both import sympy, which the device does not need.
    from dicp.dynamo_bridge.analysis.values import equal_sizes, is_contiguous, shape_of
    from dicp.torch_private import depends_on_data

    if is_contiguous(other):
        return x
    sizes, full = shape_of(x), shape_of(other)
    for dim in repeated:
        has_elements = sizes[dim] != 0 and not depends_on_data(x.shape[dim])
        if has_elements and sizes[dim] != 1 and equal_sizes(sizes[dim], full[dim]):
            x = x.select(dim, 0).unsqueeze(dim)
    return x


def _is_zero(step: Any) -> bool:
    return isinstance(step, int) and step == 0


STRIDED_AS_GRADIENT = (aten.log_sigmoid_backward.default,)
"""Pointwise gradients that eager writes into a tensor with the strides of the result's gradient."""


def _like_gradient(op: OpOverload, args: Operands) -> Operands | None:
    """The result's gradient and saved tensors, all in the strides of a tensor like the first."""
    like = torch.empty_like(args[0])
    if args[0].device.type != HOST or all(x.stride() == like.stride() for x in args):
        return None
    return [aten.copy.default(torch.empty_like(like), x) for x in args]


LAYOUTS: dict[OpOverload, Layout] = {
    **dict.fromkeys(BATCH_NORMS, _in_memory_format),
    **dict.fromkeys(CONTIGUOUS, _contiguous),
    **dict.fromkeys(ORDERED_BY_BOTH, _in_common_strides),
    **dict.fromkeys(ORDERED_BY_GRADIENT, _gradient_first),
    **dict.fromkeys(CONVERTED_FIRST, _broadcast_by_operator),
    **dict.fromkeys(STRIDED_AS_GRADIENT, _like_gradient),
}
"""Operators of which PyTorch's inference gives eager's strides for some operands only."""


CONTIGUOUS_IN_PLACE = (
    "addbmm_", "addmm_", "baddbmm_", "bernoulli_", "cumprod_", "cumsum_", "index_add_",
    "index_copy_", "index_reduce_", "masked_fill_", "masked_scatter_", "mvlgamma_", "renorm_",
    "scatter_", "scatter_add_", "scatter_reduce_", "tril_", "triu_",
)  # fmt: skip
"""Methods that write into a tensor; the results of their functional forms are contiguous."""


def in_place(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The method `name`, which leaves the strides of `x` as they are.

    Functionalization gives `x` the strides of the functional form's result. A copy of a view of it
    would then be a view, and what is written into that copy would be written into `x`.
    """
    from dicp.dynamo_bridge.analysis.values import is_contiguous

    if x.layout != torch.strided or is_contiguous(x):
        return getattr(x, name)(*args, **kwargs)  # type: ignore[no-any-return]
    copy = x.clone(memory_format=torch.contiguous_format)
    return x.copy_(getattr(copy, name)(*args, **kwargs))


def windows(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Tensor.unfold of what is written into: functionalization would make elements between windows
    and behind the last one zeros, but leaves what a slice lacks as it is.

    What lies behind is counted from the end: AOTAutograd makes a view of symbolic length with the
    strides of the traced call.
    """
    found = x.unfold(dimension, size, step)
    if x.dim() == 0 or size > step:
        return found
    if size == 1:  # all elements, of which a slice takes some
        every = x.unfold(dimension, 1, 1)
        return torch.ops.aten.slice.Tensor(every, dimension % x.dim(), 0, None, step)
    behind = x.shape[dimension] - found.shape[dimension % x.dim()] * step
    if behind < 0:
        return x.as_strided(found.shape, found.stride())
    whole = torch.ops.aten.slice.Tensor(x, dimension, 0, -int(behind)) if behind else x
    return whole.unfold(dimension, step, step).narrow(-1, 0, size)


def max_pool1d(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.functional.max_pool1d, whose result, without indices and a gradient, is contiguous
    on the host."""
    found = F.max_pool1d(input, *args, **kwargs)
    has_gradient = torch.is_grad_enabled() and input.requires_grad
    if not isinstance(found, Tensor) or has_gradient or input.device.type != HOST:
        return found
    return found.contiguous()
