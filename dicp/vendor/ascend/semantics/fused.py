"""Operators that stand for several."""

from __future__ import annotations

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics
from dicp.vendor.ascend.semantics.nn import layer_norm


def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, bias: None, epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm over the last dimension, mean, reciprocal deviation; the sum where it is wanted."""
    assert bias is None and gamma.dim() == beta.dim() == 1
    x = x1 + x2
    y, mean, rstd = layer_norm(x, [x.shape[-1]], gamma, beta, epsilon)
    return y, mean, rstd, x if additional_output else x.new_empty(0)


def swi_glu_grad(y_grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    gate, up = (half.float() for half in x.chunk(2, dim))
    wide = y_grad.float()
    turn = torch.sigmoid(gate)
    dgate = wide * up * (turn + gate * turn * (1 - turn))
    return torch.cat([dgate, wide * gate * turn], dim).to(x.dtype)


def repeat_interleave(x: Tensor, repeats: list[int], axis: int = 1000) -> Tensor:
    assert len(repeats) == 1 and 0 <= axis < x.dim()
    shape = [*x.shape[: axis + 1], repeats[0], *x.shape[axis + 1 :]]
    return x.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)


def register(semantics: Semantics) -> None:
    semantics.update({"AddLayerNorm": add_layer_norm, "SwiGluGrad": swi_glu_grad})
    semantics.op("RepeatInterleave", host=("repeats",))(repeat_interleave)
