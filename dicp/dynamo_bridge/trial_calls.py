"""Tries the decomposition of an operator on arguments made from its schema.

A decomposition that ends in operators without rules is refused when it is traced.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from dicp.dynamo_bridge.decompose import decompositions
from dicp.target import Target
from dicp.torch_private import OpOverload, fake_tensors, schema_of

SHAPES = ((2, 3, 4, 4), (3, 3), (6,), ())
DTYPES = (torch.float32, torch.int64)
"""Of all tensors of a trial call but indices; those that the operator takes are not known."""
INDICES = ("index", "indices")
"""The names of tensors of indices, which are int64."""


class _NoTrialValue(Exception):
    """There is no value to try for a type of argument."""


def is_refused(op: OpOverload, target: Target) -> bool:
    """Whether the target refuses the operator's decomposition in a trial call.

    False where no trial call is valid: some operators take only certain values.
    """
    rule = decompositions(target)[op]
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        with fake_tensors():
            try:
                args, kwargs = _arguments(op, shape, dtype)
                return rule(*args, **kwargs) is NotImplemented
            except _NoTrialValue:
                return False
            except Exception:  # decompositions raise whatever they like of a wrong argument
                continue
    return False


def _arguments(
    op: OpOverload, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema_of(op).arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        value = _value(kind, argument.name, shape, dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if kind == "Tensor":
        return torch.empty(shape, dtype=torch.int64 if name in INDICES else dtype)
    if kind == "List[Tensor]":
        return [torch.empty(shape, dtype=dtype)] * 2
    if kind.startswith("Optional"):
        return None
    if kind == "List[int]":
        return list(shape) if "size" in name or "shape" in name else [0]
    numbers = {"int": 0 if "dim" in name else 1, "float": 0.5, "bool": False, "number": 2}
    if kind not in numbers:
        raise _NoTrialValue
    return numbers[kind]
