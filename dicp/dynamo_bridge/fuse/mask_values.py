"""What can be known of an attention mask at compile time."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.canonicalize import cast_source, uniform_value
from dicp.dynamo_bridge.fuse.terms import sizes_of
from dicp.dynamo_bridge.infer import value_of
from dicp.dynamo_bridge.traits import is_pure
from dicp.torch_private import disable_current_modes

aten = torch.ops.aten

HUGE = -1e30
"""A finite fill below this swallows any score that is added to it, in float32 and wider."""

_MASK_KIND = "dicp_mask_kind"
_CONSTANT_LIMIT = 1 << 22


def leaves_a_key(bias: fx.Node) -> bool:
    """Every row is sure to have an entry above -inf."""
    return _is_finite(bias) or _kind(bias) in ("causal", "alive")


def keeps_a_key(bias: fx.Node) -> bool:
    """Every row is sure to have a key that neither -inf nor a low number hides."""
    return _kind(bias) in ("causal", "alive")


def _is_finite(node: Any) -> bool:
    """Made of finite constants by `where`, views and conversions."""
    while isinstance(node, fx.Node):
        if node.target is aten.where.self:
            return _is_finite(node.args[1]) and _is_finite(node.args[2])
        source = node.args[0] if node.args else None
        if source is not None and node.target in _VIEWS:
            node = source
        elif (source := cast_source(node)) is not None:
            if value_of(node).dtype == torch.float16 and value_of(source).dtype != torch.float16:
                return False
            node = source
        else:
            break
    number = uniform_value(node)
    return number is not None and abs(number) < float("inf")


_VIEWS = frozenset({
    aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor,
    aten.permute.default, aten.clone.default, aten.squeeze.dim, aten.select.int,
})  # fmt: skip


def is_causal_mask(bias: fx.Node, q: fx.Node, k: fx.Node) -> bool:
    """A constant that hides the keys after each query and no others, for as many as queries."""
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
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > _CONSTANT_LIMIT:
        return None
    inputs = {source: _constant(source, known) for source in node.all_input_nodes}
    if any(tensor is None for tensor in inputs.values()) or len(known) > 64:
        return None

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return inputs[leaf] if isinstance(leaf, fx.Node) else leaf

    args, kwargs = (fx.node.map_aggregate(x, on_host) for x in (node.args, dict(node.kwargs)))
    known[node] = node.target(*args, **kwargs)
    return known[node]
