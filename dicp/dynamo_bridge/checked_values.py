"""Numbers in tensors that eager's kernels check: each call is traced with an assertion before it.

Without one, a compiled graph computes with a probability of 1.5, where eager raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dicp.torch_private import OpOverload, schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Checked:
    """An argument whose numbers must lie in low .. high, and eager's message for others."""

    name: str
    message: str
    high: float | None = 1

    def assert_for(self, given: Any) -> None:
        """Trace the assertion for an argument; numbers that are no tensors are not checked."""
        if not isinstance(given, Tensor) or not given.dtype.is_floating_point:
            return
        within = given >= 0
        if self.high is not None:
            within = within & (given <= self.high)
        aten._assert_async.msg(within.all(), self.message)


_PROBABILITY = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
_DEVIATION = Checked("std", "normal expects all elements of std >= 0.0", None)

CHECKED_VALUES: dict[OpOverload, tuple[Checked, ...]] = {
    aten.bernoulli.default: (Checked("self", _PROBABILITY),),
    aten.bernoulli.Tensor: (Checked("p", _PROBABILITY),),
    aten.normal.float_Tensor: (_DEVIATION,),
    aten.normal.Tensor_Tensor: (_DEVIATION,),
    aten.binary_cross_entropy.default: (
        Checked("self", "all elements of input should be between 0 and 1"),
        Checked("target", "all elements of target should be between 0 and 1"),
    ),
}
"""Operators and the arguments that eager checks. NaN is outside of every range."""


def with_assertions(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` after assertions on its arguments."""
    names = [argument.name for argument in schema_of(op).arguments]

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for each in CHECKED_VALUES[op]:
            each.assert_for(given.get(each.name))
        return rule(*args, **kwargs)

    return checked
