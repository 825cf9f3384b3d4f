"""Known ranges of integer tensors of an FX graph: which numbers may occur in them.

Derived from operators alone: the positions of a sort are below its dimension's size, for example.
Indices whose range is within bounds need no check.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dicp.effects import is_view
from dicp.graphop.thresholds import CONSTANT_ELEMENTS, DEEPEST
from dicp.indices import arguments
from dicp.torch_private import disable_current_modes

aten = torch.ops.aten
prims = torch.ops.prims
Range = tuple[Any, Any]
"""The least and the greatest number that may occur: integers, or symbolic ones."""
OTHER_BITS = frozenset({aten.view.dtype, aten.as_strided.default})
"""Views with other numbers, or other elements of the memory, than those of the operand."""


class Ranges:
    """The known ranges of one graph's tensors."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Range | None] = {}
        self._depth = 0

    def of(self, value: Any) -> Range | None:
        """The range of a tensor's elements, or of a number; None if it is not known."""
        if isinstance(value, (bool, int, torch.SymInt)):
            return value, value
        if not isinstance(value, fx.Node):
            return None
        if value not in self._found:
            self._depth += 1
            self._found[value] = self._range(value) if self._depth < DEEPEST else None
            self._depth -= 1
        return self._found[value]

    def _range(self, node: fx.Node) -> Range | None:
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor) or fake.is_floating_point() or fake.is_complex():
            return None
        found = None
        if node.op == "get_attr":
            found = _constant(node)
        elif node.op == "call_function":
            shows_part = is_view(node.target) and node.target not in OTHER_BITS
            rule = _first if shows_part else RULES.get(node.target)
            found = rule(self, node) if rule is not None else None
        if fake.dtype == torch.bool:  # any number but 0 is a 1
            return found if found in ((0, 0), (1, 1)) else (0, 1)
        return found if found is not None and _holds(fake.dtype, found) else None


def _holds(dtype: torch.dtype, found: Range) -> bool:
    """Whether numbers of this range cannot wrap around; symbolic extremes are sizes, or close to
    them."""
    info = torch.iinfo(dtype)
    symbolic = dtype == torch.int64
    return all(info.min <= end <= info.max if isinstance(end, int) else symbolic for end in found)


def _constant(node: fx.Node) -> Range | None:
    tensor = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if not isinstance(tensor, torch.Tensor) or not 0 < tensor.numel() <= CONSTANT_ELEMENTS:
        return None
    with disable_current_modes():
        least, greatest = tensor.aminmax()
        return int(least), int(greatest)


# ---- rules ---------------------------------------------------------------------------------------


def _first(ranges: Ranges, node: fx.Node) -> Range | None:
    return ranges.of(node.args[0])


def _item(ranges: Ranges, node: fx.Node) -> Range | None:
    """A result of an operator with several results: a part of its operand, or positions."""
    call, number = node.args
    assert isinstance(call, fx.Node)
    if is_view(call.target):
        return ranges.of(call.args[0])
    if call.target not in POSITIONED or number != 1:
        return None
    return _positions(ranges, call)


def _positions(ranges: Ranges, node: fx.Node) -> Range | None:
    """Positions along a dimension of the first operand, or among all of its elements."""
    given = arguments(node)
    x, dim = given["self"].meta["val"], given["dim"]
    if dim is None:
        return 0, x.numel() - 1
    return (0, x.shape[dim] - 1 if x.dim() else 0) if isinstance(dim, int) else None


def _union(ranges: Ranges, parts: Sequence[Any]) -> Range | None:
    """The union of the ranges of several operands."""
    found = [ranges.of(part) for part in parts]
    if any(each is None for each in found):
        return None
    ends = [end for each in found if each is not None for end in each]
    return (min(ends), max(ends)) if _are_numbers(ends) else None


def _are_numbers(ends: Sequence[Any]) -> bool:
    return bool(ends) and all(isinstance(end, int) for end in ends)


def _joined(ranges: Ranges, node: fx.Node) -> Range | None:
    parts = node.args[0]
    return _union(ranges, parts) if isinstance(parts, Sequence) else None


def _operands(ranges: Ranges, node: fx.Node) -> tuple[Range, Range] | None:
    left, right = (ranges.of(operand) for operand in node.args[:2])
    scaled = arguments(node).get("alpha", 1) != 1
    return None if left is None or right is None or scaled else (left, right)


def _sum(ranges: Ranges, node: fx.Node) -> Range | None:
    found = _operands(ranges, node)
    return found and (found[0][0] + found[1][0], found[0][1] + found[1][1])


def _difference(ranges: Ranges, node: fx.Node) -> Range | None:
    found = _operands(ranges, node)
    if found is not None and node.target is aten.rsub.Scalar:
        found = found[::-1]
    return found and (found[0][0] - found[1][1], found[0][1] - found[1][0])


def _monotonic(function: Callable[[int, int], int]) -> Rule:
    """A function that takes its extremes at the extremes of its operands."""

    def rule(ranges: Ranges, node: fx.Node) -> Range | None:
        found = _operands(ranges, node)
        if found is None or not _are_numbers([*found[0], *found[1]]):
            return None
        ends = [function(a, b) for a in found[0] for b in found[1]]
        return min(ends), max(ends)

    return rule


def _clamp(ranges: Ranges, node: fx.Node) -> Range | None:
    given = arguments(node)
    least, greatest = given.get("min"), given.get("max")
    if isinstance(least, int) and isinstance(greatest, int):
        return min(least, greatest), greatest
    inner = ranges.of(node.args[0])
    if inner is None or not _are_numbers(inner):
        return None
    if isinstance(least, int) and greatest is None:
        return max(inner[0], least), max(inner[1], least)
    if isinstance(greatest, int) and least is None:
        return min(inner[0], greatest), min(inner[1], greatest)
    return None


def _series(ranges: Ranges, node: fx.Node) -> Range | None:
    given = arguments(node)
    start, step = given.get("start", 0), given.get("step", 1)
    if not isinstance(step, int) or not isinstance(start, (int, torch.SymInt)):
        return None
    last = start + (node.meta["val"].shape[0] - 1) * step
    return (start, last) if step > 0 else (last, start)


def _remainder(ranges: Ranges, node: fx.Node) -> Range | None:
    divisor = node.args[1]
    return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


def _masked(ranges: Ranges, node: fx.Node) -> Range | None:
    """The range of a bitwise combination of any number with a non-negative one."""
    mask = ranges.of(node.args[1])
    known = mask is not None and _are_numbers(mask) and mask[0] >= 0
    return (0, mask[1]) if mask is not None and known else None


def _filled(place: int) -> Rule:
    def rule(ranges: Ranges, node: fx.Node) -> Range | None:
        fill = node.args[place]
        return (int(fill), int(fill)) if isinstance(fill, int) else None

    return rule


def _drawn(ranges: Ranges, node: fx.Node) -> Range | None:
    bounds = (0, *node.args) if node.target is aten.randint.default else node.args
    low, high = bounds[:2]
    return (low, high - 1) if isinstance(low, int) and isinstance(high, int) else None


Rule = Callable[[Ranges, fx.Node], Range | None]
POSITIONED = frozenset({
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.max.dim, aten.min.dim,
    aten.median.dim, aten.mode.default, aten.kthvalue.default, aten.cummax.default,
    aten.cummin.default,
})  # fmt: skip
"""Operators whose second results are positions along `dim`."""
RULES: dict[Any, Rule] = {
    **dict.fromkeys((
        aten.clone.default, aten._to_copy.default, aten.flip.default, aten.roll.default,
        aten.repeat.default, aten.gather.default, aten.index.Tensor, aten.index_select.default,
        aten.amax.default, aten.amin.default, prims.convert_element_type.default), _first),
    operator.getitem: _item,
    aten.where.self: lambda ranges, node: _union(ranges, node.args[1:3]),
    aten.cat.default: _joined, aten.stack.default: _joined,
    aten.add.Tensor: _sum, aten.add.Scalar: _sum,
    aten.sub.Tensor: _difference, aten.sub.Scalar: _difference,
    aten.rsub.Scalar: _difference,
    aten.mul.Tensor: _monotonic(operator.mul), aten.mul.Scalar: _monotonic(operator.mul),
    aten.minimum.default: _monotonic(min), aten.maximum.default: _monotonic(max),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamp),
    aten.remainder.Scalar: _remainder,
    aten.bitwise_and.Tensor: _masked, aten.bitwise_and.Scalar: _masked,
    **dict.fromkeys((
        aten.arange.default, aten.arange.start, aten.arange.start_step, prims.iota.default),
        _series),
    aten.argmax.default: _positions, aten.argmin.default: _positions,
    aten.full.default: _filled(1), aten.full_like.default: _filled(1),
    aten.new_full.default: _filled(2), aten.scalar_tensor.default: _filled(0),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), lambda ranges, node: (0, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default), lambda ranges, node: (1, 1)),
    aten.randint.default: _drawn, aten.randint.low: _drawn,
    aten.randperm.default: lambda ranges, node: (0, node.meta["val"].shape[0] - 1),
}  # fmt: skip
