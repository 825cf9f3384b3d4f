"""The verdict on a case: the tolerance and the rule against float64, for each element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from dicp.compare import FLOOR_ULPS, Positions, Rule, check_tensor
from dicp.testing.evaluation import Results, at_positions_of

DEFAULTS: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-7, 1e-7), torch.complex128: (1e-7, 1e-7),
    torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 1.6e-2), torch.complex32: (1e-3, 1e-3),
}  # fmt: skip
"""atol and rtol by the dtype of a result, where a case states none."""
OTHERS: Final = (1e-5, 1e-5)
TRUTH_ERROR: Final = FLOOR_ULPS[torch.float64] * torch.finfo(torch.float64).eps
"""How far the float64 results of numbers near 1 may be from the true ones, by cancellation."""
UNLIKELY: Final = 2.5
"""The scaled Kolmogorov-Smirnov distance that samples of one distribution exceed once in 140000."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong, empty if nothing is, and the element with the largest error.

    needed_atol: what would let all elements pass beside the given rtol; needed_rtol: the reverse.
    """

    problem: str = ""
    max_error: float = 0.0
    index: tuple[int, ...] = ()
    atol: float = 0.0
    rtol: float = 0.0
    needed_atol: float = 0.0
    needed_rtol: float = 0.0


@dataclass(frozen=True)
class Judge:
    """How results are compared. tolerance: None: the dtype's, raised to eager's own error.

    strides: whether outputs must have eager's. random: whether distributions are compared.
    values: whether results have values to compare. positions: the result that holds some, of which
    more than eager's are right.
    """

    tolerance: tuple[float, float] | None = None
    strides: bool = True
    random: bool = False
    values: bool = True
    positions: Positions | None = None

    def verdict(self, got: Results, eager: Results, truth: Results | None) -> Verdict:
        """The worst verdict of all results: outputs, inputs after the call, gradients."""
        eager, truth = at_positions_of(got, eager, truth, self.positions)
        verdicts = []
        loose = replace(self, strides=False)
        kinds = (
            ("output", self, got.outputs, eager.outputs, truth.outputs if truth else ()),
            ("input", self, got.inputs, eager.inputs, truth.inputs if truth else ()),
            ("gradient", loose, got.grads, eager.grads, truth.grads if truth else ()),
        )
        for kind, judge, mine, theirs, real in kinds:
            if len(mine) != len(theirs):
                return Verdict(f"{len(mine)} {kind}s, eager has {len(theirs)}")
            for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                one = judge.one(a, b, real[k] if k < len(real) else None)
                if one.problem and (kind, k) != ("output", 0):
                    one = replace(one, problem=f"{kind} {k}: {one.problem}")
                verdicts.append(one)
        found = max(verdicts, key=lambda v: (bool(v.problem), v.max_error), default=Verdict())
        if not found.problem and got.shared != eager.shared:
            return replace(
                found, problem=f"results share memory as {got.shared}, eager's as {eager.shared}"
            )
        return found

    def one(self, mine: Any, theirs: Any, real: Tensor | None) -> Verdict:
        """The verdict on one result."""
        if not isinstance(theirs, Tensor) or not isinstance(mine, Tensor):
            zero = [v for v in (mine, theirs) if isinstance(v, Tensor) and not v.any()]
            same = mine == theirs if not zero else None in (mine, theirs)
            return Verdict() if same else Verdict(f"{mine}, eager has {theirs}")
        mine, theirs = mine.detach(), theirs.detach()
        if self.random or not self.values:
            form = _with_values_of(mine, theirs)
            found = check_tensor(form, theirs, None, Rule(strides=self.strides))
            if self.random and not found:
                found = _distribution_problems(mine, theirs)
            return Verdict("; ".join(found))
        found = check_tensor(mine, theirs, real, Rule(strides=self.strides, atol=TRUTH_ERROR))
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return Verdict("; ".join(found))
        return self._measured(mine, theirs, real, found)

    def _measured(
        self, mine: Tensor, theirs: Tensor, real: Tensor | None, found: list[str]
    ) -> Verdict:
        """The tolerance, beside what the rule against float64 found."""
        atol, rtol = self.tolerance or DEFAULTS.get(theirs.dtype, OTHERS)
        whole = not (theirs.is_floating_point() or theirs.is_complex())
        if whole:
            atol = rtol = 0.0
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        a, b = mine.to(wide), theirs.to(wide)
        both = a.isfinite() & b.isfinite()  # of others, the rule against float64 is enough
        error = torch.where(both, (a - b).abs(), 0.0)
        if self.tolerance is None and real is not None and real.shape == b.shape and not whole:
            own = (b - real.to(wide)).abs()[both & real.isfinite()]
            atol = max(atol, 3 * float(own.max())) if own.numel() else atol
        if not error.numel():
            return Verdict("; ".join(found))
        excess = error - rtol * b.abs().nan_to_num(0.0, 0.0, 0.0)
        index = tuple(int(k) for k in torch.unravel_index(error.argmax(), error.shape))
        relative = torch.where(both & (b != 0), (error - atol).clamp(min=0) / b.abs(), 0.0)
        largest = float(error.max())
        problem = ""
        if found or float(excess.max()) > atol:
            problem = f"max abs error {largest:.2g} at {index} (atol {atol:.2g}, rtol {rtol:.2g})"
            problem = "; ".join([problem, *found])
        return Verdict(problem, largest, index, atol, rtol, max(0.0, float(excess.max())),
                       float(relative.nan_to_num(0.0, 0.0, 0.0).max()))  # fmt: skip


def _with_values_of(mine: Tensor, theirs: Tensor) -> Tensor:
    """Eager's values in the form of another result."""
    same = (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    return theirs if same else mine


def _distribution_problems(mine: Tensor, theirs: Tensor) -> list[str]:
    """Whether two samples are of one distribution, by the test of Kolmogorov and Smirnov."""
    a, b = (torch.view_as_real(v) if v.is_complex() else v for v in (mine, theirs))
    a, b = (v.double().flatten().nan_to_num().sort().values for v in (a, b))
    if not a.numel():
        return []
    points = torch.cat([a, b]).unique()
    below = [torch.searchsorted(v, points, right=True) / v.numel() for v in (a, b)]
    distance = float((below[0] - below[1]).abs().max())
    allowed = UNLIKELY * (2 / a.numel()) ** 0.5
    if distance <= allowed:
        return []
    return [f"another distribution than eager's: distance {distance:.3g} (allowed {allowed:.3g})"]
