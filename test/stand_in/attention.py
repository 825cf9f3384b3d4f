"""PyTorch's fused attention on the stand-in GPU, by its definition, in float64.

Results lie as PyTorch says that the device's kernels lay them; backward sees the dropout of
forward by the state that forward gave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

Host = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Attention:
    q: Any
    k: Any
    v: Any
    bias: Any
    dropout_p: float
    causal: bool
    scale: float | None
    state: int

    def __post_init__(self) -> None:
        self.shared = self.q.shape[1] // self.k.shape[1]
        self.q = self.q.double()
        self.k, self.v = (x.double().repeat_interleave(self.shared, 1) for x in (self.k, self.v))
        self.factor = 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    def scores(self) -> tuple[Any, Any]:
        """Of every key, and what dropout keeps of its weight."""
        scores = self.q @ self.k.mT * self.factor
        if self.bias is not None:
            scores = scores + self.bias.double()
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
            scores = scores.masked_fill(later, -math.inf)
        kept = torch.ones(())
        if self.dropout_p:
            drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(self.state))
            kept = (drawn >= self.dropout_p) / (1 - self.dropout_p)
        return scores, kept

    def forward(self) -> tuple[Any, Any]:
        scores, kept = self.scores()
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        return (weights * kept) @ self.v, torch.logsumexp(scores, -1)

    def backward(self, grad: Any, out: Any) -> list[Any]:
        """By the logarithms of sums, as kernels do: of a huge score they lose how many share it."""
        scores, kept = self.scores()
        weights = torch.exp(scores - scores.logsumexp(-1, keepdim=True)).nan_to_num(0.0)
        of_weights = grad.double() @ self.v.mT * kept
        inner = (grad.double() * out.double()).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - inner)
        dq = of_scores @ self.k * self.factor
        dk, dv = of_scores.mT @ self.q * self.factor, (weights * kept).mT @ grad.double()
        dk, dv = (x.unflatten(1, (-1, self.shared)).sum(2) for x in (dk, dv))
        mask = None if self.bias is None else of_scores.sum_to_size(self.bias.shape)
        return [dq, dk, dv, mask]


def _named(op: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    names = op._schema.arguments
    given = {a.name: a.default_value for a in names if a.has_default_value()}
    return given | dict(zip((a.name for a in names), args, strict=False)) | kwargs


def _of(given: dict[str, Any], state: int) -> _Attention:
    return _Attention(
        given["query"], given["key"], given["value"], given.get("attn_bias"),
        given["dropout_p"], given["is_causal"], given["scale"], state,
    )  # fmt: skip


def _forward(op: Any, given: dict[str, Any], state: int) -> list[Any]:
    out, sums = _of(given, state).forward()
    wanted = given.get("compute_log_sumexp", True)
    values: dict[str, Any] = {"output": out, "logsumexp": sums, "log_sumexp": sums}
    if "cudnn" in op._schema.name:
        values["logsumexp"] = sums.unsqueeze(-1)
    values |= dict.fromkeys(("rng_state", "philox_seed"), torch.tensor(state))
    names = [r.name for r in op._schema.returns]
    return [values.get(n) if wanted or "sum" not in n else None for n in names]


def _backward(op: Any, given: dict[str, Any], state: int) -> list[Any]:
    of_mask = given.get("grad_input_mask", [True] * 4)[3]
    found = _of(given, state).backward(given.get("grad_out", given.get("grad_out_")), given["out"])
    return [*found[:3], found[3] if of_mask else None][: len(op._schema.returns)]


def _as_the_device_lays(op: Any, args: Any, kwargs: Any) -> list[Any]:
    with FakeTensorMode() as fake:
        moved = pytree.tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
        metas = op(*moved[0], **moved[1])
    return [
        torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device="cuda")
        if isinstance(m, torch.Tensor) else m
        for m in metas
    ]  # fmt: skip


def _call(op: Any, gpu: Any, on_host: Host, args: Any, kwargs: Any) -> Any:
    is_backward = op._schema.name.endswith("_backward")
    given = _named(op, args, kwargs)
    results = _as_the_device_lays(op, args, kwargs)

    def moved(x: Any) -> Any:
        return on_host(x) if isinstance(x, torch.Tensor) and x.is_cuda else x

    def run() -> None:
        found = pytree.tree_map(moved, given)
        if is_backward:
            seed = found["philox_seed"] if "philox_seed" in found else found["rng_state"]
            values = _backward(op, found, int(seed.flatten()[0]))
        else:
            values = _forward(op, found, _next_state(given["dropout_p"]))
        for value, result in zip(values, results, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor):
                part = tuple(slice(0, n) for n in value.shape)  # what is padded stays as it was
                on_host(result)[part or ...].copy_(value)

    gpu.do(run)
    return tuple(results)


def _next_state(dropout_p: float) -> int:
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    if dropout_p:
        generator.set_offset(offset + 4)
    return (generator.initial_seed() * 31 + offset) % 2**31


ATTENTION = {
    f"_scaled_dot_product_{kind}_attention{end}": _call
    for kind in ("flash", "efficient", "cudnn")
    for end in ("", "_backward")
}
