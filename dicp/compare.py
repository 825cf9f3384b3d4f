"""The accuracy rule for results: errors against fp64 eager, bounded by eager's own error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

# The error in ulps that a result may have where eager happens to be exact: a vector math function
# is within 4. A float64 result has no better reference than eager's own, whose error is not known:
# the loss of either to cancellation is within 64.
FLOOR_ULPS = {torch.float64: 64.0, torch.float32: 16.0, torch.float16: 1.0, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class Rule:
    """How close to eager a result must be.

    exact: the same bits as eager (NaN equals NaN). elementwise: the relative error of each element
    counts, however small it is beside the largest; right for pointwise operators, wrong for sums,
    whose cancellation leaves small elements with large relative errors. floor: scales FLOOR_ULPS.
    atol, rtol: an element within atol + rtol * abs(eager's) is right in any case.
    """

    exact: bool = False
    elementwise: bool = False
    floor: float = 1.0
    strides: bool = True
    atol: float = 0.0
    rtol: float = 0.0


_POSITIONS: Final = {
    "sort": (1, 1, True), "argsort": (1, 0, True), "topk": (2, 1, True), "kthvalue": (2, 1, False),
    "median": (1, 1, False), "nanmedian": (1, 1, False), "mode": (1, 1, False),
}  # fmt: skip
"""Operators -> where `dim` stands among their arguments; which of their results holds positions;
whether these are distinct. Of equal elements they may return any, as PyTorch documents; of argmax
and of max along a dimension it documents that they return the first."""


@dataclass(frozen=True)
class Positions:
    """Positions along `dim` of an operator's first argument, in the result of number `result`.

    One is right if its element equals that at eager's position; where they are `distinct`, none
    may occur twice.
    """

    dim: int
    result: int
    distinct: bool

    @classmethod
    def of(
        cls, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Positions | None:  # fmt: skip
        """Those of a call, by the operator's dotted name; None where eager's alone are right."""
        name = next((n for n in operator.split(".")[-2:] if n in _POSITIONS), None)
        if name is None or kwargs.get("stable"):
            return None
        place, result, distinct = _POSITIONS[name]
        return cls(kwargs.get("dim", args[place] if len(args) > place else -1), result, distinct)

    def agreed(self, x: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """The positions `got` where they are right, and eager's elsewhere; strided as eager's."""
        if got.shape != eager.shape or got.dtype != eager.dtype or not got.numel():
            return eager
        x = x.int_repr() if x.is_quantized else x
        mine, theirs = self._along(x, got), self._along(x, eager)
        x = x if x.ndim else x[None]
        inside = mine.clamp(0, x.shape[self.dim] - 1)
        a, b = x.gather(self.dim, inside), x.gather(self.dim, theirs)
        right = (mine == inside) & ((a == b) | (a.isnan() & b.isnan()))
        if self.distinct:
            counts = torch.zeros(x.shape, dtype=mine.dtype)
            counts.scatter_add_(self.dim, inside, torch.ones_like(inside))
            right &= counts.gather(self.dim, inside) == 1
        agreed = torch.where(right, mine, theirs).view(eager.shape)
        return torch.empty_strided(eager.shape, eager.stride(), dtype=eager.dtype).copy_(agreed)

    def moved(self, grad: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A gradient of the argument, from the old positions of its elements to the new ones."""
        old, new = self._along(grad, old), self._along(grad, new)
        there = grad if grad.ndim else grad[None]
        values = there.gather(self.dim, old)
        moved = there.scatter(self.dim, old, 0).scatter(self.dim, new, values)
        return moved.view(grad.shape)

    def _along(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The positions with a dimension for `dim`, which reductions leave out."""
        return positions.unsqueeze(self.dim) if positions.ndim < max(x.ndim, 1) else positions


def significant_strides(value: torch.Tensor) -> list[int]:
    """The strides that determine an element's address: those of dimensions longer than 1."""
    if value.numel() == 0:
        return []
    return [s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1]


def check_tensor(
    got: torch.Tensor, eager: torch.Tensor, ref: torch.Tensor | None, rule: Rule
) -> list[str]:
    """What is wrong with `got`, in words; empty when nothing is. `ref` is eager's fp64 result."""
    problems = [
        f"{what} {mine}, eager has {theirs}"
        for what, mine, theirs in (
            ("shape", tuple(got.shape), tuple(eager.shape)),
            ("dtype", got.dtype, eager.dtype),
            ("layout", got.layout, eager.layout),
            ("device", got.device, eager.device),
        )
        if mine != theirs
    ]
    if problems:
        return problems
    if got.layout is not torch.strided:
        return check_tensor(got.to_dense(), eager.to_dense(), None, rule)
    if got.is_quantized:
        got, eager, ref = got.int_repr(), eager.int_repr(), None
    if rule.strides and significant_strides(got) != significant_strides(eager):
        problems.append(f"strides {got.stride()}, eager has {eager.stride()}")
    return problems + check_values(got.detach(), eager.detach(), ref, rule)


def check_values(
    got: torch.Tensor, eager: torch.Tensor, ref: torch.Tensor | None, rule: Rule
) -> list[str]:
    got, eager = got.resolve_conj().resolve_neg(), eager.resolve_conj().resolve_neg()
    if got.dtype.is_complex:
        got, eager = torch.view_as_real(got), torch.view_as_real(eager)
        ref = None if ref is None else torch.view_as_real(ref.resolve_conj().to(torch.complex128))
    if not got.dtype.is_floating_point or rule.exact:
        return _check_equal(got, eager)
    truth = eager.double() if ref is None else ref.detach().double()
    if truth.shape != eager.shape:
        truth = eager.double()
    return _check_near(got, eager, truth, rule)


def _check_equal(got: torch.Tensor, eager: torch.Tensor) -> list[str]:
    differ = got != eager
    if got.dtype.is_floating_point:
        differ &= ~(got.isnan() & eager.isnan())
    return _describe("differs from eager", differ, got, eager) if differ.any() else []


def _check_near(
    got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, rule: Rule
) -> list[str]:
    rounded = truth.to(got.dtype)
    problems = []
    # Eager may overflow between two operators where a fused kernel does not: either is right.
    for what, odd in (
        ("NaN", (got.isnan() != eager.isnan()) & (got.isnan() != rounded.isnan())),
        ("infinity", _infinities_differ(got, eager) & _infinities_differ(got, rounded)),
    ):
        if odd.any():
            problems += _describe(f"{what} where eager has none, or the reverse", odd, got, eager)
    finite = got.isfinite() & eager.isfinite() & truth.isfinite()
    if problems or not finite.any():
        return problems
    mine, theirs, real = got[finite].double(), eager[finite].double(), truth[finite]
    error, eager_error = (mine - real).abs(), (theirs - real).abs()
    info = torch.finfo(got.dtype)
    floor = FLOOR_ULPS.get(got.dtype, 1.0) * rule.floor * info.eps
    largest = real.abs().max()
    absolute = 2 * eager_error.max() + floor * largest + info.tiny
    scale = real.abs() + info.tiny
    if not rule.elementwise:
        scale = scale + real.square().mean().sqrt()
    relative = 2 * (eager_error / scale).max() + floor
    error[(mine - theirs).abs() <= rule.atol + rule.rtol * theirs.abs()] = 0.0
    for kind, excess in (("absolute", error / absolute), ("relative", error / scale / relative)):
        worst = int(excess.argmax())
        if excess[worst] > 1:
            problems.append(
                f"{kind} error {float(excess[worst]):.3g}x what is allowed: got {mine[worst]:.9g},"
                f" eager {theirs[worst]:.9g}, fp64 {real[worst]:.17g}"
                f" ({int((excess > 1).sum())} of {excess.numel()} elements too far)"
            )
    return problems


def _infinities_differ(got: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (got.isinf() | other.isinf()) & (got != other) & ~got.isnan() & ~other.isnan()


def _describe(what: str, where: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> list[str]:
    place = tuple(where.nonzero()[0].tolist())
    return [
        f"{what}: at {list(place)} got {got[place].item()}, eager {eager[place].item()}"
        f" ({int(where.sum())} of {where.numel()} elements)"
    ]


def storage_relations(
    outputs: Sequence[object], inputs: Sequence[object]
) -> set[tuple[str, int, int]]:
    """Which outputs share memory with which inputs and with each other.

    Tensors without elements share none; whether they have a storage is the allocator's choice.
    """

    def key(value: object) -> int:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return 0
        if value.numel() == 0:
            return 0
        return value.untyped_storage().data_ptr()

    outs, ins = [key(v) for v in outputs], [key(v) for v in inputs]
    found = {("input", i, j) for i, a in enumerate(outs) for j, b in enumerate(ins) if a and a == b}
    found |= {("output", i, j) for i, a in enumerate(outs) for j in range(i) if a and a == outs[j]}
    return found


def assert_matches(
    got: torch.Tensor,
    eager: torch.Tensor,
    ref: torch.Tensor | None = None,
    *,
    name: str = "output",
    rule: Rule | None = None,
) -> None:
    """Raise AssertionError with everything wrong about `got`."""
    problems = check_tensor(got, eager, ref, rule or Rule())
    assert not problems, f"{name}: " + "; ".join(problems)
