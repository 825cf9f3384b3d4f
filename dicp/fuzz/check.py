"""Run a program in eager, in float64 and compiled, and say what differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import fx

from dicp.compare import Rule, check_tensor, storage_relations
from dicp.dynamo_bridge import backend as backends
from dicp.fuzz.generate import double_precision
from dicp.fuzz.program import CALLS, Program
from dicp.torch_private import backend_registry, disable_current_modes

REFERENCE = "aot_eager"
"""A backend that shares PyTorch's front end with ours: what it gets wrong too is not ours."""


@dataclass(frozen=True)
class Mode:
    """How a program is compiled."""

    backend: str
    dynamic: bool | None = False
    fuse: bool = True
    cached: bool = False
    """Compiled once more, from what the first compilation stored on disk."""
    optimized: bool = False
    """With the compiler flags of a user, not with those that compile fastest."""
    dynamo: bool = True
    """Captured by Dynamo; else by AOTAutograd alone, in half the time of PyTorch's front end."""

    def options(self) -> dict[str, Any]:
        if self.backend == REFERENCE:
            return {}
        flags = () if self.optimized else ("-O1",)
        return {"fuse": self.fuse, "cxx_flags": flags, "compile_jobs": 1}

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Results:
    """What one call gave and left behind."""

    outputs: list[Any]
    inputs: list[Any]
    grads: list[torch.Tensor | None]
    relations: set[tuple[str, int, int]]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one output, input or gradient: `place` is its number."""

    kind: str
    place: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} {self.place}: {self.text}"


def check(program: Program, mode: Mode) -> list[Problem]:
    """The problems of a program in one mode. What compiling or running raises is raised."""
    eager = program.function()
    calls = range(CALLS)
    expected = [evaluate(eager, program, call) for call in calls]
    exact = [truth(program, call, expected[call]) for call in calls]
    problems: list[Problem] = []
    for _ in range(1 + mode.cached):
        torch.compiler.reset()
        for call, got in enumerate(compiled(program, mode)):
            problems += compare(got, expected[call], exact[call])
    torch.compiler.reset()
    return problems


def compiled(program: Program, mode: Mode) -> Iterator[Results]:
    """The results of each call of the compiled program.

    PyTorch has no guard that inputs remain separate: where some share memory in a call, each call
    is compiled, with what the ones before stored on disk.
    """
    make = _with_dynamo if mode.dynamo else _without_dynamo
    function = make(program, mode)
    for call in range(CALLS):
        if call and program.shares_memory():
            torch.compiler.reset()
            function = make(program, mode)
        yield evaluate(function, program, call)


def _with_dynamo(program: Program, mode: Mode) -> Callable[..., Any]:
    options = mode.options()
    return torch.compile(
        program.function(),
        backend=mode.backend,
        fullgraph=True,
        dynamic=mode.dynamic,
        **({"options": options} if options else {}),
    )


def _without_dynamo(program: Program, mode: Mode) -> Callable[..., Any]:
    """The program as one node of the graph that the backend is given, at the first call."""
    function, options = program.function(), mode.options()
    backend = getattr(backends, mode.backend, None) or backend_registry.lookup_backend(mode.backend)
    compiled: list[Callable[..., Any]] = []

    def run(*values: Any) -> Any:
        if not compiled:
            graph = _as_graph(function, program)
            given = {"options": options} if options else {}
            compiled.append(backend(graph, list(values), **given))
        return compiled[0](*values)

    return run


class _FunctionModule(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def _as_graph(function: Callable[..., Any], program: Program) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    root.add_module("program", _FunctionModule(function))
    inputs = tuple(graph.placeholder(each.name) for each in program.inputs)
    result = graph.call_module("program", inputs)
    items = (graph.call_function(getitem, (result, k)) for k in range(len(program.outputs)))
    graph.output(tuple(items))
    return fx.GraphModule(root, graph)


def evaluate(
    function: Callable[..., Any],
    program: Program,
    call: int,
    rounding: Sequence[torch.dtype | None] | None = None,
) -> Results:
    """Run forward and, where an output asks for it, backward. `rounding`: in float64, with
    cotangents of these dtypes."""
    torch.manual_seed(0)
    with disable_current_modes():  # which see what the program computes
        values = program.build(call, wide=rounding is not None)
    with quiet():
        outputs = list(function(*values))
        relations = storage_relations(outputs, values)
        grads = _gradients(outputs, values, rounding, set(accumulate(program.parts)))
    plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
    return Results(outputs, plain, grads, relations)


def truth(program: Program, call: int, eager: Results) -> Results:
    with double_precision():
        return evaluate(program.function(wide=True), program, call, dtypes(eager.outputs))


def dtypes(values: Sequence[Any]) -> list[torch.dtype | None]:
    return [value.dtype if isinstance(value, torch.Tensor) else None for value in values]


def _gradients(
    outputs: Sequence[Any],
    values: Sequence[Any],
    rounding: Sequence[torch.dtype | None] | None,
    starts: Collection[int],
) -> list[torch.Tensor | None]:
    """`starts`: the outputs from which cotangents are drawn anew, so that a program fails alone as
    it did among others."""
    leaves = [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
    roots, cotangents = [], []
    gen = torch.Generator().manual_seed(1)
    for k, value in enumerate(outputs):
        if k in starts:
            gen.manual_seed(1)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            noise = torch.randn(value.shape, generator=gen, dtype=torch.float64)
            noise = noise.to(value.dtype if rounding is None else rounding[k])
            roots.append(value)
            cotangents.append(_in_format(noise.to(value.dtype), value))
    if not roots or not leaves:
        return []
    return list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))


def _in_format(cotangent: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A cotangent contiguous or in the memory format of its value; the shape decides, so that a
    program fails alone as it did among others."""
    if sum(value.shape) % 3 == 0:
        return cotangent
    return torch.empty_like(value, requires_grad=False).copy_(cotangent)


def compare(
    got: Results, eager: Results, exact: Results, rule: Rule | None = None
) -> list[Problem]:
    groups = (
        ("output", got.outputs, eager.outputs, exact.outputs, rule or Rule()),
        ("input", got.inputs, eager.inputs, exact.inputs, rule or Rule()),
        ("gradient", got.grads, eager.grads, exact.grads, rule or Rule()),
    )
    problems: list[Problem] = []
    for kind, mine, theirs, real, held_to in groups:
        if len(mine) != len(theirs):
            problems.append(Problem(kind, -1, f"{len(mine)}, eager has {len(theirs)}"))
            continue
        for place, triple in enumerate(zip(mine, theirs, real, strict=True)):
            problems += [Problem(kind, place, text) for text in _differences(*triple, held_to)]
    if got.relations != eager.relations:
        odd = sorted(got.relations ^ eager.relations)
        what = [f"{k} {j}" + ("" if (k, i, j) in eager.relations else " (not in eager)")
                for k, i, j in odd]  # fmt: skip
        problems += [
            Problem("output", each[1], f"shares memory with {text}")
            for each, text in zip(odd, what, strict=True)
        ]
    return problems


def _differences(got: Any, eager: Any, exact: Any, rule: Rule) -> list[str]:
    if not isinstance(eager, torch.Tensor):
        same = got == eager or (got is None and eager is None) or got != got
        return [] if same else [f"got {got}, eager {eager}"]
    if not isinstance(got, torch.Tensor):
        return [f"got {got}, eager a tensor"]
    texts = check_tensor(got, eager, exact, rule)
    if got.requires_grad != eager.requires_grad:
        texts.append(f"requires_grad {got.requires_grad}, eager {eager.requires_grad}")
    return texts


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
