"""Whether rounding errors explain what a program gave, where the bound of `dicp.compare` does not.

A program may be ill-conditioned: a difference of nearly equal sums, a step at the place where a
computed value lies. Then results that are as good as eager's are far from float64. What tells them
from wrong ones is how far float64 results go when each operator of eager makes a rounding error.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import torch

from dicp.compare import Rule
from dicp.discovery import target_name
from dicp.effects import is_mutating, is_random, is_view, op_name
from dicp.fuzz.check import Mode, Results, compare, compiled, dtypes, evaluate, truth
from dicp.fuzz.generate import double_precision, is_exact
from dicp.fuzz.program import Program
from dicp.graphop.target import GraphTarget
from dicp.target import find_target
from dicp.torch_private import TorchDispatchMode, disable_current_modes, pytree

RUNS = 8
MARGIN = 6.0
"""How many times as far as the farthest of the runs a result may be: other orders of additions and
other compositions of an operator make errors of their own size."""

MASKING = 1e18
"""Numbers from here on mask others: their size is not that of the errors beside them."""

Overflow = float | Literal["any"] | None
OVERFLOWS: tuple[float | None, ...] = (None, math.inf, -math.inf, math.nan)
"""What a sum whose terms go beyond the type's largest number becomes: in one run each, and any of
them in the other runs."""

ACCUMULATED = torch.finfo(torch.float32).eps
"""Short floats are summed in float32."""
CENTRING = re.compile(r"\b(var|std|var_mean|std_mean|\w+_norm)\(")
"""What subtracts a mean. Where a vendor's operator rounds the mean of equal numbers, their
differences from it are a rounding error of them in place of 0: a result is right if it is that of
numbers which are off by a rounding error."""

_SAME_VALUES = frozenset({
    "clone", "_to_copy", "copy_", "detach", "alias", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view", "_reshape_copy",
})  # fmt: skip
"""Operators that leave values as they are or round them to a dtype, which float64 runs do too."""
_SUMS = frozenset({"sum", "mean", "nansum", "trace"})
_EXTREMES = frozenset({"amax", "amin", "aminmax", "max", "min"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax", "_log_softmax"})
_RUNNING_MEANS = frozenset({"var_mean", "std_mean"})
"""What adds to the mean of the elements before an element's difference from it, over their number:
it is NaN after an infinity, and the infinity if that is the last element."""
_CANCELLING = frozenset({
    "_softmax_backward_data", "_scaled_dot_product_flash_attention_for_cpu_backward",
})  # fmt: skip
"""What subtracts two sums that may be equal, and is no longer 0 where a fused operator takes each
from other operands: that of attention takes one from results."""


def is_unstable(program: Program, mode: Mode) -> bool:
    """Whether rounding errors explain all problems of the program in one mode."""
    eager = program.function()
    rounded_means = isinstance(find_target(target_name(mode.backend)), GraphTarget)
    for call, got in enumerate(compiled(program, mode)):
        expected = evaluate(eager, program, call)
        exact = truth(program, call, expected)
        if not is_explained(program, call, got, expected, exact, rounded_means):
            return False
    return True


def is_explained(
    program: Program, call: int, got: Results, eager: Results, exact: Results,
    rounded_means: bool = False,
) -> bool:  # fmt: skip
    """Whether rounding errors explain the values that one call gave, those of means of equal
    numbers too where the target has `rounded_means`. Strides are not looked at."""
    bad = compare(got, eager, exact, Rule(strides=False))
    if not bad:
        return True
    rounding = Rounding(program, call, eager, rounded_means)
    runs = [rounding.moved(seed) for seed in range(RUNS)]
    for gaps in (True, False):
        with OtherLoops(gaps):
            runs.append(evaluate(program.function(), program, call))
    for problem in bad:
        held = {"output": "outputs", "input": "inputs", "gradient": "grads"}[problem.kind]
        if not problem.text.startswith(("absolute", "relative", "differs", "NaN", "infinity")):
            return False
        found = [getattr(each, held)[problem.place] for each in (got, eager, exact, *runs)]
        if not _within(*found):
            return False
    return True


class OtherLoops(TorchDispatchMode):
    """Copies operands of pointwise operators: into memory with gaps between the elements, for which
    eager has scalar loops, or without gaps, for which it has vectorized ones.

    The loops differ at NaN and for large numbers: the gradients of elu and of hardtanh at NaN, and
    fmod of a large number, which is NaN in a vectorized loop.
    """

    def __init__(self, gaps: bool) -> None:
        super().__init__()
        self.gaps = gaps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_pointwise(func) and not is_view(func) and not is_mutating(func):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._copied, (args, kwargs))
        return func(*args, **kwargs)

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        dense = value.clone()  # in the order of its strides
        if not self.gaps or not value.ndim:
            return dense
        strides = [2 * stride for stride in dense.stride()]
        return value.new_empty(2 * value.numel()).as_strided(value.shape, strides).copy_(dense)


def _within(
    got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, *moved: torch.Tensor
) -> bool:
    """Whether each element of `got` is as near to float64 as the moved ones are, or eager's is."""
    real, mine, theirs = exact.double(), got.detach().double(), eager.detach().double()
    others = torch.stack([real, theirs, *(each.detach().double() for each in moved)])
    odd = ~(mine.isfinite() & real.isfinite())
    if not _nonfinite_agree(mine[odd], others[:, odd]):
        return False
    kept = ~odd
    mine, real, others = mine[kept], real[kept], others[:, kept]
    if not mine.numel():
        return True
    spread = (others - real).abs()
    spread = torch.where(spread.isfinite(), spread, 0.0).amax(0)
    eps = torch.finfo(got.dtype).eps if got.dtype.is_floating_point else 0.0
    allowed = MARGIN * (spread + eps * (real.abs() + real.square().mean().sqrt()))
    return bool(((mine - real).abs() <= allowed).all())


def _nonfinite_agree(mine: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether each NaN or infinity of `mine`, and each number where float64 has one, is in another
    run too."""
    same_class = (
        (mine.isnan() & others.isnan())
        | (mine.isinf() & (mine == others))
        | (mine.isfinite() & others.isfinite())
    )
    return bool(same_class.any(0).all())


class Rounding:
    """A call of a program in float64, with the rounding errors that eager's operators make."""

    def __init__(
        self, program: Program, call: int, eager: Results, rounded_means: bool = False
    ) -> None:
        self.program, self.call = program, call
        self.dtypes = dtypes(eager.outputs)
        self.narrow, self.wide = Recorder(), Recorder()
        with self.narrow:
            narrow = self._values(wide=False)
        with self.wide, double_precision():
            wide = self._values(wide=True)
        self.aligned = self.narrow.names() == self.wide.names()
        self.centred = {name for each in program.statements
                        if rounded_means and CENTRING.search(each.template)
                        for name in each.uses()}  # fmt: skip
        made = {n: each for each in program.statements for n in each.targets}
        self.precisions = {
            name: torch.finfo(value.dtype).eps
            for name, value in narrow.items()
            if name in self.centred
            or (
                not self.aligned
                and name in made
                and not is_exact(
                    value, wide[name], [wide[n] for n in made[name].uses() if n in wide]
                )
            )
        }

    def _values(self, wide: bool) -> dict[str, torch.Tensor]:
        """The floating point values by name; each operator is recorded."""
        seen: dict[str, torch.Tensor] = {}

        def record(name: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                with disable_current_modes():
                    seen[name] = value.detach().clone()
            return value

        function = self.program.function(wide=wide, hook=record)
        evaluate(function, self.program, self.call, self.dtypes if wide else None)
        return seen

    def moved(self, seed: int) -> Results:
        """A run whose inexact values are off by a rounding error each."""
        rng = random.Random(seed)

        def move(name: str, value: Any) -> Any:
            if name not in self.precisions:
                return value
            with disable_current_modes():
                return Moved.apply(value, self.precisions[name], rng.random())

        function = self.program.function(wide=True, hook=move)
        overflow: Overflow = OVERFLOWS[seed] if seed < len(OVERFLOWS) else "any"
        with double_precision(), Mover(self.narrow, self.wide, rng, overflow):
            return evaluate(function, self.program, self.call, self.dtypes)


@dataclass(frozen=True)
class Computed:
    """The floating point results of an operator, and its floating point operands.

    `roundings`: the precision to which each operand was rounded, where that is short."""

    name: str
    results: list[torch.Tensor]
    operands: list[torch.Tensor]
    roundings: list[float]


class Recorder(TorchDispatchMode):
    """Keeps what each operator that computes gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Computed] = []
        self.roundings: dict[int, float] = {}
        """By the address of a storage; `held` keeps each, so that none is given twice."""
        self.held: list[torch.Tensor] = []

    def names(self) -> list[str]:
        return [each.name for each in self.seen]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _floats((args, kwargs))
        roundings = [self._rounding(each) for each in given]
        operands = [each.clone() for each in given] if computes(func) else []
        result = func(*args, **(kwargs or {}))
        if computes(func):
            found = [each.clone() for each in _floats(result)]
            self.seen.append(Computed(op_name(func), found, operands, roundings))
        else:  # a cast to a wider type leaves the value as it was rounded
            self._record_rounding(_floats(result), max(roundings, default=0.0))
        return result

    def _rounding(self, value: torch.Tensor) -> float:
        eps = torch.finfo(value.dtype).eps
        short = eps if eps > ACCUMULATED else 0.0
        return max(short, self.roundings.get(value.untyped_storage().data_ptr(), 0.0))

    def _record_rounding(self, values: list[torch.Tensor], rounding: float) -> None:
        if rounding:
            self.held += values
            self.roundings |= {each.untyped_storage().data_ptr(): rounding for each in values}


_UNKNOWN: tuple[list[float], list[float], float] = ([], [], math.inf)
"""Of an operator that eager does not run: no errors of results and operands, no largest number."""


def _alike(
    narrow: list[Computed], wide: list[Computed]
) -> Iterator[tuple[int, tuple[Computed, Computed]]]:
    """The operators of the float64 run by number, each with eager's, where eager runs it too."""
    mine, real = ([each.name for each in run] for run in (narrow, wide))
    for block in SequenceMatcher(None, mine, real, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            yield block.b + k, (narrow[block.a + k], wide[block.b + k])


class Mover(TorchDispatchMode):
    """Moves what operators give by a rounding error, where they make one."""

    def __init__(
        self, narrow: Recorder, wide: Recorder, rng: random.Random, overflow: Overflow
    ) -> None:
        super().__init__()
        self.rng, self.overflow = rng, overflow
        pairs = dict.fromkeys(range(len(wide.seen)), _UNKNOWN) | {
            k: (_precisions(*p), _unrounded(*p), _largest(*p))
            for k, p in _alike(narrow.seen, wide.seen)
        }
        self.made = iter(pairs.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What the moved values lead to may have other operators than were recorded.
        precisions, unrounded, largest = next(self.made, _UNKNOWN) if computes(func) else _UNKNOWN
        sums = not is_pointwise(func)
        given = _floats((args, kwargs)) if sums else []
        terms = sum(_total(op_name(func), each) for each in given)
        if any(precisions) and sums and not is_mutating(func):
            # The error of a sum is that of its terms, however small it is itself.
            eps = max(min(each, ACCUMULATED) for each in precisions if each)
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda each: self._perturbed(each, eps, 0.0), (args, kwargs)
            )
        if any(unrounded) and not is_mutating(func):
            # A fused operator reads a 16-bit float before it is rounded, another one after it.
            errors = iter(unrounded)
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda each: self._read(each, errors), (args, kwargs)
            )
        result = func(*args, **kwargs)
        for each, precision in zip(_floats(result), precisions, strict=False):
            beyond = self.rng.choice(OVERFLOWS) if self.overflow == "any" else self.overflow
            if terms > largest and beyond is not None:
                # A sum in another order may go beyond the type's largest number on its way.
                each.fill_(beyond)
            if precision:
                each.copy_(self._perturbed(each, precision, 1.0))
        return result

    def _read(self, value: torch.Tensor, errors: Iterator[float]) -> torch.Tensor:
        return (
            self._perturbed(value, next(errors, 0.0), 0.0) if value.is_floating_point() else value
        )

    def _perturbed(self, value: torch.Tensor, eps: float, share: float) -> torch.Tensor:
        return off(value, eps, self.rng.random(), share) if value.is_floating_point() else value


def computes(func: Any) -> bool:
    """Whether an operator's results have other values than its operands."""
    return not (is_view(func) or is_random(func) or op_name(func) in _SAME_VALUES)


def is_pointwise(func: Any) -> bool:
    """Whether an operator adds nothing up: its sums cannot go beyond the largest number.

    Not all gradients of pointwise operators are tagged as such.
    """
    forward = getattr(torch.ops.aten, op_name(func).removesuffix("_backward"), None)
    overloads = (
        [func, *(getattr(forward, name) for name in forward.overloads())] if forward else [func]
    )
    return any(torch.Tag.pointwise in each.tags for each in overloads)


def _floats(values: Any) -> list[torch.Tensor]:
    tensors = (each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor))
    return [each for each in tensors if each.is_floating_point()]


def _precisions(narrow: Computed, wide: Computed) -> list[float]:
    """The relative rounding error of each result; 0 where it is exact."""
    if len(narrow.results) != len(wide.results):
        return []
    cancels = narrow.name in _CANCELLING or (
        narrow.name in _SUMS and not all(map(_adds_exactly, narrow.operands))
    )
    selects = not cancels and _selects(narrow) and _selects(wide)
    return [
        0.0 if selects or (is_exact(mine, real, wide.operands) and not cancels)
        else torch.finfo(mine.dtype).eps
        for mine, real in zip(narrow.results, wide.results, strict=True)
    ]  # fmt: skip


def _selects(found: Computed, or_zero: bool = False) -> bool:
    """Whether each element of the results is one of the operands', as for a maximum.

    Programs compare it with these: a gradient of equal elements goes to all of them.
    """
    held = [each.detach().double().flatten() for each in found.operands]
    held += [torch.zeros(1, dtype=torch.float64)] if or_zero else []
    given = [each.detach().double().flatten() for each in found.results]
    if not held or not given:
        return False
    numbers = torch.cat(given)
    numbers = numbers[~numbers.isnan()]  # which equals nothing
    return bool(numbers.numel()) and bool(torch.isin(numbers, torch.cat(held)).all())


def _unrounded(narrow: Computed, wide: Computed) -> list[float]:
    """The precision of each operand's rounding to a 16-bit float; 0 where it has none."""
    if len(narrow.operands) != len(wide.operands) or _finds_selected(narrow):
        return []
    return [
        0.0 if mine.shape == real.shape and bool((mine == real).all()) else rounding
        for mine, real, rounding in zip(
            narrow.operands, wide.operands, narrow.roundings, strict=True
        )
    ]


def _finds_selected(found: Computed) -> bool:
    """Whether the operator takes a maximum or minimum, or compares elements with it.

    The gradient is divided by the number of equal elements: no rounding of them makes it 0.
    """
    if found.name in _EXTREMES:
        return True
    if found.name != "eq" or len(found.operands) != 2:
        return False
    selected, values = sorted((each.flatten() for each in found.operands), key=torch.numel)
    return bool(torch.isin(selected, values).all())


def _adds_exactly(value: torch.Tensor) -> bool:
    """Whether the elements have a sum without rounding errors in any order, by their digits.

    In one order it may be right by chance: eager adds up equal numbers by doubling them.
    """
    wide = value[value.isfinite() & (value != 0)].double()
    if not wide.numel():
        return True
    fraction, exponent = torch.frexp(wide)
    digits = (fraction * 2.0**53).long()
    lowest = torch.ldexp((digits & -digits).double(), exponent.double() - 53).min()
    eps = min(torch.finfo(value.dtype).eps, ACCUMULATED)
    return bool(wide.abs().sum() * eps <= lowest)


def _largest(narrow: Computed, wide: Computed) -> float:
    """The largest number of the results' type, which sums of the operands' elements may exceed;
    infinite where the operator adds none of them up."""
    if narrow.name in _SOFTMAX or _selects(wide, or_zero=True):
        return math.inf
    return min((torch.finfo(each.dtype).max for each in narrow.results), default=math.inf)


def _total(name: str, value: torch.Tensor) -> float:
    """The sum of the elements' magnitudes."""
    if name in _RUNNING_MEANS and bool(value.isinf().any()):
        return math.inf
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).sum())


class Moved(torch.autograd.Function):
    """The identity, with rounding errors of a precision, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, eps: float, seed: float) -> torch.Tensor:
        ctx.eps, ctx.seed = eps, seed
        return off(value, eps, seed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return off(grads[0], ctx.eps, ctx.seed), None, None


def off(value: torch.Tensor, eps: float, seed: float, share: float = 1.0) -> torch.Tensor:
    """The value, each element off by a rounding error of its size and of `share` of the mean's.

    Half of the error is the same for all: so are the errors of partial sums.
    """
    gen = torch.Generator().manual_seed(int(seed * 2**31))
    noise = torch.rand(value.shape, generator=gen, dtype=torch.float64) - 0.5
    noise = noise + torch.rand((), generator=gen, dtype=torch.float64) - 0.5
    is_finite = value.detach().isfinite()
    summed = value.detach()[value.detach().abs() < MASKING]
    scale = share * summed.square().mean().sqrt() if summed.numel() else 0.0
    # Infinities have no rounding error: a run that made them NaN would explain any NaN. The largest
    # numbers stay finite: a row that is masked by them alone is not NaN.
    moved = value + noise * eps * (torch.where(is_finite, value.abs(), 0.0) + scale)
    bound = torch.finfo(value.dtype).max
    return torch.where(is_finite, moved.clamp(-bound, bound), moved)
