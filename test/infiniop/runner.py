"""Runs one operator's cases on the targets that the platform flags name.

    python test/infiniop/softmax.py --cpu --metax              verify, a line per case
    python test/infiniop/softmax.py --nvidia --profile         times of torch and of dicp

The flags are those of public InfiniCore's per-operator scripts. A platform whose chip is absent
runs its simulator. The exit status is 1 if a case fails, 2 for flags that are not known.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicp.config import Config
from dicp.discovery import SUFFIX, discover
from dicp.target import find_target
from dicp.testing.backends import find_backend

PLATFORMS = {"cpu": "cpugraph", "nvidia": "tritongraph", "metax": "macagraph",
             "ascend": "ascendgraph", "tops": "topsgraph"}  # fmt: skip
OTHERS = ("cambricon", "iluvatar", "moore", "kunlun", "hygon", "ali", "qy")
"""Platforms of those scripts that no target here is for."""
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
    """A function with its cases; `gradients`: of which operands those are the results."""

    fn: Callable[..., Any]
    cases: tuple[Case, ...]
    dtypes: tuple[str, ...] = ("f16", "bf16", "f32")
    gradients: tuple[int, ...] = ()

    def results(self, fn: Callable[..., Any], case: Case, operands: Sequence[Tensor]) -> list[Any]:
        """The results of `fn`; what it writes is a copy of the operand."""
        own = [_copy(x) if k == case.over else x.detach() for k, x in enumerate(operands)]
        for k in self.gradients:
            own[k] = own[k].clone().requires_grad_()
        out = fn(*own, **case.keywords)
        if case.over is not None:
            return [own[case.over]]
        leaves: list[Any] = torch.utils._pytree.tree_leaves(out)
        if not self.gradients:
            return leaves
        weights = torch.linspace(-1, 1, leaves[0].numel(), device=leaves[0].device)
        leaves[0].backward(weights.to(leaves[0].dtype).reshape(leaves[0].shape))
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


@dataclass(frozen=True)
class Outcome:
    """What comparing a case's results found; empty `trouble`: they are right."""

    trouble: str
    error: float
    """The largest error of an element, as a multiple of what it may have."""


def compared(
    got: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any], tolerance: tuple[float, float]
) -> Outcome:
    """An element may be off by the tolerance, or by twice what eager is off at most."""
    worst = 0.0
    for number, (mine, theirs, real) in enumerate(zip(got, eager, exact, strict=True)):
        if not isinstance(mine, Tensor) or not mine.dtype.is_floating_point:
            same = torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
            if not same:
                return Outcome(f"result {number} differs from eager's", float("inf"))
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found = f"result {number} is {mine.dtype} {tuple(mine.shape)}"
            return Outcome(f"{found}, eager's {theirs.dtype} {tuple(theirs.shape)}", float("inf"))
        mine, theirs, real = (x.detach().double().cpu() for x in (mine, theirs, real))
        own = 2 * (theirs - real).abs().nan_to_num(0, 0, 0).max() if real.numel() else 0.0
        allowed = torch.clamp(tolerance[0] + tolerance[1] * real.abs(), min=float(own))
        off = torch.where((mine == real) | (mine.isnan() & real.isnan()), 0, (mine - real).abs())
        share = (off / allowed).nan_to_num(torch.inf)
        if share.numel() and float(share.max()) > 1:
            at = tuple(int(k) for k in torch.unravel_index(share.argmax(), share.shape))
            text = f"result {number} at {at} is {mine[at]:.6g}, exact {real[at]:.6g}"
            return Outcome(f"{text}; {int((share > 1).sum())} elements differ", float(share.max()))
        worst = max(worst, float(share.max()) if share.numel() else 0.0)
    return Outcome("", worst)


@dataclass(frozen=True)
class Run:
    """One case of an operator on one backend."""

    operator: Operator
    case: Case
    dtype: torch.dtype
    device: str = "cpu"

    def inputs(self) -> list[Tensor]:
        return [operand.make(self.dtype, self.device) for operand in self.case.operands]

    def check(self, compiled: Callable[..., Any], tolerance: tuple[float, float]) -> Outcome:
        """Compares the results on fresh random data."""
        inputs, fn = self.inputs(), self.operator.written(self.case)
        wide = [x.double() if x.dtype.is_floating_point else x for x in inputs]
        eager = self.operator.results(fn, self.case, inputs)
        exact = self.operator.results(fn, self.case, wide)
        got = self.operator.results(compiled, self.case, inputs)  # may write what it must not
        return compared(got, eager, exact, tolerance)

    def compile(self, backend: str) -> Callable[..., Any]:
        torch._dynamo.reset()
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
            self._seconds(fn, inputs, warmup, iterations)
            for fn in (self.operator.written(self.case), compiled)
        )
        return (f"torch {theirs * 1e3:.4f} ms, dicp {mine * 1e3:.4f} ms, ratio "
                f"{theirs / mine:.2f}, {moved / mine / 1e9:.2f} GB/s")  # fmt: skip

    def _seconds(self, fn: Any, inputs: list[Tensor], warmup: int, iterations: int) -> float:
        wait = torch.cuda.synchronize if self.device != "cpu" else lambda: None
        for count in (warmup, iterations):
            wait()
            start = time.perf_counter()
            for _ in range(count):
                self.operator.results(fn, self.case, inputs)
            wait()
        return (time.perf_counter() - start) / max(iterations, 1)


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name)
    for platform, backend in PLATFORMS.items():
        parser.add_argument(f"--{platform}", dest="backends", action="append_const", const=backend)
    for platform in OTHERS:
        parser.add_argument(f"--{platform}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", dest="backends", action="append", metavar="B")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--num_prerun", type=int, default=10)
    parser.add_argument("--num_iterations", type=int, default=1000)
    parser.add_argument("--debug", action="store_true", help="print the tensors of failing cases")
    parser.add_argument("--repeat", type=int, default=1, help="times each case is drawn anew")
    parser.add_argument("--dtypes", default="", help=",".join(DTYPES))
    return parser


def main(name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs the operator that a script is named after; the exit status."""
    from operators import OPERATORS

    operator = OPERATORS[Path(name).stem]
    parser = parser_of(Path(name).name)
    options = parser.parse_args(arguments)
    there = ", ".join(f"--{p} ({b})" for p, b in PLATFORMS.items())
    for platform in OTHERS:
        if getattr(options, platform):
            parser.error(f"no target is for --{platform}; there are {there}")
    if not options.backends:
        parser.error(f"name a platform: {there}, or --backend B")
    wanted = options.dtypes.split(",") if options.dtypes else operator.dtypes
    if unknown := set(wanted) - DTYPES.keys():
        parser.error(f"unknown dtypes {', '.join(sorted(unknown))}; there are {', '.join(DTYPES)}")
    failed = 0
    for backend in options.backends:
        device = _device_of(backend)
        for case in operator.cases:
            for dtype in wanted:
                failed += _one(Run(operator, case, DTYPES[dtype], device), backend, options)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


def _device_of(backend: str) -> str:
    """Where a backend's tensors lie; prints that a simulator runs in the place of a chip."""
    name = backend.removesuffix(SUFFIX)
    if name not in discover():
        return "cpu"
    target = find_target(name)
    if not target.simulated(Config.from_env({}, target.options)):
        return target.device_type or "cpu"
    print(f"{backend}: no chip is at hand, its simulator runs")
    return "cpu"


def _one(run: Run, backend: str, options: argparse.Namespace) -> bool:
    """Runs one case and prints its line; whether it fails."""
    label = f"{backend} {str(run.dtype).removeprefix('torch.')} {run.case}"
    if options.profile:
        times = run.profile(backend, options.num_prerun, options.num_iterations)
        print(f"{label}: {times}")
        return False
    outcome, tight = run.verify(backend, options.repeat)
    state = outcome.trouble or f"passed, {outcome.error:.2f} of the tolerance{tight}"
    print(f"{label}: {state}")
    if outcome.trouble and options.debug:
        torch.manual_seed(0)
        for number, x in enumerate(run.inputs()):
            print(f"operand {number}: {x}")
    return bool(outcome.trouble)


def start(name: str) -> None:
    """What a script calls."""
    sys.exit(main(name))
