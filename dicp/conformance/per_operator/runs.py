"""One case of an operator on one backend: its results against eager's and exact ones, its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dicp.conformance.per_operator.cases import Case, Operator
from dicp.conformance.timing import median_seconds
from dicp.testing.backends import find_backend

DTYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
TOLERANCES = {
    torch.float32: (1e-6, 1e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2),
    torch.float64: (1e-12, 1e-12),
}  # fmt: skip
"""Absolute and relative error that an element may have."""
TIGHT, REPETITIONS = (1e-3, 1e-3), 10
"""The tolerance that is tried for bfloat16, too, and how often."""


@dataclass(frozen=True)
class Outcome:
    """What comparing a case's results found; empty `trouble`: they are right."""

    trouble: str
    error: float
    """The largest error of an element, as a multiple of what it may have."""
    absolute: float = 0.0
    """The largest error of an element."""


def compared(
    got: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    tolerance: tuple[float, float],
) -> Outcome:
    """An element may be off by the tolerance, or by twice what eager is off at most."""
    worst = absolute = 0.0
    for number, (mine, theirs, real) in enumerate(zip(got, eager, exact, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found = f"result {number} is {mine.dtype} {tuple(mine.shape)}"
            text = f"{found}, eager's {theirs.dtype} {tuple(theirs.shape)}"
            return Outcome(text, float("inf"), float("inf"))
        if not mine.dtype.is_floating_point:
            if (differ := mine != theirs).any():
                at = tuple(differ.nonzero()[0].tolist())
                text = f"result {number} at {at} is {mine[at]}, wanted {theirs[at]}"
                count = f"{int(differ.sum())} elements differ"
                return Outcome(f"{text}; {count}", float("inf"), float("inf"))
            continue
        mine, theirs, real = (x.detach().double().cpu() for x in (mine, theirs, real))
        own = 2 * (theirs - real).abs().nan_to_num(0, 0, 0).max() if real.numel() else 0.0
        allowed = torch.clamp(tolerance[0] + tolerance[1] * real.abs(), min=float(own))
        off = torch.where((mine == real) | (mine.isnan() & real.isnan()), 0, (mine - real).abs())
        share = (off / allowed).nan_to_num(torch.inf)
        if off.numel():
            absolute = max(absolute, float(off.nan_to_num(torch.inf).max()))
            worst = max(worst, float(share.max()))
        if share.numel() and float(share.max()) > 1:
            at = tuple(int(k) for k in torch.unravel_index(share.argmax(), share.shape))
            text = f"result {number} at {at} is {mine[at]:.6g}, exact {real[at]:.6g}"
            return Outcome(f"{text}; {int((share > 1).sum())} elements differ", worst, absolute)
    return Outcome("", worst, absolute)


@dataclass(frozen=True)
class Run:
    """One case of an operator on one backend."""

    operator: Operator
    case: Case
    dtype: torch.dtype
    device: str = "cpu"

    def inputs(self) -> list[Tensor]:
        """Fresh random operands."""
        drawn = [operand.make(self.dtype, self.device) for operand in self.case.operands]
        return self.operator.operands(drawn, self.case.keywords)

    def eager(self, inputs: Sequence[Tensor]) -> list[Any]:
        return self.operator.results(self.operator.written(self.case), self.case, inputs)

    def exact(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Eager's results in float64."""
        return self.eager([x.double() if x.dtype.is_floating_point else x for x in inputs])

    def check(self, compiled: Callable[..., Any], tolerance: tuple[float, float]) -> Outcome:
        """Compares the results on fresh random data."""
        inputs = self.inputs()
        eager, exact = self.eager(inputs), self.exact(inputs)
        got = self.operator.results(compiled, self.case, inputs)  # may write what it must not
        return compared(got, eager, exact, tolerance)

    def compile(self, backend: str) -> Callable[..., Any]:
        torch.compiler.reset()
        fn = self.operator.written(self.case)
        return torch.compile(fn, backend=find_backend(backend), dynamic=False)

    def verify(self, backend: str, repeat: int = 1) -> tuple[Outcome, str]:
        """The first failure or the last outcome, and what the tighter tolerance gives."""
        torch.manual_seed(0)
        compiled, tolerance = self.compile(backend), TOLERANCES[self.dtype]
        for _ in range(repeat):
            outcome = self.check(compiled, tolerance)
            if outcome.trouble:
                return outcome, ""
        if self.dtype != torch.bfloat16:
            return outcome, ""
        tight = sum(not self.check(compiled, TIGHT).trouble for _ in range(REPETITIONS))
        return outcome, f", within {TIGHT[0]:g} in {tight} of {REPETITIONS}"

    def profile(self, backend: str, warmup: int, iterations: int) -> str:
        """Times of torch and of dicp, their ratio, and the bytes that dicp moves in a second."""
        inputs, compiled = self.inputs(), self.compile(backend)
        moved = sum(x.untyped_storage().nbytes() for x in inputs)
        moved += sum(x.nbytes for x in self.operator.results(compiled, self.case, inputs)
                     if isinstance(x, Tensor))  # fmt: skip
        theirs, mine = (
            self.median_seconds(fn, inputs, warmup, iterations)
            for fn in (self.operator.written(self.case), compiled)
        )
        return (f"torch {theirs * 1e3:.4f} ms, dicp {mine * 1e3:.4f} ms, ratio "
                f"{theirs / mine:.2f}, {moved / mine / 1e9:.2f} GB/s")  # fmt: skip

    def median_seconds(
        self, fn: Callable[..., Any], inputs: Sequence[Tensor], warmup: int, iterations: int
    ) -> float:
        """The median time of `iterations` calls."""
        call = partial(self.operator.results, fn, self.case, inputs)
        return median_seconds(call, self.device, warmup, iterations)
