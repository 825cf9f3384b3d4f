"""Case files in the form of public InfiniCore's `infiniop-test`: an operator's cases with answers.

Metadata of a file: `general.architecture` ("infiniop-test") and `test_count`; of case i:

    test.<i>.op_name            the operator
    test.<i>.<tensor>.shape     of outputs, and of tensors that have a stride of 0
    test.<i>.<tensor>.strides   the last dimension first; absent: contiguous
    test.<i>.<scalar>           float32, int64 or bool
    test.<i>.over               the operand that the result is written into; absent: none

Tensors are `test.<i>.<name>`: operands, of dimensions with stride 0 one element; outputs, which are
empty; and in float64 the answer `test.<i>.ans`, or `test.<i>.ans_<output>` of several outputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dicp.compare import significant_strides
from dicp.conformance.per_operator import gguf_format
from dicp.conformance.per_operator.cases import Case, Operand, Operator
from dicp.conformance.per_operator.runs import TOLERANCES, Outcome, Run, compared
from dicp.conformance.per_operator.table import BY_FORMULA, OPERATORS
from dicp.errors import GgufFileError
from dicp.errors.text import nearest
from dicp.torch_private import pytree

ARCHITECTURE = "infiniop-test"


def operator_called(name: str) -> Operator:
    """An operator; backward ones by formula where there is one. Raises LookupError."""
    known = OPERATORS | BY_FORMULA
    if name not in known:
        near = nearest(name, list(known))
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        raise LookupError(f"unknown operator {name!r}; {hint}")
    return known[name]


def answer_name(output: str, outputs: Sequence[str]) -> str:
    return "ans" if len(outputs) == 1 else f"ans_{output}"


def write_cases(path: Path, name: str, dtype: torch.dtype) -> int:
    """Write an operator's cases with random operands; how many. Raises GgufFileError."""
    operator = operator_called(name)
    writer = gguf_format.package().GGUFWriter(None, ARCHITECTURE)
    writer.add_uint64("test_count", len(operator.cases))
    for number, case in enumerate(operator.cases):
        scalars = {k: _as_stored(v) for k, v in (operator.scalars | dict(case.keywords)).items()}
        run = Run(operator, replace(case, keywords=scalars), dtype)
        _CaseWriter(writer, f"test.{number}.").write(name, run)
    gguf_format.write(writer, path)
    return len(operator.cases)


def _as_stored(scalar: Any) -> Any:
    return torch.tensor(scalar, dtype=torch.float32).item() if type(scalar) is float else scalar


@dataclass(frozen=True)
class _CaseWriter:
    writer: Any
    prefix: str

    def write(self, name: str, run: Run) -> None:
        torch.manual_seed(0)
        operator, case, inputs = run.operator, run.case, run.inputs()
        names, outputs = operator.operand_names, operator.output_names
        self.writer.add_string(f"{self.prefix}op_name", name)
        for scalar, value in case.keywords.items():
            kind = {float: "float32", int: "int64", bool: "bool"}[type(value)]
            getattr(self.writer, f"add_{kind}")(self.prefix + scalar, value)
        if case.over is not None:
            self.writer.add_string(f"{self.prefix}over", names[case.over])
        for operand, x in zip(names, inputs, strict=True):
            self.operand(operand, x)
        results = zip(outputs, run.eager(inputs), run.exact(inputs), strict=True)
        for output, eager, exact in results:
            self.output(output, eager)
            answer = exact if eager.dtype.is_floating_point else eager
            self.tensor(answer_name(output, outputs), answer.double())

    def operand(self, name: str, x: Tensor) -> None:
        if not x.is_contiguous():
            self.integers(f"{name}.strides", x.stride()[::-1])
        if 0 in x.stride():
            self.integers(f"{name}.shape", x.shape)
        self.tensor(name, x[tuple(slice(None if s else 1) for s in x.stride())])

    def output(self, name: str, y: Tensor) -> None:
        if y.dim():  # GGUF has no empty arrays
            self.integers(f"{name}.shape", y.shape)
            self.integers(f"{name}.strides", y.stride()[::-1])
        self.tensor(name, y.new_empty([0] * max(y.dim(), 1)))

    def integers(self, name: str, values: Sequence[int]) -> None:
        kinds = gguf_format.package().GGUFValueType
        kind = kinds.INT32 if max(values) < 2**31 else kinds.INT64
        self.writer.add_key_value(self.prefix + name, list(values), kinds.ARRAY, kind)

    def tensor(self, name: str, x: Tensor) -> None:
        gguf_format.add_tensor(self.writer, self.prefix + name, x)


@dataclass(frozen=True)
class FileCase:
    """A case of a file: its operands and answers, and the strides that its results have."""

    path: Path
    number: int
    name: str
    run: Run
    inputs: Sequence[Tensor]
    answers: Sequence[Tensor]
    strides: Sequence[tuple[int, ...]]

    def on(self, device: str) -> FileCase:
        run = replace(self.run, device=device)
        return replace(self, run=run, inputs=[x.to(device) for x in self.inputs])

    def expected(self) -> list[Tensor]:
        """Eager's results; the answers where those are no floating-point numbers.

        Raises GgufFileError if eager cannot compute the case, or to another shape.
        """
        try:
            eager = self.run.eager(self.inputs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            problem = f"eager does not take its operands: {str(error).splitlines()[0]}"
            raise GgufFileError(self.path, problem, self.number) from error
        shapes = [[tuple(x.shape) for x in several] for several in (eager, self.answers)]
        if shapes[0] != shapes[1]:
            problem = f"its answers are {shapes[1]}, eager's results {shapes[0]}"
            raise GgufFileError(self.path, problem, self.number)
        pairs = zip(eager, self.answers, strict=True)
        return [e if e.dtype.is_floating_point else a.to(e) for e, a in pairs]

    def placed(self, expected: Sequence[Tensor]) -> FileCase:
        """The case whose function writes its results with the file's strides."""
        operator = self.run.operator
        own = [x.stride() for x in expected]
        if operator.gradients or own == list(self.strides):
            return self

        def fn(*operands: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
            results = pytree.tree_leaves(operator.fn(*operands, **keywords))
            return tuple(
                torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)
                for y, strides in zip(results, self.strides, strict=True)
            )

        return replace(self, run=replace(self.run, operator=replace(operator, fn=fn)))

    def check(self, compiled: Callable[..., Any], expected: Sequence[Tensor]) -> Outcome:
        operator = self.run.operator
        got = operator.results(compiled, self.run.case, self.inputs)
        outcome = compared(got, expected, self.answers, TOLERANCES[self.run.dtype])
        for number, (y, strides) in enumerate(zip(got, self.strides, strict=True)):
            if outcome.trouble or operator.gradients or not y.numel():
                continue
            if significant_strides(y) != [
                s for n, s in zip(y.shape, strides, strict=True) if n > 1
            ]:
                text = f"result {number} has strides {y.stride()}, the file {strides}"
                return replace(outcome, trouble=text)
        return outcome


def read_cases(path: Path) -> list[FileCase]:
    """The cases of a file. Raises GgufFileError, which names the case."""
    contents = gguf_format.read(path)
    architecture = contents.metadata.get("general.architecture")
    count = contents.metadata.get("test_count")
    if architecture != ARCHITECTURE or not isinstance(count, int):
        problem = f"it holds no cases: its architecture is {architecture!r}, test_count {count}"
        raise GgufFileError(path, problem)
    metadata, tensors = (_by_case(held) for held in (contents.metadata, contents.tensors))
    return [_CaseReader(path, k, metadata[k], tensors[k]).case() for k in range(count)]


def _by_case(held: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in held.items():
        if match := re.fullmatch(r"test\.(\d+)\.(.+)", key):
            found[int(match[1])][match[2]] = value
    return found


@dataclass(frozen=True)
class _CaseReader:
    path: Path
    number: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def case(self) -> FileCase:
        name = self.metadata.get("op_name")
        if name is None:
            raise self.wrong("it has no op_name")
        try:
            operator = operator_called(str(name))
        except LookupError as unknown:
            raise self.wrong(str(unknown)) from None
        names, outputs = operator.operand_names, operator.output_names
        answers = [self.tensor(answer_name(output, outputs)) for output in outputs]
        inputs = [self.operand(operand) for operand in names]
        keywords = self.scalars(operator, [*names, *outputs])
        pairs = zip(outputs, answers, strict=True)
        layouts = [self.layout(output, tuple(answer.shape)) for output, answer in pairs]
        for output, (shape, _), answer in zip(outputs, layouts, answers, strict=True):
            if shape != answer.shape:
                raise self.wrong(f"output {output!r} is {shape}, its answer {tuple(answer.shape)}")
        over = self.metadata.get("over")
        if over is not None and over not in names:
            raise self.wrong(f"over is {over!r}; there are the operands {', '.join(names)}")
        operands = tuple(
            Operand(tuple(x.shape), None if x.is_contiguous() else x.stride(), x.dtype)
            for x in inputs
        )
        case = Case(operands, keywords, None if over is None else names.index(over))
        held = [*(self.tensors[output].dtype for output in outputs), *(x.dtype for x in inputs)]
        dtype = next((d for d in held if d.is_floating_point), torch.float32)
        run = Run(operator, case, dtype)
        strides = [strides for _, strides in layouts]
        return FileCase(self.path, self.number, str(name), run, inputs, answers, strides)

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise self.wrong(f"tensor {name!r} is missing")
        return self.tensors[name]

    def layout(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a tensor, `shape` if the file states none, and its strides."""
        stored = self.tensor(name)
        if f"{name}.shape" in self.metadata:
            shape = self.integers(f"{name}.shape")
        elif not stored.numel() and shape:
            raise self.wrong(f"{name}.shape is missing")
        if f"{name}.strides" not in self.metadata:
            return shape, torch.empty(shape, device="meta").stride()
        strides = self.integers(f"{name}.strides")[::-1]
        if len(strides) != len(shape) or min((*shape, *strides), default=0) < 0:
            raise self.wrong(f"tensor {name!r} has shape {shape} and strides {strides}")
        return shape, strides

    def operand(self, name: str) -> Tensor:
        stored = self.tensor(name)
        shape, strides = self.layout(name, tuple(stored.shape))
        once = tuple(n if s else min(n, 1) for n, s in zip(shape, strides, strict=True))
        if stored.numel() != prod(once):
            held = tuple(stored.shape)
            raise self.wrong(f"tensor {name!r} holds {held}, its shape {shape} needs {once}")
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
        room = torch.zeros(reach, dtype=stored.dtype)
        room.as_strided(once, strides).copy_(stored.reshape(once))
        return room.as_strided(shape, strides)

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.metadata[name]
        if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
            raise self.wrong(f"{name} is {values!r}, not an array of integers")
        return tuple(values)

    def scalars(self, operator: Operator, tensors: Sequence[str]) -> dict[str, Any]:
        known = operator.scalars
        described = {f"{name}.{what}" for name in tensors for what in ("shape", "strides")}
        given = {k: v for k, v in self.metadata.items() if k not in {"op_name", "over", *described}}
        if unknown := given.keys() - known.keys():
            held = f"{', '.join(sorted(unknown))} is nothing that the operator takes"
            raise self.wrong(f"{held}; it takes {', '.join([*tensors, *known])}")
        return given

    def wrong(self, problem: str) -> GgufFileError:
        return GgufFileError(self.path, problem, self.number)
