"""Which ATen operators are decomposed: every one with a decomposition that the target lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from dicp.errors import FallbackWarning
from dicp.operator_choice import OperatorChoice
from dicp.target import Target
from dicp.torch_private import DECOMPOSED_BY_WRITING, OpOverload, all_decompositions, pytree

aten = torch.ops.aten

WHOLE = frozenset(
    {aten.lift_fresh.default, aten.lift.default, aten.detach.default, aten.item.default}
)
"""Operators that AOTAutograd itself expects undecomposed."""

MUTATING = frozenset({aten.complex.default, aten.polar.default}) | DECOMPOSED_BY_WRITING
"""Operators whose decomposition writes through views, which functionalization does not see."""

UNTRACEABLE = frozenset({aten.bucketize.Scalar})
"""Operators whose decomposition makes a constant tensor that tracing treats as unknown data."""


def _copy_of(view: OpOverload) -> Callable[..., Any]:
    """The decomposition of a view's copying form: the view, cloned to contiguous memory."""

    def fresh(part: Any) -> Any:
        return part.clone(memory_format=torch.contiguous_format)

    def rule(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(fresh, view(*args, **kwargs))

    return rule


def _eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """PyTorch's own decomposition numbers over 255 rows in uint16, which eager `arange` lacks."""
    rows = torch.arange(n, device=device)
    columns = rows if m is None else torch.arange(m, device=device)
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


OWN: dict[Any, Callable[..., Any]] = {
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.detach_copy.default: _copy_of(aten.alias.default),
    aten.select_copy.int: _copy_of(aten.select.int),
    aten.slice_copy.Tensor: _copy_of(aten.slice.Tensor),
    aten.split_copy.Tensor: _copy_of(aten.split.Tensor),
    aten.view_copy.default: _copy_of(aten.reshape.default),  # for any strides
}
"""Decompositions that PyTorch lacks or that replace its own. Copying forms of views have no
lowering rules: a rule could only forget that the copy shares no memory with its source."""


@lru_cache(maxsize=32)
def decompositions(
    target: Target, choice: OperatorChoice | None = None
) -> dict[Any, Callable[..., Any]]:
    """The decomposition table for `target`; PyTorch's own table is left as it is.

    Operators that the user chooses, to be eager or native, are not decomposed.
    """
    keep = target.facts.keep | WHOLE | MUTATING | UNTRACEABLE
    table = {
        op: rule
        for op, rule in (*all_decompositions.items(), *OWN.items())
        if isinstance(op, OpOverload) and op not in keep and functional_form(op) not in keep
    }
    for op in list(table) if choice else ():
        assert choice is not None
        if choice.wants_eager(op) or (choice.wants_native(op) and not choice.prefers):
            del table[op]
        elif choice.wants_native(op):
            table[op] = _with_warning(op, table[op])
    return table


def _with_warning(op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    def warned(*args: Any, **kwargs: Any) -> Any:
        message = f"{op} is decomposed although native_ops names it"
        warnings.warn(FallbackWarning(message), stacklevel=2)
        return rule(*args, **kwargs)

    return warned


def functional_form(op: OpOverload) -> OpOverload | None:
    """`add.Tensor` for `add_.Tensor`: the functional form of an in-place operator.

    A decomposition of the in-place operator would run before functionalization and so decompose an
    operator that the target keeps.
    """
    name = op.overloadpacket.__name__
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, op._overloadname, None)
