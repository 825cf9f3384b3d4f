"""An operator's cases: shapes, strides and dtypes of operands, keywords, and the in-place mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dicp.torch_private import pytree


@dataclass(frozen=True)
class Operand:
    """A tensor of a case. Strides may be 0 or leave gaps; None: contiguous. `dtype` None: the
    case's; integers are drawn below `below`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    below: int = 2
    unique: bool = False
    """Whether integers are distinct: a permutation's first elements."""

    def make(self, dtype: torch.dtype, device: str) -> Tensor:
        dtype = self.dtype or dtype
        strides = self.strides or torch.empty(self.shape, device="meta").stride()
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True) if n)
        if dtype.is_floating_point:
            room = torch.rand(reach).mul(2).sub(1).to(dtype)
        elif self.unique:
            room = torch.randperm(self.below)[:reach].to(dtype)
        else:
            room = torch.randint(self.below, (reach,)).to(dtype)
        return room.to(device).as_strided(self.shape, strides)

    def __str__(self) -> str:
        return f"{self.shape}{'' if self.strides is None else f' strides {self.strides}'}"


@dataclass(frozen=True)
class Case:
    """Operands, keywords of the function, and the operand that the result is written into."""

    operands: tuple[Operand, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    over: int | None = None

    def __str__(self) -> str:
        words = [*map(str, self.operands), *(f"{k}={v}" for k, v in self.keywords.items())]
        return ", ".join(
            [*words, *([f"over operand {self.over}"] if self.over is not None else [])]
        )


@dataclass(frozen=True)
class Operator:
    """A function with its cases.

    The function's first parameters are its operands, the others are scalars with defaults.
    """

    fn: Callable[..., Any]
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...] = ("f16", "bf16", "f32")
    gradients: tuple[int, ...] = ()
    """The operands whose gradients, by autograd, are the results."""
    prepare: Callable[..., Sequence[Tensor]] | None = None
    """Makes the operands from those that a case has, such as what a forward pass saves."""
    outputs: tuple[str, ...] = ("y",)

    def operands(self, drawn: Sequence[Tensor], keywords: Mapping[str, Any]) -> list[Tensor]:
        """All operands of a case; the last one of a gradient is that of the first result."""
        if self.prepare is not None:
            return list(self.prepare(*drawn))
        if not self.gradients:
            return list(drawn)
        result = pytree.tree_leaves(self.fn(*drawn, **keywords))[0]
        return [*drawn, output_gradient(result)]

    @property
    def operand_names(self) -> list[str]:
        own = [p.name for p in self._parameters if p.default is p.empty]
        return [*own, "grad_output"] if self.gradients else own

    @property
    def output_names(self) -> tuple[str, ...]:
        names = self.operand_names
        return tuple(f"grad_{names[k]}" for k in self.gradients) or self.outputs

    @property
    def scalars(self) -> dict[str, Any]:
        """The function's scalar parameters, with their defaults."""
        return {p.name: p.default for p in self._parameters if p.default is not p.empty}

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.fn).parameters.values())

    def results(self, fn: Callable[..., Any], case: Case, operands: Sequence[Tensor]) -> list[Any]:
        """The results of `fn`; what it writes is a copy of the operand."""
        own = [_copy(x) if k == case.over else x.detach() for k, x in enumerate(operands)]
        output_gradients = [own.pop()] if self.gradients else []
        for k in self.gradients:
            own[k] = own[k].clone().requires_grad_()
        out = fn(*own, **case.keywords)
        if case.over is not None:
            return [own[case.over]]
        leaves: list[Any] = pytree.tree_leaves(out)
        if not self.gradients:
            return leaves
        leaves[0].backward(output_gradients[0])
        return [own[k].grad for k in self.gradients]

    def written(self, case: Case) -> Callable[..., Any]:
        """The function, which writes its result over the case's operand."""
        if case.over is None:
            return self.fn

        def written(*operands: Tensor, **keywords: Any) -> Tensor:
            assert case.over is not None
            return operands[case.over].copy_(self.fn(*operands, **keywords))

        return written


def _copy(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def output_gradient(result: Tensor) -> Tensor:
    """The gradient of a result that backward passes begin with: from -1 to 1."""
    values = torch.linspace(-1, 1, result.numel(), device=result.device)
    return values.to(result.dtype).reshape(result.shape)
