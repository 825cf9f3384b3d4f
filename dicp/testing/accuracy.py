"""The fp64 reference: what a model computes when nothing in it is rounded to float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dicp.torch_private import grouped_mm, pytree

FLOOR_ROUNDINGS = 4
"""How many roundings of the largest value the floor of the fp64 rule allows."""


class InDouble(TorchFunctionMode):
    """Turn the casts to float32 inside model code (norms, rotary tables) into casts to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        func = IN_DOUBLE.get(func, func)
        args, kwargs = pytree.tree_map_only(torch.dtype, _widen, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """The product of each group of a's rows, ending at `offs`, with its matrix of b."""
    ends = offs.tolist()
    groups = zip([0, *ends], ends, b, strict=False)
    return torch.cat([a[start:end] @ matrix for start, end, matrix in groups])


IN_DOUBLE = {Tensor.float: Tensor.double, grouped_mm: _grouped_mm}
"""Functions that would leave float64 or do not take it, and what computes the same in float64."""


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype


def to_double(value: Any) -> Any:
    """A copy of a tree of tensors with the floating ones in float64."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t.clone(), value
    )


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of an output tree, keyed by their place in it."""
    if isinstance(value, Mapping):  # a library's own output class, which pytree may not name
        value = dict(value)
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {pytree.keystr(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class Error:
    """One tensor under the fp64 rule: `error <= 2 * eager's own error + floor`."""

    name: str
    measure: str
    error: float
    eager: float
    floor: float

    @property
    def ok(self) -> bool:
        return self.error <= 2 * self.eager + self.floor

    @property
    def excess(self) -> float:
        """The error as a multiple of what the rule allows."""
        allowed = 2 * self.eager + self.floor
        return self.error / allowed if allowed else (float("inf") if self.error else 0.0)

    def __str__(self) -> str:
        allowed = 2 * self.eager + self.floor
        return f"{self.name}: {self.measure} error {self.error:.3e}, allowed {allowed:.3e}"


def errors(
    compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[Error]:
    """The errors of tensors of one kind; the largest value among them sets the common floor.

    Raises AssertionError where names, shapes, dtypes or the values of integer tensors differ.
    """
    assert compiled.keys() == eager.keys() == reference.keys()
    floating = [t for t in reference.values() if t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in floating), default=0.0)
    found = []
    for name, expected in reference.items():
        got, plain = compiled[name], eager[name]
        assert (got.shape, got.dtype) == (plain.shape, plain.dtype), name
        if not expected.is_floating_point():
            assert torch.equal(got, plain), f"{name}: not the values of eager"
            continue
        floor = FLOOR_ROUNDINGS * torch.finfo(plain.dtype).eps * largest
        for measure, of in (("largest", _largest), ("root-mean-square", _mean)):
            found.append(Error(name, measure, of(got, expected), of(plain, expected), floor))
    return found


def _largest(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).abs().max()) if value.numel() else 0.0


def _mean(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).square().mean().sqrt()) if value.numel() else 0.0
