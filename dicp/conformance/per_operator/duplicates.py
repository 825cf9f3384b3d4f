"""Writes through indices that repeat: which of the values stays is not defined, that one does is.

The rule `one_of`: a position that is written holds one of the values written to it, any other
position what it held. Gradients follow the value that stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dicp.testing.backends import find_backend


@dataclass(frozen=True)
class DuplicateWrites:
    """An operator that writes: `fn(x, index, source)` returns what x is then.

    positions: the elements of a tensor that `source` is written to, in its order. source: the shape
    of what is written. below: indices are drawn below this number, so that they repeat.
    """

    name: str
    fn: Callable[[Tensor, Tensor, Tensor], Tensor]
    positions: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    source: tuple[int, ...]
    below: int

    def __str__(self) -> str:
        return f"{self.name} x {self.shape}, {self.index} indices below {self.below}"

    def operands(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """x, indices and source, drawn anew."""
        drawn = (torch.randn(self.shape).to(dtype), torch.randint(self.below, self.index),
                 torch.randn(self.source).to(dtype))  # fmt: skip
        return [value.to(device) for value in drawn]

    def trouble(self, backend: str, dtype: torch.dtype, device: str = "cpu") -> str:
        """What is wrong with the result of a backend or with its gradients; empty if nothing."""
        torch.compiler.reset()
        compiled = torch.compile(self.fn, backend=find_backend(backend), dynamic=False)
        x, index, source = self.operands(dtype, device)
        out = compiled(x.clone(), index, source)
        places = torch.arange(x.numel(), device=device).view(x.shape)
        positions = self.positions(places, index).flatten()
        found = one_of_trouble(out, x, positions, source.flatten())
        if found:
            return found
        leaves = [value.clone().requires_grad_() for value in (x, source)]
        result = compiled(leaves[0] * 1, index, leaves[1])
        grad = torch.randn_like(result)
        grads = torch.autograd.grad(result, leaves, grad)
        return gradient_trouble(grad, grads, result.detach(), positions, source.flatten())


def one_of_trouble(out: Tensor, before: Tensor, positions: Tensor, written: Tensor) -> str:
    """How a result breaks the rule `one_of`; empty if it does not.

    positions: the element of `before` that each value of `written` goes to.
    """
    flat = out.flatten()
    stays = written == flat[positions]
    held = torch.zeros(flat.shape, dtype=torch.bool, device=out.device)
    held[positions[stays]] = True
    is_written = torch.zeros_like(held)
    is_written[positions] = True
    held |= ~is_written & (flat == before.flatten())
    wrong = (~held).nonzero().flatten()
    if not len(wrong):
        return ""
    place = int(wrong[0])
    at = tuple(int(k) for k in torch.unravel_index(wrong[0], out.shape))
    allowed = written[positions == place].tolist() or [float(before.flatten()[place])]
    shown = ", ".join(f"{value:.6g}" for value in allowed[:8])
    return f"{len(wrong)} positions, first {at}: {flat[place]:.6g} is none of {shown}"


def gradient_trouble(
    grad: Tensor, grads: Sequence[Tensor], out: Tensor, positions: Tensor, written: Tensor
) -> str:
    """How gradients of x and of the source contradict the value that stayed; empty if not at all.

    A value that did not stay may have no gradient, or that of its position, as eager gives it.
    """
    of_x, of_source = (value.flatten() for value in grads)
    expected = grad.flatten().clone()
    expected[positions] = 0
    if not torch.equal(of_x, expected):
        return "the gradient of x is none of positions that keep their values"
    arriving = grad.flatten()[positions]
    stays = written == out.flatten()[positions]
    if not torch.equal(of_source[stays], arriving[stays]):
        return "a value that stayed has another gradient than its position"
    if ((of_source != arriving) & (of_source != 0)).any():
        return "a value that was overwritten has a gradient of another position"
    return ""


def winners(case: DuplicateWrites) -> Tensor:
    """Which value of the source stays at each position in eager, by its number; -1: none."""
    index = case.operands(torch.float32)[1]
    numbers = torch.arange(torch.Size(case.source).numel(), dtype=torch.float64)
    return case.fn(-torch.ones(case.shape, dtype=torch.float64), index, numbers.view(case.source))


def _index_put(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return x.index_put((index[0], index[1]), source)


def cases_of(values: int) -> Sequence[DuplicateWrites]:
    """A case for each way to write; so many values are written along the dimension."""
    return (
        DuplicateWrites(
            "index_copy", lambda x, i, s: x.index_copy(0, i, s), lambda places, i: places[i],
            (7, 5), (values,), (values, 5), 7,
        ),
        DuplicateWrites(
            "index_copy_", lambda x, i, s: x.index_copy_(0, i, s), lambda places, i: places[i],
            (7, 5), (values,), (values, 5), 7,
        ),
        DuplicateWrites(
            "index_copy_", lambda x, i, s: x.index_copy_(1, i, s), lambda places, i: places[:, i],
            (4, 9), (values,), (4, values), 3,
        ),
        DuplicateWrites(
            "scatter", lambda x, i, s: x.scatter(1, i, s), lambda places, i: places.gather(1, i),
            (6, 8), (6, values), (6, values), 3,
        ),
        DuplicateWrites(
            "index_put", _index_put, lambda places, i: places[i[0], i[1]], (6, 5), (2, values),
            (values,), 5,
        ),
    )  # fmt: skip


CASES: Sequence[DuplicateWrites] = cases_of(48)
"""Nearly every value has others that are written to its position."""
