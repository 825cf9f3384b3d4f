"""Constants, conversions and reorderings: what a node does to a value, read from its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dtypes import Number, converted
from dicp.dynamo_bridge.analysis.values import value_of

aten = torch.ops.aten
prims = torch.ops.prims


def uniform_value(argument: Any) -> Number | None:
    """The number that fills a tensor node, converted to its dtype, or the number itself.

    None if not known.
    """
    if isinstance(argument, (bool, int, float)):
        return argument
    if not isinstance(argument, fx.Node) or argument.op != "call_function":
        return None
    if argument.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = argument.args[2 if argument.target is aten.new_full.default else 1]
    elif argument.target is aten.scalar_tensor.default:
        fill = argument.args[0]
    elif argument.target in (aten.zeros.default, aten.zeros_like.default):
        fill = 0
    elif argument.target in (aten.ones.default, aten.ones_like.default):
        fill = 1
    else:
        return None
    if not isinstance(fill, (bool, int, float)):
        return None
    return converted(fill, argument.meta["val"].dtype)


CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype})


def cast_source(node: Any) -> fx.Node | None:
    """The converted value, if `node` does nothing but convert the dtype."""
    if not isinstance(node, fx.Node) or node.target not in CASTS:
        return None
    source = node.args[0]
    others = {name: value for name, value in node.kwargs.items() if name != "dtype"}
    layout = others.pop("memory_format", None)
    old, new = value_of(source), node.meta["val"]
    plain = layout in (None, torch.preserve_format) and not any(
        value is not None and value is not False and value not in (old.device, old.layout)
        for value in others.values()
    )
    same_device = isinstance(old, torch.Tensor) and old.device == new.device
    return source if plain and same_device and isinstance(source, fx.Node) else None


def permutation_of(node: fx.Node) -> list[int] | None:
    """The order of dimensions, if `node` only reorders them."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    dim = value.dim()
    if node.target is aten.permute.default:
        return [int(d) % dim for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(dim))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target in (aten.transpose.int, prims.transpose.default):
        if node.target is prims.transpose.default:
            return [int(d) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
        if dim:
            left, right = (int(d) % dim for d in node.args[1:3])  # type: ignore[arg-type]
            order[left], order[right] = order[right], order[left]
        return order
    return None


def last_two_swapped(rank: int) -> list[int]:
    """The order of dimensions of transposed matrices, in a batch or not."""
    return [*range(rank - 2), rank - 1, rank - 2]
