"""The fused attention that a target's graphs carry: a capability that its facts state.

Unfused attention is replaced by a call of one of PyTorch's fused operators, for which the target
then has a rule of its own, a library call, or an unfused form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.torch_private import ATTENTION_FORWARD

Marks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool | None]


@dataclass(frozen=True)
class FusedAttention:
    """The fused operators of PyTorch that a device's graphs contain, and their requirements."""

    operators: tuple[Any, ...]
    """Overloads for the forward part. A single one is called for any tensors, with the arguments of
    `ATTENTION_FORWARD`; among several PyTorch chooses by the tensors, and pads or copies for its
    choice."""
    dropout: bool = False
    """Whether they apply dropout to the probabilities."""
    adds_masks: bool = False
    """Whether fusing saves more than it costs to add up two masks before the call."""
    any_mask: bool = False
    """Whether a mask may have another dtype than the queries, and any strides; else it is
    converted, and copied to a last stride of 1."""
    exact_masks: bool = False
    """Whether a mask has its effect on NaN and infinite scores, too. A float mask is added; one of
    booleans replaces scores by -inf, one of uint8 by the lowest number, and both hide them from
    gradients. Beside the causal flag, a mask hides the keys after each query, and no others.
    Otherwise unfused attention whose mask replaces scores stays unfused, unless it is causal."""
    widest_trained_head: int | None = None
    """The largest head size that has a fused backward; None: all have."""
    mask_gradient: Any = None
    """The operator among them whose backward also gives the gradient of the mask."""
    largest_batch: int | None = None
    """The largest batch for which that gradient is right."""
    marks_hidden_rows: Marks | None = None
    """Whether, for these queries, keys and values, rows of NaN scores give NaN, and the second
    result is -inf in rows without a score above -inf, and in no others: these are 0, and NaN in
    unfused attention. False: unfused attention of these tensors stays unfused. None, of the field
    or as the answer: not known; the mask tells which rows are hidden."""


ANY_ATTENTION = FusedAttention(operators=(ATTENTION_FORWARD,), any_mask=True)
"""One operator for all calls: of the host's library, and of vendors' graph compilers."""


def _never_marks_hidden_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return False


HOST_LIBRARY_ATTENTION = replace(ANY_ATTENTION, marks_hidden_rows=_never_marks_hidden_rows)
"""The host's library: unfused attention stays unfused, since its operator gives 0 for a row whose
scores are all -inf, and its second result does not tell which rows these are."""
