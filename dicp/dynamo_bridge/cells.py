"""Cells of LSTM and GRU, operators that only devices other than the host have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new hidden state, the new cell state, and the activated gates for the gradient."""
    summed = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = summed.chunk(4, 1)
    gates = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    i, f, g, o = gates.chunk(4, 1)
    new_cell = f * cell + i * g
    return o * new_cell.tanh(), new_cell, gates


def lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    cell: Tensor,
    new_cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the gates, of the cell state, and of either bias."""
    i, f, g, o = gates.chunk(4, 1)
    squashed = new_cell.tanh()
    hidden = torch.zeros_like(new_cell) if grad_hidden is None else grad_hidden
    total = hidden * o * (1 - squashed * squashed)
    total = total if grad_cell is None else total + grad_cell
    grad_gates = torch.cat([
        total * g * (1 - i) * i,
        total * cell * (1 - f) * f,
        total * i * (1 - g * g),
        hidden * squashed * (1 - o) * o,
    ], 1)  # fmt: skip
    return grad_gates, total * f, grad_gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The new hidden state, and what the gradient needs."""
    input_reset, input_update, input_new = _biased(input_gates, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (input_reset + hidden_reset).sigmoid()
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    saved = torch.cat([reset, update, new, hidden, hidden_new], 1)
    return new + update * (hidden - new), saved


def gru_cell_backward(
    grad_hidden: Tensor, saved: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the gates of both sides, of the hidden state, and of both biases."""
    reset, update, new, hidden, hidden_new = saved.chunk(5, 1)
    grad_update = grad_hidden * (hidden - new) * (1 - update) * update
    grad_new = grad_hidden * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * (1 - reset) * reset
    of_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hidden * update, *biases


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


CELLS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
"""Operator -> its decomposition, by which inference also finds the shapes of its results."""
