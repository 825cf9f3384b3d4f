"""Valid ranges of numbers and sizes, and dtypes of others, for operators whose eager kernels check
them.

A call is compiled where its relations in `DOMAINS` are proved; else eager runs it and raises its
own error. Operators that check in their meta functions need no row: tracing runs these checks.
Dtypes that eager lacks on some devices alone are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import torch

from dicp.dtypes import REDUCED_FLOATS, Number, fits, opmath_dtype

aten = torch.ops.aten
Relations = Callable[..., Sequence[Any]]


def _dropout(x: Any, p: Any, train: Any = True) -> Sequence[Any]:
    return (p >= 0, p <= 1) if train else ()


def _has_dimension(x: Any, dim: Any, *_: Any) -> Sequence[Any]:
    rank = max(x.ndim, 1)
    return dim >= -rank, dim < rank


def _has_dimensions(x: Any, dims: Sequence[Any]) -> Sequence[Any]:
    return [relation for dim in dims for relation in _has_dimension(x, dim)]


def _not_empty(x: Any, dim: Any = None, *_: Any) -> Sequence[Any]:
    """Relations: a dimension, or all of them, has an element. A symbolic size is assumed to have
    one."""
    sizes = x.shape if dim is None or not x.ndim else (x.shape[dim],)
    return [not isinstance(size, int) or size > 0 for size in sizes]


# ---- numbers that the dtype they are converted to has to hold ------------------------------------


def _fits(number: Any, dtype: torch.dtype) -> Sequence[Any]:
    """Relations: `dtype` holds a number. A symbolic number is assumed to fit a floating-point
    or complex type."""
    if isinstance(number, Number):
        return (fits(number, dtype),)
    if isinstance(number, complex):
        return (dtype.is_complex,)
    if number is None or dtype in (torch.bool, torch.int64):
        return ()
    if dtype.is_floating_point or dtype.is_complex:
        return ()
    info = torch.iinfo(dtype)
    return number >= info.min, number <= info.max


def _all_fit(dtype: torch.dtype, *numbers: Any) -> Sequence[Any]:
    return [relation for number in numbers for relation in _fits(number, dtype)]


def _filled(dtype: torch.dtype | None, number: Any) -> Sequence[Any]:
    """Relations of a fill value, whose dtype is the number's where none is specified."""
    if dtype is None and isinstance(number, float):
        dtype = torch.get_default_dtype()
    return () if dtype is None else _fits(number, dtype)


def _joint(dtype: torch.dtype, *numbers: Any) -> torch.dtype:
    """The dtype of an operation on a tensor of `dtype` and numbers; bool for numbers alone."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    given = [n for n in numbers if n is not None]
    if any(isinstance(n, (float, torch.SymFloat)) for n in given):
        return torch.get_default_dtype()
    whole = any(not isinstance(n, bool) for n in given)
    return torch.int64 if dtype == torch.bool and whole else dtype


def _bounds(x: Any, *bounds: Any) -> Sequence[Any]:
    return _all_fit(_joint(x.dtype, *bounds), *bounds)


def _power(x: Any, exponent: Any) -> Sequence[Any]:
    dtype = _joint(x.dtype, exponent)
    if dtype in (torch.float32, torch.float64) or dtype.is_complex:
        return ()
    return *_fits(exponent, dtype), dtype.is_floating_point or exponent >= 0


def _spaced(start: Any, end: Any, dtype: torch.dtype | None) -> Sequence[Any]:
    """Relations of a range's ends; eager computes negative ones like unsigned types."""
    ends = [float(number) for number in (start, end) if isinstance(number, Number)]
    return _all_fit(dtype or torch.get_default_dtype(), *ends)


def _weighted(x: Any, y: Any, *, alpha: Any = 1) -> Sequence[Any]:
    dtypes = [operand.dtype for operand in (x, y) if hasattr(operand, "dtype")]
    numbers = [operand for operand in (x, y) if not hasattr(operand, "dtype")]
    dtype = _joint(reduce(torch.promote_types, dtypes, torch.bool), *numbers)
    real = dtype.is_floating_point or dtype.is_complex
    takes: dict[type, bool] = {bool: dtype == torch.bool, float: real}
    return *_fits(alpha, dtype), takes.get(_kind(alpha), True)


def _subtracted(x: Any, y: Any, *, alpha: Any = 1) -> Sequence[Any]:
    return *_weighted(x, y, alpha=alpha), bool not in (_kind(x), _kind(y))


def _inverted(x: Any, alpha: Any = 1.0) -> Sequence[Any]:
    inverse = (1 / alpha,) if isinstance(alpha, Number) and alpha else ()
    return alpha != 0, *_computed(x, alpha, *inverse)


def _computed(x: Any, *numbers: Any) -> Sequence[Any]:
    """Relations of numbers converted to the dtype that eager computes in."""
    return _all_fit(opmath_dtype(x.dtype), *numbers)


def _apart(sizes: Sequence[Any], strides: Sequence[Any]) -> Sequence[Any]:
    """Relations of a new tensor's strides: no two elements have one address. A symbolic layout is
    assumed to be that of another tensor."""
    steps = [(step, n) for n, step in zip(sizes, strides, strict=True) if n != 1]
    if not all(isinstance(each, int) for pair in steps for each in pair):
        return ()
    relations, reach = [], 1
    for step, n in sorted(steps):
        relations.append(step >= reach)
        reach += (n - 1) * step
    return relations


def _drawn(low: Any, high: Any, dtype: torch.dtype | None) -> Sequence[Any]:
    """Relations of the ends of integers drawn in a dtype (int64 where none is specified)."""
    dtype = dtype or torch.int64
    if dtype.is_complex:
        return (False,)
    if dtype == torch.bool:
        return low < high, low >= 0, high <= 2
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    word = torch.iinfo(torch.int64)  # what a symbolic integer holds
    above = (low >= int(info.min),) if info.min > word.min else ()
    return low < high, *above, *((high - 1 <= int(info.max),) if info.max < word.max else ())


def _uniform(x: Any, low: Any = 0.0, high: Any = 1.0, **_: Any) -> Sequence[Any]:
    if not _floats(x)[0]:
        return (False,)
    most = torch.finfo(x.dtype).max
    return low <= high, low >= -most, high <= most, high - low <= most


# ---- kinds of dtypes -----------------------------------------------------------------------------

_KINDS: Final = (bool, int, float, complex)
"""Each is promoted to those that follow it."""


def _kind(operand: Any) -> type:
    """The kind of a tensor's dtype, or of a number's."""
    dtype = getattr(operand, "dtype", None)
    if dtype is None:
        kind = float if isinstance(operand, torch.SymFloat) else type(operand)
        return kind if kind in _KINDS else int
    if dtype.is_complex or dtype.is_floating_point:
        return complex if dtype.is_complex else float
    return bool if dtype == torch.bool else int


def _promoted(*operands: Any) -> type:
    """The kind of the operands together."""
    kinds = (_kind(operand) for operand in operands if operand is not None)
    return max(kinds, key=_KINDS.index)


def _of(*kinds: type, operands: int = 1) -> Relations:
    """Relation: the first operands together are of one of the kinds."""
    return lambda *args, **_: (_promoted(*args[:operands]) in kinds,)


_numbers, _numbers_together = (_of(int, float, complex, operands=n) for n in (1, 2))
_floats, _floats_together = (_of(float, complex, operands=n) for n in (1, 2))
_reals, _reals_together = (_of(float, operands=n) for n in (1, 2))
_ordered, _ordered_together = (_of(bool, int, float, operands=n) for n in (1, 2))


_INDICES: Final = (torch.int32, torch.int64)
_MASKS: Final = (torch.bool, torch.uint8)


def _alike(*tensors: Any) -> Sequence[Any]:
    """Relation: the tensors have one dtype; None is an operand that is not given."""
    return (len({tensor.dtype for tensor in tensors if tensor is not None}) == 1,)


def _put_at(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Sequence[Any]:
    """Relations of `index_put`; eager fills one mask with one value of any dtype."""
    dtypes = [index.dtype for index in indices if index is not None]
    masked = len(dtypes) == 1 and dtypes[0] in _MASKS and not accumulate
    if masked and x.dtype != values.dtype:
        return [size == 1 for size in values.shape]
    return *_alike(x, values), all(dtype in (*_INDICES, *_MASKS) for dtype in dtypes)


def _add_at(x: Any, dim: Any, index: Any, source: Any, *_: Any, **__: Any) -> Sequence[Any]:
    return *_alike(x, source), index.dtype in _INDICES


def _picked(labels: Sequence[torch.dtype]) -> Relations:
    """Relations of a negative log likelihood, whose target is of one of these dtypes."""
    return lambda x, target, weight=None, *_: (
        target.dtype in labels,
        *_alike(x, weight),
        *_reals(x),
    )


def _wide(x: Any, *_: Any, **__: Any) -> Sequence[Any]:
    """Relation: float16 and bfloat16 are not computed."""
    return (x.dtype not in REDUCED_FLOATS,)


def _resampled(*, bytes_too: bool) -> Relations:
    """Relation: floating-point numbers, or bytes, are interpolated."""
    return lambda x, *_: (_kind(x) is float or (bytes_too and x.dtype == torch.uint8),)


_CONVERTED: Final[dict[Any, Relations]] = {
    aten.fill.Scalar: lambda x, number: _fits(number, x.dtype),
    aten.full.default: lambda size, number, dtype=None, **_: _filled(dtype, number),
    aten.full_like.default: lambda x, number, dtype=None, **_: _fits(number, dtype or x.dtype),
    aten.new_full.default: lambda x, size, number, dtype=None, **_: _fits(number, dtype or x.dtype),
    aten.scalar_tensor.default: lambda number, dtype=None, **_: _filled(dtype, number),
    aten.linspace.default: lambda start, end, steps, dtype=None, **_: _spaced(start, end, dtype),
    aten.masked_fill.Scalar: lambda x, mask, number: _fits(number, x.dtype),
    aten.index_fill.int_Scalar: lambda x, dim, index, number: (
        *_fits(number, x.dtype),
        index.dtype == torch.int64,
    ),
    aten.scatter.value: lambda x, dim, index, number: _fits(number, x.dtype),
    aten.scatter.value_reduce: lambda x, dim, index, number, **_: _fits(number, x.dtype),
    aten.constant_pad_nd.default: lambda x, pad, number=0: _fits(number, x.dtype),
    aten.clamp.default: _bounds,
    aten.clamp_min.default: _bounds,
    aten.clamp_max.default: _bounds,
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _all_fit(x.dtype, low, high),
    aten.threshold.default: lambda x, threshold, number: (
        *_all_fit(x.dtype, threshold, number),
        *_numbers(x),
    ),
    aten.hardshrink.default: lambda x, number=0.5: (*_fits(number, x.dtype), *_reals(x)),
    aten.pow.Tensor_Scalar: _power,
    aten.add.Tensor: _weighted,
    aten.sub.Tensor: _subtracted,
    aten.rsub.Tensor: _subtracted,
    aten.rsub.Scalar: lambda x, y, alpha=1: _subtracted(x, y, alpha=alpha),
    aten.addcmul.default: lambda x, y, z, value=1: (
        *_computed(x, value),
        _promoted(x, y, z) is not bool,
    ),
    aten.addcdiv.default: lambda x, y, z, value=1: (
        *_computed(x, value),
        _promoted(x, y, z) in (float, complex),
    ),
    aten.lerp.Scalar: lambda x, end, weight: (*_computed(x, weight), *_floats(x)),
    aten.lerp.Tensor: _floats,
    aten.leaky_relu.default: lambda x, slope=0.01: _computed(x, slope),
    aten.elu.default: _computed,
    aten.celu.default: lambda x, alpha=1.0: (*_inverted(x, alpha), *_reals(x)),
    aten.softplus.default: lambda x, *numbers: (*_computed(x, *numbers), *_reals(x)),
    aten.smooth_l1_loss.default: lambda x, y, reduction=1, beta=1.0: (
        beta >= 0,
        *_reals_together(x, y),
    ),
    **{
        op.default: lambda x, y, z, beta=1, alpha=1: _computed(x, beta, alpha)
        for op in (aten.addmm, aten.addmv, aten.addr, aten.baddbmm, aten.addbmm)
    },
}

_COMPUTED: Final[Sequence[tuple[Relations, Sequence[Any]]]] = (
    (_reals, (
        aten._batch_norm_with_update, aten._log_softmax_backward_data,
        aten._native_batch_norm_legit, aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training,
        aten._softmax_backward_data, aten.native_batch_norm,
        aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.frac, aten.gelu, aten.glu,
        aten.hardsigmoid, aten.hardswish, aten.log_sigmoid_forward,
        aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward,
        aten.max_unpool2d, aten.max_unpool3d, aten.mish, aten.multi_margin_loss,
        aten.multilabel_margin_loss_forward, aten.round.decimals,
    )),
    (_reals_together, (
        aten._prelu_kernel, aten.huber_loss, aten.hypot, aten.igamma, aten.igammac,
        aten.logaddexp2, aten.mse_loss, aten.nextafter, aten.soft_margin_loss,
    )),
    (_floats, (
        aten.silu, aten.std.correction, aten.std_mean.correction, aten.var.correction,
        aten.var_mean.correction,
    )),
    (_floats_together, (aten.logaddexp,)),
    (_ordered, (aten.nansum,)),
    (_ordered_together, (
        aten.special_xlog1py.default, aten.special_xlog1py.other_scalar,
        aten.special_xlog1py.self_scalar, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self,
        aten.xlogy.Tensor,
    )),
    (_numbers, (
        aten.abs, aten.argmax, aten.argmin, aten.ceil, aten.floor,
        aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.mvlgamma,
        aten.reflection_pad1d, aten.relu, aten.round, aten.trace, aten.trunc,
    )),
    (_numbers_together, (
        aten.fmod.Scalar, aten.fmod.Tensor, aten.pow.Tensor_Tensor, aten.remainder.Scalar,
        aten.remainder.Tensor,
    )),
    (_of(int, operands=2), (
        aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar,
        aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar,
    )),
    (_of(bool, int, operands=2), (
        aten.bitwise_and.Scalar, aten.bitwise_and.Tensor, aten.bitwise_or.Scalar,
        aten.bitwise_or.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Tensor,
    )),
    (_of(bool, int), (aten.bitwise_not,)),
    (_of(bool, float, complex), (aten.im2col,)),
    (_wide, (
        aten.special_bessel_j0, aten.special_bessel_j1, aten.special_erfcx, aten.special_log_ndtr,
        aten.special_ndtri, aten.special_spherical_bessel_j0, aten.special_zeta,
    )),
    (_resampled(bytes_too=True), (
        aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d,
        aten._upsample_nearest_exact3d, aten.upsample_bicubic2d, aten.upsample_bilinear2d,
        aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    )),
    (_resampled(bytes_too=False), (aten.upsample_linear1d, aten.upsample_trilinear3d)),
)  # fmt: skip
"""The kinds of dtypes that eager computes an operator in: of a packet, its default overload."""

DOMAINS: Final[dict[Any, Relations]] = {
    aten.complex.default: lambda x, y: (x.dtype == y.dtype != torch.bfloat16,),
    aten.polar.default: lambda x, y: (x.dtype == y.dtype, *_wide(x)),
    aten.bernoulli.default: lambda p, **_: (p.dtype.is_floating_point,),
    aten.bernoulli.Tensor: lambda x, p, **_: (p.dtype.is_floating_point,),
    aten.bernoulli.p: lambda x, p=0.5, **_: (p >= 0, p <= 1),
    aten.native_dropout.default: _dropout,
    aten._softmax.default: lambda x, dim, *_: (*_has_dimension(x, dim), *_reals(x)),
    aten._safe_softmax.default: _has_dimension,
    aten._log_softmax.default: lambda x, dim, *_: (*_has_dimension(x, dim), *_reals(x)),
    aten.select.int: _has_dimension,
    aten.select_scatter.default: lambda x, part, dim, index: _has_dimension(x, dim),
    aten.slice_scatter.default: lambda x, part, dim=0, *_: _has_dimension(x, dim),
    aten.diagonal_scatter.default: lambda x, part, offset=0, *dims: _has_dimensions(x, dims),
    aten.index_put.default: _put_at,
    aten._unsafe_index_put.default: _put_at,
    aten.index_add.default: _add_at,
    aten.index_reduce.default: lambda x, dim, index, source, *_, **__: (
        *_has_dimension(x, dim),
        *_add_at(x, dim, index, source),
    ),
    aten.index_copy.default: lambda x, dim, index, source: (
        *_alike(x, source),
        index.dtype == torch.int64,
    ),
    aten.put.default: lambda x, index, source, *_: (
        *_alike(x, source),
        index.dtype == torch.int64,
    ),
    aten.index_fill.int_Tensor: lambda x, dim, index, value: (index.dtype == torch.int64,),
    aten.index_select.default: lambda x, dim, index: (index.dtype in _INDICES,),
    aten.nll_loss_forward.default: _picked((torch.uint8, torch.int64)),
    aten.nll_loss2d_forward.default: _picked((torch.int64,)),
    aten.binary_cross_entropy.default: lambda x, y, *_, **__: (*_alike(x, y), *_reals(x)),
    aten.binary_cross_entropy_backward.default: lambda grad, x, y, *_, **__: (
        *_alike(grad, x, y),
        *_reals(x),
    ),
    aten.heaviside.default: lambda x, y: (*_alike(x, y), *_ordered(x)),
    aten.linalg_cross.default: lambda x, y, **_: (*_alike(x, y), *_numbers(x)),
    **dict.fromkeys(
        (aten.max.default, aten.max.dim, aten.min.default, aten.min.dim, aten.median.dim),
        _not_empty,
    ),
    aten.sort.default: lambda x, dim=-1, descending=False: _has_dimension(x, dim),
    aten.sort.stable: lambda x, dim=-1, **_: _has_dimension(x, dim),
    aten.empty_strided.default: lambda sizes, strides, **_: _apart(sizes, strides),
    aten.new_empty_strided.default: lambda x, sizes, strides, **_: _apart(sizes, strides),
    aten.uniform.default: _uniform,
    aten.exponential.default: lambda x, rate=1.0, **_: (rate > 0,),
    aten.geometric.default: lambda x, p, **_: (p > 0, p < 1),
    aten.cauchy.default: lambda x, median=0.0, sigma=1.0, **_: (sigma > 0,),
    aten.log_normal.default: lambda x, mean=1.0, std=2.0, **_: (std > 0,),
    aten.randint.default: lambda high, *_, dtype=None, **__: _drawn(0, high, dtype),
    aten.randint.low: lambda low, high, *_, dtype=None, **__: _drawn(low, high, dtype),
    aten.randint_like.default: lambda x, high, *, dtype=None, **_: _drawn(
        0, high, dtype or x.dtype
    ),
    aten.randint_like.low_dtype: lambda x, low, high, *, dtype=None, **_: _drawn(
        low, high, dtype or x.dtype
    ),
    aten.clamp.Tensor: lambda x, min=None, max=None: (_promoted(x, min, max) is not bool,),
    aten.div.Tensor_mode: lambda x, y, *, rounding_mode=None: (
        rounding_mode is None or _promoted(x, y) is not bool,
    ),
    aten.scatter_reduce.two: lambda x, dim, index, source, reduce, **_: (
        reduce != "mean" or x.dtype != torch.bool,
    ),
    **dict.fromkeys(
        (aten.cumsum.default, aten.cumprod.default),
        lambda x, dim, *, dtype=None: (dtype != torch.bool,),
    ),
    **{getattr(op, "default", op): kinds for kinds, ops in _COMPUTED for op in ops},
    **_CONVERTED,
}
"""Relations between an operator's arguments, which may be symbolic."""


def outside_domain(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], proves: Callable[[Any], bool]
) -> bool:
    """Whether eager might reject the arguments; `proves` tells if a relation always holds."""
    relations = DOMAINS.get(op)
    return relations is not None and not all(map(proves, relations(*args, **kwargs)))
