"""One attention call as the framework itself would make it for tensors of this device and layout.

Which of its fused operators takes them (flash, memory-efficient, cuDNN), and what must be padded
or copied for it, the framework decides: it is asked with the graph's fake tensors, and the
operators that it runs are written into the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from dicp.dynamo_bridge.fuse.engine import Rewriter
from dicp.dynamo_bridge.infer import expression, value_of
from dicp.torch_private import TorchDispatchMode, pytree

FUSED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_cudnn_attention")  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Ran:
    """One operator that the framework ran."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[_Ran] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            self.ran.append(_Ran(func, args, kwargs, result))
        return result


def framework_attention(
    rw: Rewriter, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, causal: bool,
    scale: float,
) -> fx.Node | None:  # fmt: skip
    """The attention's result; None where the framework has no fused operator for the tensors."""
    nodes = [q, k, v, *([mask] if mask is not None else [])]
    values = [value_of(node) for node in nodes]
    grouped = expression(values[0].shape[1]) != expression(values[1].shape[1])
    recorder = _Recorder()
    with values[0].fake_mode, recorder, torch.no_grad():
        result = F.scaled_dot_product_attention(
            values[0], values[1], values[2],
            attn_mask=values[3] if mask is not None else None, is_causal=causal, scale=scale,
            enable_gqa=grouped,
        )  # fmt: skip
    if not any(ran.op.overloadpacket.__name__ in FUSED for ran in recorder.ran):
        return None
    known = {id(value): node for value, node in zip(values, nodes, strict=True)}
    return known.get(id(result)) if _written(rw, recorder.ran, known) else None


def _written(rw: Rewriter, ran: list[_Ran], known: dict[int, fx.Node]) -> bool:
    """Whether every operator could be written; `known` then holds a node for every tensor."""

    def node_of(value: Any) -> Any:
        return known[id(value)] if isinstance(value, torch.Tensor) else value

    for step in ran:
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        if any(isinstance(x, torch.SymInt | torch.SymFloat) for x in leaves):
            return False  # a size that would have to be computed in the graph
        args, kwargs = pytree.tree_map(node_of, (step.args, step.kwargs))
        call = rw(step.op, *args, **kwargs)
        if isinstance(step.result, torch.Tensor):
            known[id(step.result)] = call
            continue
        for position, value in enumerate(step.result):
            if isinstance(value, torch.Tensor):
                known[id(value)] = rw(operator.getitem, call, position)
    return True
