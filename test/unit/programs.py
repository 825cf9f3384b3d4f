"""Random small tensor programs as Python text: the fuel of the fusion tests.

`random_program(choose)` takes its decisions from `choose(sequence)`, so that hypothesis can shrink
a program and a plain `random.Random` can walk through many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

SIZES = (1, 2, 3, 4, 6, 8, 12)
UNARY = (
    "torch.relu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "-{0}", "{0}.abs()",
    "torch.exp(-{0}.abs())", "{0} * 0.5 + 1", "{0}.clamp(-0.5, 0.7)", "{0}.square() - {0}",
    "torch.where({0} > 0, {0}, {0} * 0.1)", "{0}.to(torch.float32).to(torch.float64)",
    "torch.nn.functional.gelu({0})", "{0}.clone()",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})",
    "torch.where({0} > {1}, {0}, -{1})", "{0} / ({1}.abs() + 1)",
)  # fmt: skip
REDUCTIONS = (
    "{0}.sum({d}{k})", "{0}.mean({d}{k})", "{0}.amax({d}{k})", "{0}.amin({d}{k})",
    "{0}.var({d}, unbiased=False{k})", "torch.logsumexp({0}, {d}{k})",
    "torch.linalg.vector_norm({0}, dim={d}{k})",
)  # fmt: skip
CROSS_ROW = (
    "torch.softmax({0}, {d})", "torch.log_softmax({0}, {d})", "{0}.cumsum({d})", "{0}.flip({d})",
    "{0}.roll(1, {d})", "{0}.argmax({d}).to({0}.dtype)", "{0}.argmin({d}, keepdim=True) * 0.25",
    "{0}.unsqueeze({d})", "{0}.narrow({d}, 0, ({0}.shape[{d}] + 1) // 2)",
    "{0}.index_select({d}, torch.arange({0}.shape[{d}] - 1, -1, -1))",
    "torch.cat([{0}, {0} * 2], {d})", "{0}.prod({d})", "{0}.select({d}, -1)",
    "{0}.sort({d}).values", "{0}.repeat_interleave(2, {d})",
    "torch.zeros_like({0}).index_add({d}, torch.zeros({0}.shape[{d}], dtype=torch.int64), {0})",
    "{0}.scatter({d}, torch.zeros_like({0}, dtype=torch.int64).narrow({d}, 0, 1), 0.5)",
    "torch.nn.functional.layer_norm({0}, {0}.shape[{d}:])",
)  # fmt: skip
SHAPED = (
    "{0}.t()", "{0}[::2]", "{0}[..., ::2]", "{0}[..., 1:]", "{0}.flatten()", "{0}.squeeze()",
    "torch.nn.functional.pad({0}, (1, 2), value=0.5)", "torch.nn.functional.pad({0}, (-1, 1))",
    "{0}.expand(3, *{0}.shape)", "torch.stack([{0}, {0} + 1])", "{0}.contiguous()",
    "{0}.sum()", "{0}.mean()", "torch.tril({0})", "{0} @ {0}.transpose(-1, -2)",
)  # fmt: skip
IN_PLACE = (
    "{0}.add_(1)", "{0}[..., 0] = 0.25", "{0}.mul_({0}.mean())", "{0}[:1].copy_({0}[-1:])",
    "{0}.relu_()", "{0}[..., ::2].mul_(2)", "{0}.view(-1)[0] = 3",
)  # fmt: skip
MAX_ELEMENTS = 20_000


@dataclass
class Program:
    """Text of a function `fn`, and the shapes of its inputs."""

    shapes: list[tuple[int, ...]]
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        names = ", ".join(f"v{i}" for i in range(len(self.shapes)))
        body = [*self.lines, f"return ({', '.join(self.outputs)},)"]
        return f"def fn({names}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, "<program>", "exec"), scope)  # noqa: S102
        return scope["fn"]

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(self.lines))
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
                for s in self.shapes]  # fmt: skip

    def __repr__(self) -> str:
        return f"# inputs {self.shapes}\n{self.source}"


def random_program(choose: Choose[Any], steps: int = 6, mutation: bool = True) -> Program:
    """A program of up to `steps` operators on one to three inputs, valid in eager execution."""
    sizes = [choose(SIZES) for _ in range(3)]
    shapes = [_operand_shape(choose, sizes) for _ in range(choose((1, 2, 3)))]
    program = Program(shapes)
    values: dict[str, Tensor] = {f"v{i}": x for i, x in enumerate(program.inputs())}
    made: list[str] = []
    for _ in range(steps):
        line, name = _step(choose, values, mutation)
        scope = {"torch": torch, **values}
        try:
            exec(line, scope)  # noqa: S102
        except (RuntimeError, IndexError, ValueError):
            continue
        if not name:
            program.lines.append(line)
            continue
        value = scope[name]
        if 0 < value.numel() <= MAX_ELEMENTS and value.ndim <= 5 and bool(value.isfinite().all()):
            program.lines.append(line)
            values[name] = value
            made.append(name)
    program.outputs = [n for n in made if n == made[-1] or choose((True, False))] or ["v0 + 1"]
    return program


def _operand_shape(choose: Choose[Any], sizes: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts with the others of the program."""
    own = [n if choose((True, True, False)) else 1 for n in sizes]
    return tuple(own[choose((0, 0, 1, 2)) :])


def _step(choose: Choose[Any], values: dict[str, Tensor], mutation: bool) -> tuple[str, str]:
    """One line of the program, and the name it defines (none for a mutation)."""
    name = f"v{len(values)}"
    a = choose(list(values)[-4:])
    kinds = ["unary", "unary", "binary", "binary", "binary", "reduce", "reduce", "along", "along",
             "shaped", "reshape"]  # fmt: skip
    kind = choose([*kinds, "mutate"] if mutation else kinds)
    rank = values[a].ndim
    if kind == "binary":
        return f"{name} = {choose(BINARY).format(a, choose(list(values)))}", name
    if kind == "reduce" and rank:
        axes = choose([(rank - 1,), (0,), tuple(range(rank)), (0, rank - 1)])
        keep = choose((", keepdim=True", ", keepdim=True", ""))
        text = choose(REDUCTIONS).format(
            a, d=f"({', '.join(map(str, dict.fromkeys(axes)))},)", k=keep
        )
        return f"{name} = {text}", name
    if kind == "along" and rank:
        return f"{name} = {choose(CROSS_ROW).format(a, d=choose(range(rank)))}", name
    if kind == "shaped":
        if rank > 1 and choose((True, False)):
            order = list(range(rank))
            order = order[1:] + order[:1] if choose((True, False)) else order[::-1]
            return f"{name} = {a}.permute({', '.join(map(str, order))})", name
        return f"{name} = {choose(SHAPED).format(a)}", name
    if kind == "reshape":
        return f"{name} = {a}.reshape({_reshape(choose, values[a].numel())})", name
    if kind == "mutate":
        return choose(IN_PLACE).format(a), ""
    return f"{name} = {choose(UNARY).format(a)}", name


def _reshape(choose: Choose[Any], count: int) -> str:
    first = choose([n for n in (1, 2, 3, 4, 6, 8, 12, count) if n <= count and count % n == 0])
    rest = count // first
    second = choose([n for n in (1, 2, 3, 4, rest) if n <= rest and rest % n == 0])
    shape = [first, second, rest // second]
    assert math.prod(shape) == count
    return ", ".join(map(str, shape))


def mismatches(program: Program, compiled: Callable[..., Any], **kinds: Any) -> list[str]:
    """Outputs, mutated inputs and gradients of `compiled` that differ from eager's."""
    wants_grad = kinds.get("grad", False)
    results = []
    for run in (compiled, program.function()):
        inputs = [x.requires_grad_(wants_grad) for x in program.inputs()]
        mine = [x.clone() for x in inputs] if wants_grad else inputs
        outputs = run(*mine)
        values = [*outputs, *mine]
        if wants_grad:
            total = sum((o.sin().sum() for o in outputs if o.requires_grad), torch.zeros(()))
            values += [
                torch.zeros(1) if g is None else g
                for g in (
                    torch.autograd.grad(total, inputs, allow_unused=True)
                    if total.requires_grad else [None] * len(inputs)
                )
            ]  # fmt: skip
        results.append([v.detach() for v in values])
    problems = []
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            problems.append(f"value {i}: {got.dtype}{list(got.shape)}, eager has "
                            f"{want.dtype}{list(want.shape)}")  # fmt: skip
        elif not torch.allclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True):
            problems.append(f"value {i}: off by {(got - want).abs().max():.3g}")
    return problems
