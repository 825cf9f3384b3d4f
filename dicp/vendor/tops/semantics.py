"""What HLIR's operators compute, as torch functions, for shape inference and the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.graphop.interpreter import Semantics
from dicp.graphop.prototype import ResultType

SEMANTICS = Semantics()
op = SEMANTICS.op

SEMANTICS.update({
    "Abs": torch.abs, "Atan": torch.atan, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "HardSwish": F.hardswish, "Log": torch.log, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Rsqrt": torch.rsqrt, "Sigmoid": torch.sigmoid, "Sin": torch.sin, "Sqrt": torch.sqrt,
    "Square": torch.square, "Tanh": torch.tanh, "Add": torch.add, "And": torch.logical_and,
    "Max": torch.maximum, "Min": torch.minimum, "Mul": torch.mul, "Or": torch.logical_or,
    "Pow": torch.pow, "Sub": torch.sub, "Select": torch.where,
})  # fmt: skip

DIRECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "EQ": torch.eq, "NE": torch.ne, "LT": torch.lt, "LE": torch.le, "GT": torch.gt, "GE": torch.ge,
}  # fmt: skip
COMBINE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""What a region does with an old and a new element, in torch's word for it."""


@op("Div")
def divide(x: Tensor, y: Tensor) -> Tensor:
    """Integers are cut towards zero; those divided by 0 are any number."""
    if x.dtype.is_floating_point:
        return x / y
    negated = (y < 0) & (y == -1)  # the least integer has no quotient by -1
    quotient = torch.div(x, torch.where((y == 0) | negated, 1, y), rounding_mode="trunc")
    return torch.where(negated, -x, quotient)


SEMANTICS.update({
    "Compare": lambda x, y, direction: DIRECTIONS[direction](x, y),
    "Convert": lambda x, type: x.to(type.dtype),
    "HardSwishGrad":
        lambda dy, x, offset, threshold, scale: torch.ops.aten.hardswish_backward(dy, x),
})  # fmt: skip


@op("Gelu")
def gelu(x: Tensor, approximate: bool) -> Tensor:
    # In double: eager's vectorized kernel overflows at the largest numbers.
    return F.gelu(x.double(), approximate="tanh" if approximate else "none").to(x.dtype)


@op("GeluGrad")
def gelu_grad(dy: Tensor, x: Tensor, approximate: bool) -> Tensor:
    word = "tanh" if approximate else "none"
    return torch.ops.aten.gelu_backward(dy, x, approximate=word)


# ---- shapes --------------------------------------------------------------------------------------


SEMANTICS.update({
    "Reshape": lambda x, type: x.reshape(type.dims),
    "Transpose": lambda x, perm: x.permute(tuple(perm)),
    "Reverse": lambda x, dims, type: x.flip(tuple(dims)),
    "Concatenate": lambda xs, axis: torch.cat(list(xs), axis),
})  # fmt: skip


@op("BroadcastInDim")
def broadcast_in_dim(x: Tensor, dims: Sequence[int], type: ResultType) -> Tensor:
    shape: list[Any] = [1] * len(type.dims)
    for source, dim in enumerate(dims):
        shape[dim] = x.shape[source]
    return x.reshape(shape).expand(type.dims)


@op("Slice")
def slice_of(
    x: Tensor, start: Sequence[Any], limit: Sequence[Any], stride: Sequence[Any]
) -> Tensor:
    for dim, (first, last, step) in enumerate(zip(start, limit, stride, strict=True)):
        x = torch.ops.aten.slice(x, dim, first, last, step)
    return x


@op("Iota")
def iota(dimension: int, type: ResultType) -> Tensor:
    count = torch.arange(type.dims[dimension]).to(type.dtype)
    shape = [1] * len(type.dims)
    shape[dimension] = -1
    return count.reshape(shape).expand(type.dims)


# ---- reductions ----------------------------------------------------------------------------------


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, keepdim: bool, axes: Sequence[int]) -> Tensor:
        return function(x, tuple(axes), keepdim).to(x.dtype)

    return apply


def _product(x: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim)
    return x


for _kind, _function in (
    ("ReduceMax", torch.amax), ("ReduceMean", torch.mean), ("ReduceMin", torch.amin),
    ("ReduceProd", _product), ("ReduceSum", torch.sum),
):  # fmt: skip
    op(_kind)(_reduction(_function))


SEMANTICS.update({
    "ArgMax": lambda x, axis, keepdim: x.argmax(axis, keepdim),
    "ArgMin": lambda x, axis, keepdim: x.argmin(axis, keepdim),
    "TopK": lambda x, k, axis, sorted, largest: tuple(x.topk(k, axis, largest, sorted)),
    "Softmax": lambda x, axis, accurate: torch.softmax(x, axis),
})  # fmt: skip


# ---- products ------------------------------------------------------------------------------------


@op("DotGeneral")
def dot_general(lhs: Tensor, rhs: Tensor, dims: Sequence[Sequence[int]]) -> Tensor:
    """Batch dimensions, then the left's own, then the right's own."""
    left_batch, right_batch, left_sum, right_sum = (list(d) for d in dims)
    left_own = [d for d in range(lhs.dim()) if d not in (*left_batch, *left_sum)]
    right_own = [d for d in range(rhs.dim()) if d not in (*right_batch, *right_sum)]
    batch = [lhs.shape[d] for d in left_batch]
    a = lhs.permute([*left_batch, *left_own, *left_sum])
    b = rhs.permute([*right_batch, *right_sum, *right_own])
    inner = math.prod([lhs.shape[d] for d in left_sum])
    rows, columns = ([t.shape[d] for d in own] for t, own in ((lhs, left_own), (rhs, right_own)))
    a = a.reshape(*batch, math.prod(rows), inner)
    b = b.reshape(*batch, inner, math.prod(columns))
    return torch.matmul(a, b).reshape([*batch, *rows, *columns])


@op("Conv2D")
def conv_2d(
    xs: Sequence[Tensor], group: int, auto_pad: str, layout: str, stride: Sequence[int],
    pad: Sequence[Any], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Images NHWC, filters HWIO; `pad` has top, bottom, left and right."""
    x, w = F.pad(xs[0].permute(0, 3, 1, 2), (pad[2], pad[3], pad[0], pad[1])), xs[1]
    bias = xs[2] if len(xs) > 2 else None
    y = torch.ops.aten.convolution(
        x, w.permute(3, 2, 0, 1), bias, list(stride), [0, 0], list(dilation), False, [0, 0], group
    )
    return y.permute(0, 2, 3, 1)


@op("Conv")
def conv(
    x: Tensor, filter: Tensor, dims: Sequence[Any], strides: Sequence[int],
    pads: Sequence[Sequence[Any]], lhs_dilation: Sequence[int], rhs_dilation: Sequence[int],
    reversal: Sequence[int], auto_pad: str, feature_groups: int, batch_groups: int,
    precision: Sequence[str],
) -> Tensor:  # fmt: skip
    """A convolution whose dimensions stand where `dims` says; negative padding cuts off."""
    flat = [d if isinstance(d, (list, tuple)) else [d] for d in dims]
    image = x.permute([*flat[0], *flat[1], *flat[2]])
    weight = filter.permute([*flat[4], *flat[3], *flat[5]])
    for axis, step in enumerate(lhs_dilation, start=2):
        image = _spread(image, axis, step)
    (top, bottom), (left, right) = pads
    image = F.pad(image, (left, right, top, bottom))
    if batch_groups > 1:  # group k of the batch meets group k of the filters
        parts, size = image.shape[0] // batch_groups, image.shape[1]
        image = image.reshape(batch_groups, parts, size, *image.shape[2:]).transpose(0, 1)
        image = image.reshape(parts, batch_groups * size, *image.shape[3:])
    y = torch.ops.aten.convolution(
        image, weight, None, list(strides), [0, 0], list(rhs_dilation), False, [0, 0],
        max(feature_groups, batch_groups),
    )  # fmt: skip
    order = [*flat[6], *flat[7], *flat[8]]
    return y.permute([order.index(d) for d in range(4)])


def _spread(x: Tensor, axis: int, step: int) -> Tensor:
    """step - 1 zeros between the elements along a dimension."""
    if step == 1:
        return x
    size = x.shape[axis]
    zeros = x.new_zeros(()).expand(*x.shape, step - 1)
    wide = torch.cat([x.unsqueeze(-1), zeros], -1).movedim(-1, axis + 1)
    shape = [*x.shape]
    shape[axis] = size * step
    return wide.reshape(shape).narrow(axis, 0, (size - 1) * step + 1)


@op("MaxPool2D")
def max_pool_2d(
    x: Tensor, ksize: Sequence[int], ceil_mode: bool, indices: bool, auto_pad: str, layout: str,
    stride: Sequence[int], pad: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    image = F.pad(x.permute(0, 3, 1, 2), (pad[2], pad[3], pad[0], pad[1]), value=lowest)
    wide = image if x.dtype.is_floating_point else image.to(torch.int64)
    windows = wide.unfold(2, ksize[0], stride[0]).unfold(3, ksize[1], stride[1])
    return windows.amax((4, 5)).to(x.dtype).permute(0, 2, 3, 1)


# ---- gather and scatter --------------------------------------------------------------------------


def _is_inferred(x: Tensor) -> bool:
    """Whether `x` has sizes alone."""
    return x.__class__ is not Tensor


def _vectors(indices: Tensor, axis: int) -> tuple[Tensor, list[Any]]:
    """The index vectors, one a row, and the sizes of what is looked up."""
    wide = indices.unsqueeze(-1) if axis == indices.dim() else indices.movedim(axis, -1)
    batch = list(wide.shape[:-1])
    return wide.reshape(math.prod(batch), wide.shape[-1]).to(torch.int64), batch


def _places(
    x: Tensor, vectors: Tensor, index_map: Sequence[int], sizes: Sequence[Any], clamp: bool
) -> list[Tensor]:
    """For each dimension of `x`: where the elements of each slice stand, (count, *sizes)."""
    places = []
    for dim, size in enumerate(sizes):
        start = torch.zeros(vectors.shape[0], dtype=torch.int64)
        if dim in index_map:
            start = vectors[:, list(index_map).index(dim)]
        if clamp:
            start = start.clamp(0, x.shape[dim] - size)
        shape = [1] * (len(sizes) + 1)
        shape[dim + 1] = size
        first = start.reshape(-1, *[1] * len(sizes))
        places.append(first + torch.arange(size).reshape(shape))
    return places


@op("Gather")
def gather(
    x: Tensor, indices: Tensor, dims: Sequence[Any], sizes: Sequence[Any], sorted: bool,
    type: ResultType,
) -> Tensor:  # fmt: skip
    """Slices of `sizes` that begin where the index vectors say, within bounds."""
    if _is_inferred(x):
        return x.new_empty(type.dims)
    offset, collapsed, index_map, axis = dims
    vectors, batch = _vectors(indices, axis if isinstance(axis, int) else axis[0])
    picked = x[tuple(_places(x, vectors, index_map, sizes, clamp=True))]
    kept = [size for dim, size in enumerate(sizes) if dim not in collapsed]
    picked = picked.reshape([*batch, *kept])
    rank = picked.dim()
    order = [d for d in range(rank) if d not in offset] + list(offset)
    return picked.permute([order.index(d) for d in range(rank)])


@op("Scatter")
def scatter(
    x: Tensor, indices: Tensor, updates: Tensor, dims: Sequence[Any], regions: Sequence[str]
) -> Tensor:
    """`x` with updates combined into it; those out of bounds are dropped."""
    if _is_inferred(x):
        return torch.empty_like(x)
    window, inserted, index_map, axis = dims
    vectors, batch = _vectors(indices, axis if isinstance(axis, int) else axis[0])
    kept = iter([updates.shape[d] for d in window])
    sizes = [1 if dim in inserted else next(kept) for dim in range(x.dim())]
    places = _places(x, vectors, index_map, sizes, clamp=False)
    order = [d for d in range(updates.dim()) if d not in window] + list(window)
    given = updates.permute([*order]).reshape([vectors.shape[0], *sizes]).reshape(-1)
    flat = torch.zeros((), dtype=torch.int64)
    inside = torch.ones((), dtype=torch.bool)
    for place, size in zip(places, x.shape, strict=True):
        flat = flat * size + place
        inside = inside & (place >= 0) & (place < size)
    shape = (vectors.shape[0], *sizes)
    flat, inside = flat.expand(shape).reshape(-1), inside.expand(shape).reshape(-1)
    flat, given = flat[inside], given[inside]
    action = regions[0].partition("_")[0]
    result = x.reshape(-1).clone()
    if action == "update":
        result[flat] = given
    elif x.dtype == torch.bool:
        raise ValueError("booleans are not combined")
    else:
        result.scatter_reduce_(0, flat, given, COMBINE[action])
    return result.reshape(x.shape)
