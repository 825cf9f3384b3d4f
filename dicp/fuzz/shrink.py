"""Make a failing program as small as it goes while it fails in the same way."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dicp.fuzz.batch import Find, wrong
from dicp.fuzz.check import Mode, evaluate
from dicp.fuzz.program import CALLS, NAME, NumberInput, Program, Statement, TensorInput

SMALL = ("0", "1", "2")


def shrunk(find: Find, seconds: float, failing: Callable[[Program, Mode], str] = wrong) -> Find:
    """The smallest find reached in the time. `failing` says how a program fails, or nothing."""
    end = time.monotonic() + seconds
    best = find
    progress = True
    while progress:
        progress = False
        for program, mode in candidates(best.program, best.mode):
            if time.monotonic() > end:
                return best
            text = failing(program, mode)
            if text and replace(best, text=text).kind == best.kind:
                best = Find(program, mode, text)
                progress = True
                break
    return best


def candidates(program: Program, mode: Mode) -> Iterator[tuple[Program, Mode]]:
    """Smaller programs and plainer modes, the largest steps first."""
    for smaller in _with_fewer_statements(program):
        if smaller.outputs:
            yield smaller.pruned(), mode
    for plainer in _simpler_modes(mode):
        yield program, plainer
    for smaller in (*_with_plainer_inputs(program), *_with_plainer_arguments(program)):
        yield smaller.pruned(), mode


def _simpler_modes(mode: Mode) -> Iterator[Mode]:
    if not mode.dynamo:
        yield replace(mode, dynamo=True)
    if mode.cached:
        yield replace(mode, cached=False)
    if not mode.fuse:
        yield replace(mode, fuse=True)
    if mode.optimized:
        yield replace(mode, optimized=False)
    if mode.dynamic is not False:
        yield replace(mode, dynamic=False)


def _with_fewer_statements(program: Program) -> Iterator[Program]:
    count = len(program.statements)
    width = count // 2
    while width > 1:  # halves first
        for start in range(0, count, width):
            yield from _without(program, range(start, min(start + width, count)))
        width //= 2
    if len(program.outputs) > 1:
        for k in range(len(program.outputs)):
            outputs = program.outputs[:k] + program.outputs[k + 1 :]
            yield replace(program, outputs=outputs)
    for k in reversed(range(count)):
        yield from _without(program, range(k, k + 1))


def _without(program: Program, removed: range) -> Iterator[Program]:
    """Without some statements; what others need of them becomes an input."""
    kept = [each for k, each in enumerate(program.statements) if k not in removed]
    lost = [name for k in removed for name in program.statements[k].targets]
    held = [each.name for each in program.inputs if isinstance(each, TensorInput)]
    held += [name for each in kept for name in each.targets]
    operands = {name for k in removed for name in program.statements[k].uses()} & set(held)
    outputs = tuple(name for name in program.outputs if name not in lost)
    if len(outputs) < len(program.outputs):  # what it was computed from comes in its place
        outputs += tuple(sorted(operands - set(outputs)))
    needed = set(lost) & set().union(*(each.uses() for each in kept))
    if not needed:
        yield replace(program, statements=tuple(kept), outputs=outputs)
        return
    try:
        inputs = tuple(_as_input(program, name) for name in sorted(needed))
    except Exception:
        return
    first = 9001 + max((int(each.name[1:]) for each in program.inputs), default=0)
    renamed = {each.name: f"x{first + k}" for k, each in enumerate(inputs)}

    def rename(text: str) -> str:
        return NAME.sub(lambda found: renamed.get(found.group(), found.group()), text)

    statements = tuple(
        replace(each, args={key: rename(text) for key, text in each.args.items()}) for each in kept
    )
    fresh = tuple(replace(each, name=renamed[each.name]) for each in inputs)
    yield Program((*program.inputs, *fresh), statements, outputs)


def _as_input(program: Program, name: str) -> TensorInput:
    """An input in the place of a value that the program computes."""
    shapes, dtype = [], "float32"
    for call in range(CALLS):
        seen: dict[str, torch.Tensor] = {}
        evaluate(program.function(hook=_recorder(seen)), program, call)
        shapes.append(tuple(seen[name].shape))
        dtype = str(seen[name].dtype).removeprefix("torch.")
    return TensorInput(name, dtype, tuple(shapes))


def _recorder(seen: dict[str, torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def record(name: str, value: torch.Tensor) -> torch.Tensor:
        seen[name] = value
        return value

    return record


def _with_plainer_inputs(program: Program) -> Iterator[Program]:
    def changed(k: int, new: TensorInput) -> Program:
        return replace(program, inputs=(*program.inputs[:k], new, *program.inputs[k + 1 :]))

    sizes = {n for each in program.inputs if isinstance(each, TensorInput)
             for shape in each.shapes for n in shape}  # fmt: skip
    if any(isinstance(i, TensorInput) and len(set(i.shapes)) > 1 for i in program.inputs):
        yield _resized(program, None, 0)
    for size in sorted(sizes, reverse=True):
        for new in (1, 2, 3):
            if new < size:
                yield _resized(program, size, new)
    for k, each in enumerate(program.inputs):
        if not isinstance(each, TensorInput):
            continue
        if each.layout != "contiguous":
            yield changed(k, replace(each, layout="contiguous"))
        if each.values not in ("normal", "zeros"):
            yield changed(k, replace(each, values="normal"))
        if each.grad:
            yield changed(k, replace(each, grad=False))
        if each.dtype in ("bfloat16", "float16", "float64"):
            yield changed(k, replace(each, dtype="float32"))
        if len(each.shapes[0]) > 1:
            yield changed(k, replace(each, shapes=tuple(shape[1:] for shape in each.shapes)))


def _resized(program: Program, size: int | None, new: int) -> Program:
    """Every dimension of `size` made `new`; with None the second call as the first."""
    inputs = []
    for each in program.inputs:
        if isinstance(each, TensorInput):
            shapes = tuple(tuple(new if n == size else n for n in shape) for shape in each.shapes)
            each = replace(each, shapes=shapes if size is not None else shapes[:1] * CALLS)
        inputs.append(each)
    return replace(program, inputs=tuple(inputs))


def _with_plainer_arguments(program: Program) -> Iterator[Program]:
    for k, statement in enumerate(program.statements):

        def changed(new: Statement, k: int = k) -> Program:
            statements = (*program.statements[:k], new, *program.statements[k + 1 :])
            return replace(program, statements=statements)

        if statement.context:
            yield changed(replace(statement, context=""))
        for slot, text in statement.args.items():
            for plainer in _simpler(program, text):
                yield changed(replace(statement, args={**statement.args, slot: plainer}))


def _simpler(program: Program, text: str) -> Iterator[str]:
    numbers = {each.name: each for each in program.inputs if isinstance(each, NumberInput)}
    if text in numbers:
        yield from dict.fromkeys(f"({n})" for n in numbers[text].numbers)
        return
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return
    if isinstance(value, int | float) and not isinstance(value, bool) and text not in SMALL:
        yield from (small for small in SMALL[:2])
