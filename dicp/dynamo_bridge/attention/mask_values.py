"""Analysis of attention masks at compile time: their numbers, and which keys they hide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from dicp.dtypes import converted
from dicp.dynamo_bridge.analysis.constants import cast_source, uniform_value
from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.dynamo_bridge.thresholds import MAX_EVALUATED, MAX_MASK_NODES, MAX_NUMBERS
from dicp.effects import is_pure
from dicp.torch_private import HOST, disable_current_modes

aten = torch.ops.aten

HUGE = -1e30
"""A finite mask value below this absorbs any score added to it, in float32 and wider."""

LOW = -1e3
"""A mask value below this hides a key, unless the key's score is as large: then the rounding of the
score itself is as large as that of the mask value."""

_Numbers: TypeAlias = frozenset[float] | None

_MASK_KIND = "dicp_mask_kind"


def has_finite_entry(bias: fx.Node) -> bool:
    """Whether every row provably has an entry above -inf."""
    written = _numbers(bias, lambda leaf: None)
    finite = written is not None and all(map(math.isfinite, written))
    return finite or _kind(bias) in ("causal", "alive")


def has_visible_key(bias: fx.Node) -> bool:
    """Whether every row provably has a key that neither -inf nor a number below HUGE hides."""
    return _kind(bias) in ("causal", "alive")


def is_roundable(bias: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a mask rounded to the narrower `dtype` hides the same keys and adds the same numbers.

    True only for few known numbers that `dtype` holds exactly, except at most one that hides keys.
    Any other mask (a position bias) would be rounded further than scores are.
    """
    # In float16 a large multiple of a number that hides keys would overflow.
    found = numbers_of(bias, counts=dtype != torch.float16)
    if found is None:
        return False
    finite = [x for x in found if abs(x) < float("inf")]
    rounded = [x for x in finite if converted(x, dtype) != x]
    if dtype == torch.float16 and any(x < torch.finfo(dtype).min for x in finite):
        return False  # in rows with all keys hidden, float16's minimum would not absorb scores
    return len(rounded) <= 1 and all(x < LOW for x in rounded)


def numbers_of(node: Any, counts: bool = False) -> frozenset[float] | None:
    """The numbers that a mask consists of; None where they are not known.

    With `counts`, a product of integers and a number that hides keys counts as that number.
    """
    return _numbers(node, lambda leaf: _products(leaf, counts) or _of_constant(leaf))


def _numbers(node: Any, leaf: Callable[[fx.Node], _Numbers]) -> _Numbers:
    """The numbers in `node`, looking through `where`, views and conversions.

    `leaf` gives the numbers of any other node.
    """
    number = uniform_value(node)
    if number is not None or not isinstance(node, fx.Node):
        return None if number is None else frozenset({float(number)})
    if node.target is aten.where.self:
        chosen = [_numbers(branch, leaf) for branch in node.args[1:]]
    elif (source := _same_numbers(node)) is not None:
        chosen = [_numbers(source, leaf)]
    else:
        chosen = [leaf(node)]
    return _converted_union(chosen, value_of(node).dtype)


def _same_numbers(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` views or converts."""
    source = node.args[0] if node.args and node.target in _VIEWS else cast_source(node)
    return source if isinstance(source, fx.Node) else None


def _converted_union(chosen: list[_Numbers], dtype: torch.dtype) -> _Numbers:
    """The union of the numbers, converted to `dtype`; None if some are not known."""
    numbers = [None if some is None else {converted(x, dtype) for x in some} for some in chosen]
    if any(some is None or None in some for some in numbers):
        return None
    return frozenset(float(x) for some in numbers for x in some or () if x is not None)


def _products(node: fx.Node, counts: bool = False) -> _Numbers:
    """The numbers in `test * number` or `(1 - test) * number`: 0 and the number.

    `test` is boolean, perhaps converted. Integers may be anything, such as distances between
    positions; with `counts` they are taken for 0 and 1 where the number hides keys, as its
    multiples do.
    """
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return None
    test, factor = node.args
    number = uniform_value(factor)
    if number is not None and not math.isfinite(number):
        return None  # 0 * inf is NaN
    if isinstance(test, fx.Node) and test.target in (aten.rsub.Scalar, aten.sub.Tensor):
        sides = test.args[::-1] if test.target is aten.rsub.Scalar else test.args
        test = sides[1] if uniform_value(sides[0]) == 1 else None
    while isinstance(test, fx.Node) and number is not None:
        dtype = getattr(value_of(test), "dtype", None)
        if dtype == torch.bool or (counts and dtype in _WHOLE and number < LOW):
            return frozenset({0.0, float(number)})
        test = _same_numbers(test)
    return None


def _of_constant(node: fx.Node) -> _Numbers:
    with disable_current_modes():
        value = _constant(node, {})
        found = [] if value is None else torch.unique(value).tolist()
    return frozenset(map(float, found)) if 0 < len(found) <= MAX_NUMBERS else None


_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_VIEWS = frozenset({
    aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor,
    aten.permute.default, aten.clone.default, aten.squeeze.dim, aten.select.int,
})  # fmt: skip


def is_causal_mask(bias: fx.Node, q: fx.Node, k: fx.Node) -> bool:
    """Whether a constant hides exactly the keys after each query; as many keys as queries."""
    rows, columns = (sizes_of(q) or ())[-2], (sizes_of(k) or ())[-2]
    return (
        isinstance(rows, int)
        and rows == columns
        and (sizes_of(bias) or ())[-2:] == (rows, rows)
        and _kind(bias) == "causal"
    )


def _kind(bias: fx.Node) -> str:
    """ "causal", "alive" (no fully masked row) or "unknown", by computing a constant mask."""
    known: str | None = bias.meta.get(_MASK_KIND)
    if known is None:
        with disable_current_modes():
            value = _constant(bias, {})
            known = "unknown" if value is None else _classify(value)
        bias.meta[_MASK_KIND] = known
    return known


def _classify(value: torch.Tensor) -> str:
    value = value.reshape(1, -1) if value.dim() == 1 else value
    value = torch.where(value, 0.0, -math.inf) if value.dtype == torch.bool else value
    rows, columns = value.shape[-2:]
    allowed = torch.ones(rows, columns, dtype=torch.bool).tril()
    if bool(torch.where(allowed, value == 0, value <= HUGE).all()):
        return "causal"
    alive = bool((value.amax(-1) > HUGE).all())
    return "alive" if alive else "unknown"


def _constant(node: Any, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed on the host, or None."""
    if node in known:
        return known[node]
    known[node] = None
    value = value_of(node)
    if node.op != "call_function" or not is_pure(node.target):
        return None
    if not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > MAX_EVALUATED:
        return None
    inputs = {source: _constant(source, known) for source in node.all_input_nodes}
    if any(tensor is None for tensor in inputs.values()) or len(known) > MAX_MASK_NODES:
        return None

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(HOST)
        return inputs[leaf] if isinstance(leaf, fx.Node) else leaf

    args, kwargs = (fx.node.map_aggregate(x, on_host) for x in (node.args, dict(node.kwargs)))
    known[node] = node.target(*args, **kwargs)
    return known[node]
