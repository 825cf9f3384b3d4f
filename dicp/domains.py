"""Valid ranges of numbers, and dtypes of others, for operators whose eager kernels check them.

A call is compiled where its relations in `DOMAINS` are proved; else eager runs it and raises its
own error. Operators that check in their meta functions need no row: tracing runs these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from dicp.dtypes import Number, fits, opmath_dtype

aten = torch.ops.aten
Relations = Callable[..., Sequence[Any]]


def _dropout(x: Any, p: Any, train: Any = True) -> Sequence[Any]:
    return (p >= 0, p <= 1) if train else ()


def _has_dimension(x: Any, dim: Any, *_: Any) -> Sequence[Any]:
    rank = max(x.ndim, 1)
    return dim >= -rank, dim < rank


def _has_dimensions(x: Any, dims: Sequence[Any]) -> Sequence[Any]:
    return [relation for dim in dims for relation in _has_dimension(x, dim)]


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


def _joint(x: Any, *numbers: Any) -> torch.dtype:
    """The dtype of an operation on a tensor and numbers."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x.dtype
    given = [n for n in numbers if n is not None]
    if any(isinstance(n, float) for n in given):
        return torch.get_default_dtype()
    whole = any(not isinstance(n, bool) for n in given)
    return torch.int64 if x.dtype == torch.bool and whole else x.dtype


def _bounds(x: Any, *bounds: Any) -> Sequence[Any]:
    return _all_fit(_joint(x, *bounds), *bounds)


def _power(x: Any, exponent: Any) -> Sequence[Any]:
    dtype = _joint(x, exponent)
    if dtype in (torch.float32, torch.float64) or dtype.is_complex:
        return ()
    return *_fits(exponent, dtype), dtype.is_floating_point or exponent >= 0


def _spaced(start: Any, end: Any, dtype: torch.dtype | None) -> Sequence[Any]:
    """Relations of a range's ends; eager computes negative ones like unsigned types."""
    ends = [float(number) for number in (start, end) if isinstance(number, Number)]
    return _all_fit(dtype or torch.get_default_dtype(), *ends)


def _weighted(x: Any, y: Any, *, alpha: Any = 1) -> Sequence[Any]:
    tensors = [operand for operand in (x, y) if hasattr(operand, "dtype")]
    numbers = [operand for operand in (x, y) if not hasattr(operand, "dtype")]
    dtypes = (tensor.dtype for tensor in tensors)
    dtype = _joint(*tensors, *numbers) if numbers else torch.promote_types(*dtypes)
    return *_fits(alpha, dtype), not isinstance(alpha, bool) or dtype == torch.bool


def _subtracted(x: Any, y: Any, *, alpha: Any = 1) -> Sequence[Any]:
    return *_weighted(x, y, alpha=alpha), not isinstance(x, bool) and not isinstance(y, bool)


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


def _is_real_or_complex(x: Any) -> bool:
    return bool(x.dtype.is_floating_point or x.dtype.is_complex)


def _some_floats(*operands: Any, **_: Any) -> Sequence[Any]:
    """Relation: the dtype of the operands together is floating-point or complex."""
    tensors = (operand for operand in operands if hasattr(operand, "dtype"))
    return (any(map(_is_real_or_complex, tensors)),)


def _not_only_booleans(*operands: Any, **_: Any) -> Sequence[Any]:
    """Relation: the dtype of the operands together is not that of booleans."""
    given = (operand for operand in operands if operand is not None)
    return (any(getattr(one, "dtype", type(one)) not in (torch.bool, bool) for one in given),)


_CONVERTED: Final[dict[Any, Relations]] = {
    aten.fill.Scalar: lambda x, number: _fits(number, x.dtype),
    aten.full.default: lambda size, number, dtype=None, **_: _filled(dtype, number),
    aten.full_like.default: lambda x, number, dtype=None, **_: _fits(number, dtype or x.dtype),
    aten.new_full.default: lambda x, size, number, dtype=None, **_: _fits(number, dtype or x.dtype),
    aten.scalar_tensor.default: lambda number, dtype=None, **_: _filled(dtype, number),
    aten.linspace.default: lambda start, end, steps, dtype=None, **_: _spaced(start, end, dtype),
    aten.masked_fill.Scalar: lambda x, mask, number: _fits(number, x.dtype),
    aten.index_fill.int_Scalar: lambda x, dim, index, number: _fits(number, x.dtype),
    aten.scatter.value: lambda x, dim, index, number: _fits(number, x.dtype),
    aten.scatter.value_reduce: lambda x, dim, index, number, **_: _fits(number, x.dtype),
    aten.constant_pad_nd.default: lambda x, pad, number=0: _fits(number, x.dtype),
    aten.clamp.default: _bounds,
    aten.clamp_min.default: _bounds,
    aten.clamp_max.default: _bounds,
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _all_fit(x.dtype, low, high),
    aten.threshold.default: lambda x, threshold, number: (
        *_all_fit(x.dtype, threshold, number),
        *_not_only_booleans(x),
    ),
    aten.hardshrink.default: lambda x, number=0.5: (*_fits(number, x.dtype), *_some_floats(x)),
    aten.pow.Tensor_Scalar: _power,
    aten.add.Tensor: _weighted,
    aten.sub.Tensor: _subtracted,
    aten.rsub.Tensor: _subtracted,
    aten.rsub.Scalar: lambda x, y, alpha=1: _subtracted(x, y, alpha=alpha),
    aten.addcmul.default: lambda x, y, z, value=1: (
        *_computed(x, value),
        *_not_only_booleans(x, y, z),
    ),
    aten.addcdiv.default: lambda x, y, z, value=1: (
        *_computed(x, value),
        any(map(_is_real_or_complex, (x, y, z))),
    ),
    aten.lerp.Scalar: lambda x, end, weight: (*_computed(x, weight), _is_real_or_complex(x)),
    aten.lerp.Tensor: lambda x, end, weight: (_is_real_or_complex(x),),
    aten.leaky_relu.default: lambda x, slope=0.01: _computed(x, slope),
    aten.elu.default: _computed,
    aten.celu.default: lambda x, alpha=1.0: (*_inverted(x, alpha), _is_real_or_complex(x)),
    aten.softplus.default: lambda x, *numbers: (*_computed(x, *numbers), *_some_floats(x)),
    aten.smooth_l1_loss.default: lambda x, y, reduction=1, beta=1.0: (
        beta >= 0,
        *_some_floats(x, y),
    ),
    **{
        op.default: lambda x, y, z, beta=1, alpha=1: _computed(x, beta, alpha)
        for op in (aten.addmm, aten.addmv, aten.addr, aten.baddbmm, aten.addbmm)
    },
}

_FLOATING: Final[dict[Any, Relations]] = {
    **{
        op.default: lambda x, *_, **__: _some_floats(x)
        for op in (
            aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.binary_cross_entropy,
            aten.frac, aten.gelu, aten.glu, aten.hardsigmoid, aten.hardswish,
            aten.log_sigmoid_forward, aten.max_unpool2d, aten.max_unpool3d, aten.mish,
            aten.nll_loss_forward, aten.silu,
        )
    },
    **{
        op.correction: lambda x, *_, **__: _some_floats(x)
        for op in (aten.std, aten.std_mean, aten.var, aten.var_mean)
    },
    **{
        op.default: lambda x, y, *_, **__: _some_floats(x, y)
        for op in (
            aten._prelu_kernel, aten.huber_loss, aten.hypot, aten.igamma, aten.igammac,
            aten.logaddexp, aten.logaddexp2, aten.nextafter, aten.soft_margin_loss,
        )
    },
}  # fmt: skip
"""Operators that eager computes in floating point alone."""

_NO_BOOLEANS: Final[dict[Any, Relations]] = {
    **{
        op.default: lambda x, *_, **__: _not_only_booleans(x)
        for op in (
            aten.abs, aten.argmax, aten.argmin, aten.ceil, aten.floor,
            aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.reflection_pad1d,
            aten.relu, aten.round, aten.trunc,
        )
    },
    **dict.fromkeys(
        (
            aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor, aten.fmod.Scalar,
            aten.fmod.Tensor, aten.pow.Tensor_Tensor, aten.remainder.Scalar,
            aten.remainder.Tensor,
        ),
        _not_only_booleans,
    ),
    aten.clamp.Tensor: lambda x, min=None, max=None: _not_only_booleans(x, min, max),
    aten.div.Tensor_mode: lambda x, y, *, rounding_mode=None: (
        rounding_mode is None or _not_only_booleans(x, y)[0],
    ),
}  # fmt: skip
"""Operators that eager computes of numbers alone."""

DOMAINS: Final[dict[Any, Relations]] = {
    aten.complex.default: lambda x, y: (x.dtype == y.dtype,),
    aten.polar.default: lambda x, y, **_: (x.dtype == y.dtype,),
    aten.bernoulli.default: lambda p, **_: (p.dtype.is_floating_point,),
    aten.bernoulli.Tensor: lambda x, p, **_: (p.dtype.is_floating_point,),
    aten.bernoulli.p: lambda x, p=0.5, **_: (p >= 0, p <= 1),
    aten.native_dropout.default: _dropout,
    aten._softmax.default: lambda x, dim, *_: (*_has_dimension(x, dim), *_some_floats(x)),
    aten._safe_softmax.default: _has_dimension,
    aten._log_softmax.default: lambda x, dim, *_: (*_has_dimension(x, dim), *_some_floats(x)),
    aten.select.int: _has_dimension,
    aten.select_scatter.default: lambda x, part, dim, index: _has_dimension(x, dim),
    aten.slice_scatter.default: lambda x, part, dim=0, *_: _has_dimension(x, dim),
    aten.diagonal_scatter.default: lambda x, part, offset=0, *dims: _has_dimensions(x, dims),
    aten.index_reduce.default: lambda x, dim, *_, **__: _has_dimension(x, dim),
    aten.sort.default: lambda x, dim=-1, descending=False: _has_dimension(x, dim),
    aten.sort.stable: lambda x, dim=-1, **_: _has_dimension(x, dim),
    aten.empty_strided.default: lambda sizes, strides, **_: _apart(sizes, strides),
    aten.new_empty_strided.default: lambda x, sizes, strides, **_: _apart(sizes, strides),
    aten.uniform.default: lambda x, low=0.0, high=1.0, **_: (low <= high, *_some_floats(x)),
    aten.exponential.default: lambda x, rate=1.0, **_: (rate > 0,),
    aten.geometric.default: lambda x, p, **_: (p > 0, p < 1),
    aten.cauchy.default: lambda x, median=0.0, sigma=1.0, **_: (sigma > 0,),
    aten.log_normal.default: lambda x, mean=1.0, std=2.0, **_: (std > 0,),
    aten.randint.default: lambda high, *_, **__: (high > 0,),
    aten.randint.low: lambda low, high, *_, **__: (low < high,),
    aten.randint_like.default: lambda x, high, **_: (high > 0,),
    aten.randint_like.low_dtype: lambda x, low, high, **_: (low < high,),
    **_FLOATING,
    **_NO_BOOLEANS,
    **_CONVERTED,
}
"""Relations between an operator's arguments, which may be symbolic."""


def outside_domain(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], proves: Callable[[Any], bool]
) -> bool:
    """Whether eager might reject the arguments; `proves` tells if a relation always holds."""
    relations = DOMAINS.get(op)
    return relations is not None and not all(map(proves, relations(*args, **kwargs)))
