"""Many programs in one graph: compiling a graph costs far more than running it. What fails is run
again alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dicp.compare import significant_strides
from dicp.fuzz.check import REFERENCE, Mode, Problem, check, evaluate, quiet
from dicp.fuzz.generate import generate
from dicp.fuzz.program import CALLS, Program, TensorInput, merged
from dicp.fuzz.rounding import is_unstable
from dicp.fuzz.row import Row
from dicp.fuzz.slots import SIZES, Choices
from dicp.fuzz.table import GROUPS, ROWS
from dicp.torch_private import FakeTensorMode

ODD_SIZES = ((5, 1), (7, 0), (2, 6), (1, 4))


DYNAMIC_SHARES = (91, 3, 6)
"""How many graphs have static sizes, symbolic ones, and symbolic ones from their second call on.
Symbols cost PyTorch's front end several times the time of numbers."""
SIZE_SHARES = (40, 40, 20)
"""The same where sizes are computed."""
DYNAMO_SHARE = 0.15
"""The share of the static graphs that Dynamo captures."""


@dataclass(frozen=True)
class Batch:
    """Programs that are compiled in one graph, in one mode."""

    mode: Mode
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class Find:
    """A program that fails, and how."""

    program: Program
    mode: Mode
    text: str

    @property
    def kind(self) -> str:
        """The class of an exception, or what differs; the same for what one fault causes."""
        return self.text.split(":")[0].split(" ")[0]


@dataclass
class Outcome:
    """What became of a batch. `pytorch`: programs that fail on the reference backend, too."""

    programs: int = 0
    finds: list[Find] = field(default_factory=list)
    pytorch: list[Find] = field(default_factory=list)
    unstable: list[Program] = field(default_factory=list)


def draw_batch(
    seed: str, backend: str, size: int, without: Collection[str] = (), group: str = ""
) -> Batch:
    """The programs of a seed. `without`: templates not to draw; `group`: one of the table, which
    half of the statements are drawn from."""
    rng = random.Random(seed)
    group = group or rng.choice(tuple(GROUPS))
    shares = SIZE_SHARES if group == "sizes" else DYNAMIC_SHARES
    dynamic = rng.choices((False, True, None), shares)[0]
    shared = group == "shared" or rng.random() < 0.04
    changing = dynamic is not False
    sizes = [tuple(rng.sample(SIZES, CALLS)) for _ in range(2)]
    sizes += [(rng.choice(SIZES),) * CALLS for _ in range(2)]
    if rng.random() < 0.25:
        sizes.append(rng.choice(ODD_SIZES))
    mode = Mode(
        backend,
        dynamic,
        fuse=rng.random() < 0.85,
        cached=rng.random() < (0.4 if shared else 0.08),
        optimized=rng.random() < 0.1,
    )
    if not (changing or mode.cached or shared):  # which need guards
        mode = replace(mode, dynamo=rng.random() < DYNAMO_SHARE)
    choices = Choices(
        changing,
        grad=rng.random() < (0.8 if group == "buffers" else 0.4),
        sizes=tuple(sizes) if changing else (),
        numbers=mode.dynamo,
        special=0.4 if rng.random() < (0.5 if group == "powers" else 0.1) else 0.04,
        shared=shared,
        whole=0.5 if rng.random() < 0.15 else 0.08,
    )
    rows = [row for row in drawn_rows(group) if row.template not in without]
    drawn = (generate(rng, choices, rows) for _ in itertools.count())
    count = size // 8 if shared else size // (1 + changing)
    programs = itertools.islice((p for p in drawn if p.statements), count)
    return Batch(mode, tuple(valid(program) for program in programs))


def drawn_rows(group: str) -> list[Row]:
    """All rows, and as many of one group."""
    chosen = GROUPS[group]
    return [*ROWS, *(chosen[k % len(chosen)] for k in range(len(ROWS)))]


def valid(program: Program) -> Program:
    """The program, without gradients where eager cannot give them."""
    function = program.function()
    try:
        for call in range(CALLS):
            evaluate(function, program, call)
    except Exception:
        inputs = [
            replace(each, grad=False) if isinstance(each, TensorInput) else each
            for each in program.inputs
        ]
        return replace(program, inputs=tuple(inputs))
    return program


def examine(batch: Batch) -> Outcome:
    """Compile and compare the batch."""
    outcome = Outcome(len(batch.programs))
    for programs, text in failures(batch.programs, batch.mode):
        find = Find(merged(programs) if len(programs) > 1 else programs[0], batch.mode, text)
        if _is_inferred_so(find) or not (text := own_problem(find.program, find.mode)):
            outcome.pytorch.append(find)
        elif _unstable(find.program, find.mode, text):
            outcome.unstable.append(find.program)
        else:
            outcome.finds.append(replace(find, text=text))
    return outcome


def failures(programs: Sequence[Program], mode: Mode) -> list[tuple[Sequence[Program], str]]:
    """The smallest groups of programs that fail, nearly always single ones, with the first text"""
    if len(programs) > 1 and any(each.shares_memory() for each in programs):
        # A stored result of one must serve no other: among others none would be found.
        return [found for each in programs for found in failures([each], mode)]
    program = merged(programs) if len(programs) > 1 else programs[0]
    try:
        problems = check(program, mode)
    except Exception as error:
        torch.compiler.reset()
        if len(programs) == 1:
            return [(programs, described(error))]
        half = len(programs) // 2
        found = failures(programs[:half], mode) + failures(programs[half:], mode)
        return found or [(programs, described(error))]
    if not problems:
        return []
    if len(programs) == 1:
        return [(programs, str(problems[0]))]
    found = []
    for suspect in suspects(programs, problems):
        found += failures([programs[suspect]], mode)
    return found or [(programs, str(problems[0]))]


def suspects(programs: Sequence[Program], problems: Sequence[Problem]) -> list[int]:
    """Which of the merged programs the problems are in."""
    owners: dict[str, list[int]] = {"output": [], "input": [], "gradient": []}
    for number, program in enumerate(programs):
        owners["output"] += [number] * len(program.outputs)
        owners["input"] += [number] * len(program.inputs)
        with_grad = [each for each in program.inputs if isinstance(each, TensorInput) and each.grad]
        owners["gradient"] += [number] * len(with_grad)
    places = {p.kind: owners[p.kind] for p in problems}
    found = {places[p.kind][p.place] for p in problems if 0 <= p.place < len(places[p.kind])}
    return sorted(found)


def fails(program: Program, mode: Mode) -> str:
    """How the program fails; empty where it does not, or where eager refuses it."""
    return next(iter(problems_of(program, mode).values()), "")


def problems_of(program: Program, mode: Mode) -> dict[str, str]:
    """All that is wrong with what a program gives, by place and kind; none where eager refuses it.

    What compiling or running raises is of one kind.
    """
    try:
        function = program.function()
        for call in range(CALLS):
            evaluate(function, program, call)
    except Exception:
        return {}
    try:
        problems = check(program, mode)
    except Exception as error:
        torch.compiler.reset()
        return {"raised": described(error)}
    found: dict[str, str] = {}
    for each in problems:
        found.setdefault(f"{each.kind} {each.place} {each.text.split(' ')[0]}", str(each))
    return found


def described(error: Exception) -> str:
    """The class of the innermost error and its message."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{type(cause).__name__}: {str(cause)[:600]}"


def _is_inferred_so(find: Find) -> bool:
    """Whether PyTorch's own inference gives other shapes, strides or dtypes than eager: those it
    compiles for."""
    if not any(what in find.text for what in ("shape", "strides", "dtype")):
        return False
    try:
        return foretold_forms(find.program) != actual_forms(find.program)
    except Exception:
        return False


def actual_forms(program: Program) -> list[Any]:
    values = program.build(0)
    with quiet():
        return _forms(program.function()(*values))


def foretold_forms(program: Program) -> list[Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = program.build(0)
    with quiet():
        fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values]
        with mode:
            return _forms(program.function()(*fakes))


def _forms(outputs: Sequence[Any]) -> list[Any]:
    tensors = (v if isinstance(v, torch.Tensor) else None for v in outputs)
    return [None if v is None else (v.dtype, v.shape, significant_strides(v)) for v in tensors]


def own_problem(program: Program, mode: Mode) -> str:
    """How the program fails where a backend that compiles nothing does not fail in the same way.

    AOTAutograd alone makes errors of its own, as with an input changed in place that is also a
    result.
    """
    mine = problems_of(program, mode)
    for way in sorted({True, mode.dynamo}) if mine else ():
        theirs = problems_of(program, replace(mode, backend=REFERENCE, dynamo=way))
        mine = {where: text for where, text in mine.items() if where not in theirs}
    # First what no rounding explains.
    return min(mine.values(), key=lambda text: ": strides " not in text, default="")


def wrong(program: Program, mode: Mode) -> str:
    """How the program fails; empty where rounding errors explain it, too."""
    text = own_problem(program, mode)
    return "" if text and _unstable(program, mode, text) else text


def _unstable(program: Program, mode: Mode, text: str) -> bool:
    if ": strides " in text:
        return False
    try:
        with quiet():
            return is_unstable(program, mode)
    except Exception:
        torch.compiler.reset()
        return False


def as_test(find: Find) -> str:
    """A test that fails as `find` does."""
    source = "".join(f"    # {line}\n" for line in find.program.source().splitlines())
    trouble = "".join(f"    # {line}\n" for line in find.text.splitlines()[:6])
    names: list[Any] = [each.name for each in find.program.inputs]
    return (
        "from dicp.fuzz.batch import fails\n"
        "from dicp.fuzz.check import Mode\n"
        "from dicp.fuzz.program import NumberInput, Program, Statement, TensorInput\n\n\n"
        f"def test_found():  # inputs {', '.join(names)}\n{source}{trouble}"
        f"    program = {find.program!r}\n"
        f"    assert not fails(program, {find.mode!r})\n"
    )
