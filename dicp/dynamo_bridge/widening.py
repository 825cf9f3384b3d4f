"""Operators of 16-bit floats that are computed in float32, as a target's library has no kernels for
them: it would multiply one number after another.

The result is rounded once, as eager's sums are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dicp import torch_private
from dicp.target import Facts
from dicp.torch_private import ATTENTION_FORWARD, OpOverload, pytree

aten = torch.ops.aten
LEFT_OPERANDS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Product of two matrices -> the position of its left operand, before the right one's."""


def in_float32(op: OpOverload, facts: Facts, rule: Callable[..., Any]) -> Callable[..., Any]:
    """`op` in float32, for operands of which the target's facts say so; `rule` for others."""
    dtypes = facts.in_float32[op]

    def widened(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        floats = (x for x in pytree.tree_leaves(given) if _is_float(x))
        dtype = next((x.dtype for x in floats), None)
        if dtype not in dtypes or _has_few_rows(op, args, facts.narrow_rows):
            return rule(*args, **kwargs)

        def wide(x: Any) -> Any:
            return x.float() if _is_float(x) and x.dtype == dtype else x

        def rounded(x: Any) -> Any:
            return x.to(dtype) if _is_float(x) else x

        args, kwargs = pytree.tree_map(wide, given)
        results = op(*args, **kwargs)
        if op is ATTENTION_FORWARD:
            return rounded(results[0]), results[1]  # logarithms of sums, float32 in any case
        return pytree.tree_map(rounded, results)

    return widened


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _has_few_rows(op: OpOverload, args: tuple[Any, ...], most: int) -> bool:
    """Whether it is a product of at most so many rows and a column-major matrix."""
    if op not in LEFT_OPERANDS:
        return False
    left, right = args[LEFT_OPERANDS[op] :][:2]
    rows, step = map(torch_private.hint_of, (left.shape[0], right.stride(0)))
    return rows <= most and step == 1
