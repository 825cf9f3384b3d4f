"""Modes that see every call of a thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which operators are not differentiated, nor decomposed in order to be."""

autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether autocast is enabled for any device."""

without_autocast = torch._C._DisableAutocast
"""A context in which autocast is disabled for every device."""

at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function once the pass of autograd that is running has ended."""

next_node_number = torch._C._autograd._get_sequence_nr
"""The number of the next node that autograd records in this thread; numbers increase."""

CHECKPOINTS = (
    (checkpoint, "_checkpoint_without_reentrant_generator"),
    (checkpoint.CheckpointFunction, "apply"),
)
"""Owners and attributes of the functions of activation checkpoints. Their first argument is called
in backward, and by the second one, without gradients, in forward."""


def node_number(node: Any) -> int:
    """The number of a node of the autograd graph in the thread that recorded it."""
    return int(node._sequence_nr())


def push_function_mode(mode: Any) -> None:
    """Enter a TorchFunctionMode in this thread until `pop_function_mode`."""
    overrides._push_mode(mode)


def pop_function_mode(mode: Any) -> None:
    """Leave `mode`, wherever it stands among this thread's modes."""
    above = []
    while overrides._len_torch_function_stack():
        top = overrides._pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
