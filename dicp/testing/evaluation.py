"""Results and gradients of a function on copies of its inputs, and what differs from eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.compare import Positions, Rule, check_tensor, storage_relations
from dicp.testing.inputs import clone_exactly
from dicp.torch_private import pytree

Call = Callable[[list[Any]], Sequence[Any]]
"""A function of several groups of arguments at once, with a result for each."""


@dataclass
class Results:
    """What one group of arguments gave: outputs, gradients, and the inputs as the call left them.

    An input without a gradient has None for it.
    """

    outputs: list[Any]
    inputs: list[torch.Tensor]
    grads: list[Any]
    shared: set[tuple[str, int, int]]
    """Which outputs share memory with which inputs and with each other."""

    def on_host(self) -> Results:
        """The same with all tensors on the host."""
        outputs, inputs, grads = pytree.tree_map(
            lambda value: copied(value, "cpu"), [self.outputs, self.inputs, self.grads]
        )
        return Results(outputs, inputs, grads, self.shared)


def evaluate(
    call: Call,
    groups: list[Any],
    flags: Sequence[bool],
    rounding: Sequence[Sequence[torch.dtype]] | None = None,
) -> list[Results]:
    """Run on copies of the inputs, forward and, where an output asks for it, backward.

    `flags`: which tensors of a group want a gradient, if their dtype has one. `rounding`: the
    dtypes of eager's outputs, to which the cotangents are rounded.
    """
    copies = pytree.tree_map(copied, groups)
    inputs = [_tensors(group) for group in copies]
    for group in inputs:
        for value, wanted in zip(group, flags, strict=True):
            if wanted and (value.dtype.is_floating_point or value.dtype.is_complex):
                value.requires_grad_(True)
    raw = call(copies)
    outputs = [
        [v for v in pytree.tree_leaves(out) if isinstance(v, torch.Tensor | int | float)]
        for out in raw
    ]
    grads = _gradients(outputs, inputs, rounding)
    return [
        Results(out, given, grad, storage_relations(out, given))
        for out, given, grad in zip(outputs, inputs, grads, strict=True)
    ]


def _gradients(
    outputs: Sequence[Sequence[Any]],
    inputs: Sequence[Sequence[torch.Tensor]],
    rounding: Sequence[Sequence[torch.dtype]] | None,
) -> list[list[Any]]:
    roots: list[torch.Tensor] = []
    cotangents: list[torch.Tensor] = []
    gen = torch.Generator().manual_seed(1)
    for g, group_outputs in enumerate(outputs):
        for o, value in enumerate(v for v in group_outputs if isinstance(v, torch.Tensor)):
            if not value.requires_grad:
                continue
            shape = (*value.shape, 2) if value.dtype.is_complex else value.shape
            noise = torch.randn(shape, generator=gen, dtype=torch.float64, device="cpu")
            if value.dtype.is_complex:
                noise = torch.view_as_complex(noise)
            if rounding is not None:
                noise = noise.to(rounding[g][o])
            roots.append(value)
            cotangents.append(noise.to(value.device, value.dtype))
    if not roots:
        return [[] for _ in inputs]
    leaves = [v for group in inputs for v in group if v.requires_grad]
    flat = iter(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))
    return [[next(flat) if v.requires_grad else None for v in group] for group in inputs]


def in_float64(call: Call, groups: list[Any], flags: Sequence[bool]) -> list[Results] | None:
    """The results in float64, or None where the function has no such form."""
    with torch.no_grad():
        outputs = call(pytree.tree_map(copied, groups))
    rounding = [[v.dtype for v in _tensors(out)] for out in outputs]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return evaluate(call, pytree.tree_map(_widened, groups), flags, rounding)
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def at_positions_of(
    got: Results, eager: Results, truth: Results | None, positions: Positions | None
) -> tuple[Results, Results | None]:
    """Eager's results and those in float64, with the positions that `got` has of equal elements.

    Gradients through positions are copies of those of the results: eager's are exact.
    """
    if positions is None or not positions.result < len(got.outputs) == len(eager.outputs):
        return eager, truth
    mine, theirs = (results.outputs[positions.result] for results in (got, eager))
    agreed = positions.agreed(eager.inputs[0], mine, theirs)
    outputs, inputs, grads = [*eager.outputs], [*eager.inputs], [*eager.grads]
    outputs[positions.result] = agreed
    for kind, output, place in eager.shared:
        if kind == "input" and output == positions.result:  # an argument `out`
            inputs[place] = agreed
    if torch.equal(agreed, mine) and grads and grads[0] is not None:
        grads[0] = positions.moved(grads[0], theirs, mine)
    exact = truth and replace(truth, grads=[])
    return replace(eager, outputs=outputs, inputs=inputs, grads=grads), exact


def compare(
    got: Results, eager: Results, truth: Results | None, rule: Rule,
    positions: Positions | None = None,
) -> list[str]:  # fmt: skip
    """What is wrong with the results of one group of arguments, in words."""
    eager, truth = at_positions_of(got, eager, truth, positions)
    loose = Rule(floor=rule.floor, strides=False)
    kinds = (
        ("output", got.outputs, eager.outputs, truth and truth.outputs, rule),
        ("input after the call", got.inputs, eager.inputs, None, rule),
        ("gradient", got.grads, eager.grads, truth and truth.grads, loose),
    )
    problems: list[str] = []
    for kind, mine, theirs, real, used in kinds:
        if len(mine) != len(theirs):
            problems.append(f"{len(mine)} {kind}s, eager has {len(theirs)}")
            continue
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            r = real[k] if real else None
            problems += [f"{kind} {k}: {text}" for text in _compare_one(a, b, r, used)]
    if got.shared != eager.shared:
        problems.append(f"shares memory as {got.shared}, eager as {eager.shared}")
    return problems


def copied(value: Any, device: str | None = None) -> Any:
    """A copy of a tensor, on `device` if given; other values as they are."""
    return clone_exactly(value, device) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.double()
    if isinstance(value, torch.Tensor) and value.dtype.is_complex:
        return value.to(torch.complex128)
    return value


def _compare_one(mine: Any, theirs: Any, real: Any, rule: Rule) -> list[str]:
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
        return check_tensor(mine, theirs, real, rule)
    if mine is None and isinstance(theirs, torch.Tensor) and not theirs.any():
        return []  # autograd may say None or zeros for an input that does not matter
    if theirs is None and isinstance(mine, torch.Tensor) and not mine.any():
        return []
    return [] if mine == theirs else [f"{mine}, eager has {theirs}"]
