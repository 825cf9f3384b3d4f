"""A call of fused attention, by the operators that the target's facts name for the device.

Where they state several operators, PyTorch decides which of these takes the tensors and what must
be padded or copied for it: this module runs `scaled_dot_product_attention` on the graph's fake
tensors and writes the operators that PyTorch runs into the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dicp.dynamo_bridge.analysis.values import value_of
from dicp.dynamo_bridge.fuse.engine import Rewriter
from dicp.dynamo_bridge.passes.base import PassContext
from dicp.fused_attention import FusedAttention
from dicp.torch_private import TorchDispatchMode, expression_of, pytree, schema_of


@dataclass(frozen=True)
class Call:
    """Arguments of attention besides tensors: causal flag, factor of the scores, dropout_p."""

    causal: bool
    scale: float
    dropout_p: float = 0.0


@dataclass(frozen=True, eq=False)
class _RecordedCall:
    """One operator call that PyTorch ran, with its result."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[_RecordedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            self.ran.append(_RecordedCall(func, args, kwargs, result))
        return result


def attention_on(context: PassContext, node: fx.Node) -> FusedAttention:
    """What the target states of fused attention on the device of `node`'s tensor."""
    return context.facts.attention[value_of(node).device.type]


def inference_attention(
    rw: Rewriter, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, call: Call
) -> fx.Node | None:
    """The attention's result; None where there is no fused operator for the tensors."""
    operators = attention_on(rw.context, q).operators
    if len(operators) == 1:
        return rw(operator.getitem, _call(rw, operators[0], q, k, v, mask, call), 0)
    nodes = [q, k, v, *([mask] if mask is not None else [])]
    values = [value_of(node) for node in nodes]
    with torch.no_grad():
        ran, result = _run(values, call)
    if not any(step.op in operators for step in ran):
        return None
    known = {id(value): node for value, node in zip(values, nodes, strict=True)}
    return known.get(id(result)) if _emit_calls(rw, ran, known) else None


def _call(
    rw: Rewriter, op: Any, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, call: Call
) -> fx.Node:
    options = {} if mask is None else {"attn_mask": mask}
    return rw(op, q, k, v, call.dropout_p, call.causal, scale=call.scale, **options)


def _run(values: list[Any], call: Call) -> tuple[list[_RecordedCall], Any]:
    """The operators that PyTorch runs for the fake q, k, v and optional mask, and the result."""
    grouped = expression_of(values[0].shape[1]) != expression_of(values[1].shape[1])
    recorder = _Recorder()
    with values[0].fake_mode, recorder:
        result = F.scaled_dot_product_attention(
            values[0], values[1], values[2], attn_mask=values[3] if len(values) > 3 else None,
            dropout_p=call.dropout_p, is_causal=call.causal, scale=call.scale, enable_gqa=grouped,
        )  # fmt: skip
    return recorder.ran, result


def training_attention(
    rw: Rewriter, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, call: Call,
    mask_gradient: bool = False,
) -> fx.Node | None:  # fmt: skip
    """The call of the fused operator itself, in training; its first result is the attention's.

    None where there is no fused operator for the tensors, or PyTorch would pad or copy q, k or v
    for it; or, with `mask_gradient`, where none returns the gradient of the mask.
    """
    attention = attention_on(rw.context, q)
    if len(attention.operators) == 1:
        return None if mask_gradient else _call(rw, attention.operators[0], q, k, v, mask, call)
    nodes = [q, k, v, *([mask] if mask is not None else [])]
    values = [value_of(node) for node in nodes]
    head = values[0].shape[-1]
    widest = attention.widest_trained_head
    if widest is not None and not (isinstance(head, int) and head <= widest):
        return None
    if mask_gradient and not _gives_mask_gradient(attention, values[0], values[1]):
        return None
    choice = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with torch.no_grad(), choice if mask_gradient else nullcontext():
        ran, _ = _run(values, call)
    wanted = (attention.mask_gradient,) if mask_gradient else attention.operators
    at = next((k for k, s in enumerate(ran) if s.op in wanted), None)
    inputs = {id(value) for value in values[:3]}
    if at is None or any(id(x) in inputs for s in (*ran[:at], *ran[at + 1 :]) for x in s.args):
        return None
    known = {id(value): node for value, node in zip(values, nodes, strict=True)}
    if not _emit_calls(rw, [*ran[:at], _with_log_sum_exp(ran[at])], known):
        return None
    made = known[id(ran[at].result[0])].args[0]
    assert isinstance(made, fx.Node)
    return made


def _gives_mask_gradient(attention: FusedAttention, q: Any, k: Any) -> bool:
    """Whether an operator computes the mask's gradient, and 32-bit indices reach all of it."""
    batch, heads, rows, _ = q.shape
    largest = attention.largest_batch
    fits = attention.mask_gradient is not None and (largest is None or bool(batch <= largest))
    return fits and bool(heads * rows * (k.shape[2] + 16) < 2**31)


def _with_log_sum_exp(step: _RecordedCall) -> _RecordedCall:
    """The call as in training, where the operator also returns the log-sum-exp of the rows."""
    names = [argument.name for argument in schema_of(step.op).arguments]
    if "compute_log_sumexp" not in names:
        return step
    at = names.index("compute_log_sumexp")
    return replace(step, args=(*step.args[:at], True, *step.args[at + 1 :]))


_NAMES = {
    "grad_out_": "grad_out", "log_sumexp": "logsumexp", "output": "out",
    "rng_state": "philox_seed", "unused": "philox_offset", "attn_mask": "attn_bias",
}  # fmt: skip
"""Common names for values that forward and backward operators name differently."""


def gradient_arguments(
    rw: Rewriter, call: fx.Node, grad: fx.Node, of_mask: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The backward operator of a fused attention, and its positional and keyword arguments."""
    op: Any = call.target
    name = op.overloadpacket.__name__
    back = getattr(torch.ops.aten, f"{name}_backward").default
    known: dict[str, Any] = {"grad_out": grad, "grad_input_mask": [True, True, True, of_mask]}
    for position, argument in enumerate(schema_of(op).arguments):
        given = call.args[position] if position < len(call.args) else argument.default_value
        known[_NAMES.get(argument.name, argument.name)] = call.kwargs.get(argument.name, given)
    for position, result in enumerate(schema_of(op).returns):
        known[_NAMES.get(result.name, result.name)] = position
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    returned = {_NAMES.get(r.name, r.name) for r in schema_of(op).returns}
    for argument in schema_of(back).arguments:
        key = _NAMES.get(argument.name, argument.name)
        value = _result(rw, call, known[key]) if key in returned else known[key]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return back, tuple(args), kwargs


def _result(rw: Rewriter, call: fx.Node, position: int) -> Any:
    """A result of `call` as backward reads it: only tensors are saved.

    Any other result is written into the backward graph as a constant or as a tensor's size.
    """
    value = value_of(call)[position]
    if isinstance(value, torch.Tensor):
        return rw(operator.getitem, call, position)
    if not isinstance(value, torch.SymInt):
        return value
    return rw.size(*_sizes(n for n in call.args if isinstance(n, fx.Node))[expression_of(value)])


def _sizes(tensors: Iterable[fx.Node]) -> dict[Any, tuple[fx.Node, int]]:
    """Maps each size to a tensor and a dimension that have it."""
    return {expression_of(s): (n, k) for n in tensors for k, s in enumerate(value_of(n).shape)}


def _emit_calls(rw: Rewriter, ran: list[_RecordedCall], known: dict[int, fx.Node]) -> bool:
    """Writes the operators into the graph and the nodes of their tensors into `known`.

    Returns whether every operator could be written.
    """
    sizes = _sizes(known.values())

    def node_of(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return rw.size(*sizes[expression_of(value)])
        return known[id(value)] if isinstance(value, torch.Tensor) else value

    for step in ran:
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        symbolic = [x for x in leaves if isinstance(x, torch.SymInt | torch.SymFloat)]
        if any(expression_of(x) not in sizes for x in symbolic):
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
