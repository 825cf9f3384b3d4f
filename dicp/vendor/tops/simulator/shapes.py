"""The simulator's own shape inference, on numbers: what each operator gives, or why it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dicp.vendor.tops.prototypes import ELEMENTWISE


class Typed(Protocol):
    """The type of an operand."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def dims(self) -> tuple[int, ...]: ...


class Mistake(Exception):
    """What is wrong with one operator."""


Result = tuple[torch.dtype, Sequence[int]]
Attrs = Mapping[str, Any]
Shape = Callable[[Sequence[Typed], Attrs], Result | list[Result]]
SHAPES: dict[str, Shape] = {}


def shape_of(*kinds: str) -> Callable[[Shape], Shape]:
    """Registers the inference of operators."""

    def add(function: Shape) -> Shape:
        SHAPES.update(dict.fromkeys(kinds, function))
        return function

    return add


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise Mistake(problem)


# ---- elementwise and moves -----------------------------------------------------------------------


@shape_of(*ELEMENTWISE)
def elementwise(operands: Sequence[Typed], attrs: Attrs) -> Result:
    sizes = {x.dims for x in operands}
    _require(len(sizes) == 1, f"its operands have sizes {sorted(sizes)}; nothing is broadcast")
    return operands[-1].dtype, operands[-1].dims


@shape_of("Compare")
def compare(operands: Sequence[Typed], attrs: Attrs) -> Result:
    elementwise(operands, attrs)
    known = ("EQ", "NE", "LT", "LE", "GT", "GE")
    _require(attrs["direction"] in known, f"its direction is {attrs['direction']!r}")
    return torch.bool, operands[0].dims


@shape_of("Convert")
def convert(operands: Sequence[Typed], attrs: Attrs) -> Result:
    told = attrs["type"]
    _require(told.dims == operands[0].dims, f"its type has sizes {told.dims}")
    return told.dtype, told.dims


@shape_of("Reshape")
def reshape(operands: Sequence[Typed], attrs: Attrs) -> Result:
    told, x = attrs["type"], operands[0]
    _require(math.prod(told.dims) == math.prod(x.dims), f"{x.dims} is no {told.dims}")
    _require(told.dtype == x.dtype, "its type has another element")
    return told.dtype, told.dims


@shape_of("BroadcastInDim")
def broadcast(operands: Sequence[Typed], attrs: Attrs) -> Result:
    told, x, dims = attrs["type"], operands[0], attrs["dims"]
    _require(len(dims) == len(x.dims), f"{len(dims)} dimensions for a tensor of {x.dims}")
    _require(list(dims) == sorted(set(dims)), f"dimensions {dims} do not rise")
    for size, dim in zip(x.dims, dims, strict=True):
        _require(0 <= dim < len(told.dims), f"there is no dimension {dim}")
        _require(size in (1, told.dims[dim]), f"{x.dims} does not broadcast to {told.dims}")
    _require(told.dtype == x.dtype, "its type has another element")
    return told.dtype, told.dims


@shape_of("Transpose")
def transpose(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x, perm = operands[0], attrs["perm"]
    _require(sorted(perm) == list(range(len(x.dims))), f"{perm} is no order of {x.dims}")
    return x.dtype, [x.dims[d] for d in perm]


@shape_of("Slice")
def slice_of(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x = operands[0]
    bounds = [attrs[name] for name in ("start", "limit", "stride")]
    _require(all(len(b) == len(x.dims) for b in bounds), "a bound for each dimension is wanted")
    sizes = []
    for size, first, last, step in zip(x.dims, *bounds, strict=True):
        _require(step > 0 and 0 <= first <= last <= size, f"[{first}:{last}:{step}] of {size}")
        sizes.append(-(-(last - first) // step))
    return x.dtype, sizes


@shape_of("Reverse")
def reverse(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x = operands[0]
    _require(attrs["type"].dims == x.dims, "its type has other sizes")
    _require(all(0 <= d < len(x.dims) for d in attrs["dims"]), f"dimensions {attrs['dims']}")
    return x.dtype, x.dims


@shape_of("Concatenate")
def concatenate(operands: Sequence[Typed], attrs: Attrs) -> Result:
    axis, first = attrs["axis"], operands[0].dims
    _require(0 <= axis < len(first), f"there is no axis {axis}")
    for x in operands:
        same = len(x.dims) == len(first) and all(
            a == b for d, (a, b) in enumerate(zip(x.dims, first, strict=True)) if d != axis
        )
        _require(same, f"{x.dims} beside {first}")
    total = sum(x.dims[axis] for x in operands)
    return operands[0].dtype, [*first[:axis], total, *first[axis + 1 :]]


@shape_of("Iota")
def iota(operands: Sequence[Typed], attrs: Attrs) -> Result:
    told = attrs["type"]
    _require(0 <= attrs["dimension"] < len(told.dims), f"there is no axis {attrs['dimension']}")
    return told.dtype, told.dims


# ---- reductions ----------------------------------------------------------------------------------


def _without(dims: Sequence[int], axes: Sequence[int], keep: bool) -> list[int]:
    _require(all(0 <= axis < len(dims) for axis in axes), f"axes {list(axes)} of {list(dims)}")
    if keep:
        return [1 if d in axes else size for d, size in enumerate(dims)]
    return [size for d, size in enumerate(dims) if d not in axes]


@shape_of("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
def reduce(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x = operands[0]
    return x.dtype, _without(x.dims, attrs["axes"], attrs["keepdim"])


@shape_of("ArgMax", "ArgMin")
def position(operands: Sequence[Typed], attrs: Attrs) -> Result:
    return torch.int64, _without(operands[0].dims, [attrs["axis"]], attrs["keepdim"])


@shape_of("TopK")
def top_k(operands: Sequence[Typed], attrs: Attrs) -> list[Result]:
    x, axis, k = operands[0], attrs["axis"], attrs["k"]
    _require(0 <= axis < len(x.dims) and 0 <= k <= x.dims[axis], f"{k} along {axis} of {x.dims}")
    dims = [*x.dims[:axis], k, *x.dims[axis + 1 :]]
    return [(x.dtype, dims), (torch.int64, dims)]


@shape_of("Softmax")
def softmax(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x = operands[0]
    _require(0 <= attrs["axis"] < len(x.dims), f"there is no axis {attrs['axis']}")
    return x.dtype, x.dims


# ---- products and images -------------------------------------------------------------------------


@shape_of("DotGeneral")
def dot_general(operands: Sequence[Typed], attrs: Attrs) -> Result:
    (lhs, rhs), numbers = (x.dims for x in operands), attrs["dims"]
    left_batch, right_batch, left_sum, right_sum = numbers
    for left, right in ((left_batch, right_batch), (left_sum, right_sum)):
        sizes = [lhs[d] for d in left], [rhs[d] for d in right]
        _require(sizes[0] == sizes[1], f"{lhs} and {rhs} differ along {left} and {right}")
    rows = [s for d, s in enumerate(lhs) if d not in (*left_batch, *left_sum)]
    columns = [s for d, s in enumerate(rhs) if d not in (*right_batch, *right_sum)]
    return operands[0].dtype, [*(lhs[d] for d in left_batch), *rows, *columns]


def _windows(size: int, window: int, stride: int, dilation: int = 1) -> int:
    reach = (window - 1) * dilation + 1
    _require(size >= reach, f"a window of {reach} over {size}")
    return (size - reach) // stride + 1


def _nhwc(operands: Sequence[Typed], attrs: Attrs) -> tuple[int, ...]:
    _require(attrs["layout"] == "NHWC", f"its layout is {attrs['layout']!r}, not 'NHWC'")
    _require(attrs["auto_pad"] == "NOTSET", f"auto_pad is {attrs['auto_pad']!r}")
    _require(len(operands[0].dims) == 4, f"an image has 4 dimensions, not {operands[0].dims}")
    return operands[0].dims


@shape_of("Conv2D")
def conv_2d(operands: Sequence[Typed], attrs: Attrs) -> Result:
    n, rows, columns, channels = _nhwc(operands, attrs)
    _require(len(operands[1].dims) == 4, f"a filter has 4 dimensions, not {operands[1].dims}")
    height, width, part, out = operands[1].dims
    group = attrs["group"]
    _require(part * group == channels and out % group == 0,
             f"{channels} channels in {group} groups, the filter (HWIO) takes {part}")  # fmt: skip
    _require(len(operands) < 3 or operands[2].dims == (out,), "the bias has other sizes")
    top, bottom, left, right = attrs["pad"]
    (row_step, column_step), (row_dilation, column_dilation) = attrs["stride"], attrs["dilation"]
    high = _windows(rows + top + bottom, height, row_step, row_dilation)
    wide = _windows(columns + left + right, width, column_step, column_dilation)
    return operands[0].dtype, [n, high, wide, out]


@shape_of("Conv")
def conv(operands: Sequence[Typed], attrs: Attrs) -> Result:
    (x, filters) = (operand.dims for operand in operands)
    flat = [d if isinstance(d, list) else [d] for d in attrs["dims"]]
    (batch,), (feature,), spatial, (taken,), (made,), window = flat[:6]
    feature_groups, batch_groups = attrs["feature_groups"], attrs["batch_groups"]
    _require(filters[taken] * feature_groups == x[feature], f"features of {x} and {filters}")
    _require(x[batch] % batch_groups == 0 and filters[made] % batch_groups == 0, "batch groups")
    sizes = []
    for k, (d, w) in enumerate(zip(spatial, window, strict=True)):
        spread = (x[d] - 1) * attrs["lhs_dilation"][k] + 1 + sum(attrs["pads"][k])
        sizes.append(_windows(spread, filters[w], attrs["strides"][k], attrs["rhs_dilation"][k]))
    (to_batch,), (to_feature,), to_spatial = flat[6:]
    result = [0] * 4
    result[to_batch], result[to_feature] = x[batch] // batch_groups, filters[made]
    for d, size in zip(to_spatial, sizes, strict=True):
        result[d] = size
    return operands[0].dtype, result


@shape_of("MaxPool2D")
def max_pool(operands: Sequence[Typed], attrs: Attrs) -> Result:
    n, rows, columns, channels = _nhwc(operands, attrs)
    _require(not attrs["ceil_mode"] and not attrs["indices"], "ceil_mode and indices are off")
    top, bottom, left, right = attrs["pad"]
    high = _windows(rows + top + bottom, attrs["ksize"][0], attrs["stride"][0])
    wide = _windows(columns + left + right, attrs["ksize"][1], attrs["stride"][1])
    return operands[0].dtype, [n, high, wide, channels]


# ---- indices -------------------------------------------------------------------------------------


def _vector(indices: Typed, dims: Sequence[Any]) -> tuple[list[int], int]:
    """The sizes of what is looked up, and how long an index vector is."""
    axis = dims[3] if isinstance(dims[3], int) else dims[3][0]
    sizes = list(indices.dims)
    _require(0 <= axis <= len(sizes), f"index_vector_dim is {axis}")
    length = 1 if axis == len(sizes) else sizes.pop(axis)
    _require(length == len(dims[2]), f"index vectors of {length} for {len(dims[2])} dimensions")
    return sizes, length


@shape_of("Gather")
def gather(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x, indices = operands
    offset, collapsed = attrs["dims"][:2]
    batch, _ = _vector(indices, attrs["dims"])
    sizes = attrs["sizes"]
    _require(len(sizes) == len(x.dims), f"slices of {sizes} from {x.dims}")
    _require(all(0 <= s <= t for s, t in zip(sizes, x.dims, strict=True)), f"{sizes} of {x.dims}")
    _require(all(sizes[d] == 1 for d in collapsed), f"collapsed dimensions of {sizes}")
    window = iter([s for d, s in enumerate(sizes) if d not in collapsed])
    rest = iter(batch)
    result = [next(window) if d in offset else next(rest) for d in range(len(batch) + len(offset))]
    _require(attrs["type"].dims == tuple(result), f"its type has sizes {attrs['type'].dims}")
    return x.dtype, result


@shape_of("Scatter")
def scatter(operands: Sequence[Typed], attrs: Attrs) -> Result:
    x, indices, updates = operands
    window, inserted = attrs["dims"][:2]
    batch, _ = _vector(indices, attrs["dims"])
    _require(len(window) + len(inserted) == len(x.dims), f"windows {window} of {x.dims}")
    own = [size for d, size in enumerate(updates.dims) if d not in window]
    _require(own == batch, f"updates of {updates.dims} for {batch} places")
    return x.dtype, x.dims
