"""The strides of what advanced indexing picks.

Eager's iterator (PyTorch, TensorIterator.cpp, reorder_dimensions) runs over the input, in which the
indexed dimensions have stride 0, and over the indices; where the input does not order two
dimensions of the result, the first index that does decides. PyTorch's inference reads the input
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dicp.torch_private import HOST, disable_current_modes

aten = torch.ops.aten

Indices = Sequence[Tensor | None]


def in_order_of_indices(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for `index`; where PyTorch's inference gives other strides than eager, a copy of what
    contiguous operands pick, which both give the same strides."""

    def indexed(x: Tensor, indices: Indices) -> Any:
        strides = _eager_strides(x, indices)
        if strides is None:
            return rule(x, indices)
        plain = [None if i is None else _contiguous(i) for i in indices]
        picked = aten.index.Tensor(_contiguous(x), plain)
        return aten.copy.default(picked.new_empty_strided(picked.shape, strides), picked)

    return indexed


def _contiguous(x: Tensor) -> Tensor:
    """A copy: a contiguous tensor may have any strides in dimensions of size 1."""
    return x.clone(memory_format=torch.contiguous_format)


def _eager_strides(x: Tensor, indices: Indices) -> tuple[Any, ...] | None:
    """Eager's strides of `x[indices]` on the host; None where PyTorch infers them, or where a mask
    decides over the sizes."""
    mode, given = getattr(x, "fake_mode", None), [i for i in indices if i is not None]
    masks = any(i.dtype in (torch.bool, torch.uint8) for i in given)
    if mode is None or masks or not given or x.device.type != HOST:
        return None
    # They import sympy, which the device does not need.
    from dicp.dynamo_bridge.analysis.values import equal_sizes, expressions
    from dicp.torch_private import depends_on_data, iterator_strides

    if any(map(depends_on_data, (x, *given))):
        return None
    with disable_current_modes(), mode:
        inferred = aten.index.Tensor(x, list(indices))
        strides = iterator_strides(*_iterated(x, indices))
    pairs = zip(expressions(strides), expressions(inferred.stride()), strict=True)
    sizes = expressions(inferred.shape)
    if 0 in sizes or all(
        equal_sizes(a, b) for (a, b), n in zip(pairs, sizes, strict=True) if n != 1
    ):
        return None
    return tuple(strides)


def _iterated(x: Tensor, indices: Indices) -> list[Tensor]:
    """The input and the indices as eager's iterator reads them (PyTorch,
    TensorAdvancedIndexing.cpp, make_info)."""
    indices = [*indices, *[None] * (x.dim() - len(indices))]
    places = [d for d, index in enumerate(indices) if index is not None]
    if places != list(range(places[0], places[-1] + 1)):  # the indexed dimensions come first
        rest = [d for d in range(x.dim()) if d not in places]
        x = x.permute([*places, *rest])
        indices = [*(indices[d] for d in places), *[None] * len(rest)]
        places = list(range(len(places)))
    before, after = places[0], x.dim() - 1 - places[-1]
    given = torch.broadcast_tensors(*(i for i in indices if i is not None))
    front, middle, back = x.shape[:before], given[0].shape, x.shape[x.dim() - after :]
    shape = (*front, *middle, *back)
    steps = (*x.stride()[:before], *[0] * len(middle), *x.stride()[x.dim() - after :])
    # Reshaped first: a dimension of size 1 has the stride that a reshape gives it, others 0.
    spread = (i.reshape((*[1] * before, *middle, *[1] * after)).expand(shape) for i in given)
    return [x.as_strided(shape, steps), *spread]
