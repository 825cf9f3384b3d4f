"""From a graph to code."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal

from dicp.errors.base import DicpError
from dicp.errors.text import (
    at,
    compiled_from,
    first_errors,
    indented,
    meaning_at,
    operands,
    sentence,
)

__all__ = [
    "CompilerError", "GraphRejectedError", "InferenceMismatchError", "PrototypeError", "RuleError",
    "SemanticsError", "TargetFailureError", "UnsupportedOperatorError",
]  # fmt: skip


class CompilerError(DicpError):
    """The target's compiler refused generated source. `diagnostics` holds its whole output."""

    def __init__(
        self,
        target: str,
        command: Sequence[str],
        diagnostics: str,
        kernel_sources: Sequence[str] = (),
    ) -> None:
        self.target = target
        self.command = tuple(command)
        self.diagnostics = diagnostics
        self.kernel_sources = tuple(kernel_sources)
        lines = [f"target {target!r}: the compiler failed on generated code."]
        lines += ["command:", *indented(shlex.join(self.command))]
        lines += ["first errors:", *indented(first_errors(diagnostics))]
        lines += compiled_from(self.kernel_sources)
        lines.append(
            "Set dump=<folder> (DICP_DUMP) to keep the source, check the compiler with "
            "`python -m dicp doctor`, or set on_compile_error='eager' to run uncompiled."
        )
        super().__init__("\n".join(lines))


class _CallError(DicpError):
    """A target cannot compile one call of an operator, because of `problem`."""

    def __init__(
        self,
        op: str,
        dtypes: Sequence[object],
        shapes: Sequence[object],
        target: str,
        user_line: str,
        problem: str,
    ) -> None:
        self.op = op
        self.dtypes = tuple(dtypes)
        self.shapes = tuple(shapes)
        self.target = target
        self.user_line = user_line
        self.problem = problem
        super().__init__(f"target {target!r}{self._message(f'{op}({operands(dtypes, shapes)})')}")

    def _message(self, call: str) -> str:
        raise NotImplementedError


class RuleError(_CallError):
    """A target's rule for an operator raised an exception, or returned an invalid result.
    `place` is the rule's line, `culprits` what may be at fault if not the rule alone."""

    def __init__(self, *call: Any, place: str = "", culprits: str = "", **named: Any) -> None:
        self.place = place
        self.culprits = culprits or (f"the rule at {place}" if place else "the rule")
        super().__init__(*call, **named)

    def _message(self, call: str) -> str:
        return (
            f": the rule for {call} {self.problem}.{at(self.user_line)} Fix {self.culprits}, or "
            f"report it; until then eager_ops={self.op!r} (DICP_EAGER_OPS) runs the operator "
            "eagerly."
        )


class TargetFailureError(DicpError):
    """A function of a target's own raised an exception, the cause of this error, or returned what
    it must not. `sources` are the operators that it was to compile, where they are known."""

    def __init__(
        self, target: str, hook: str, problem: str, place: str, sources: Sequence[str] = ()
    ) -> None:
        self.target = target
        self.hook = hook
        self.problem = problem
        self.place = place
        said = f"target {target!r}: {hook} {problem}, at {place}."
        advice = (
            "Fix the target there, or report it; until then on_compile_error='eager' "
            "(DICP_ON_COMPILE_ERROR) runs the model eagerly."
        )
        lines = compiled_from(sources)
        super().__init__("\n".join([said, *lines, advice]) if lines else f"{said} {advice}")


class UnsupportedOperatorError(_CallError):
    """An operator would run eagerly although fallback='error' or native_ops forbids it."""

    def __init__(
        self, *call: Any, forbidden_by: Literal["fallback", "native_ops"] = "fallback", **named: Any
    ) -> None:
        self.forbidden_by = forbidden_by
        super().__init__(*call, **named)

    def _message(self, call: str) -> str:
        forbids, advice = {
            "fallback": ("fallback='error'", "set fallback='auto' (DICP_FALLBACK)"),
            "native_ops": ("native_ops", "take the operator out of native_ops (DICP_NATIVE_OPS)"),
        }[self.forbidden_by]
        return (
            f" does not compile {call}: {self.problem}.{at(self.user_line)} "
            f"{forbids} forbids running it eagerly; {advice}, or rewrite the line."
        )


class InferenceMismatchError(DicpError):
    """The target infers another value of a node than PyTorch's inference: a defect in dicp."""

    def __init__(self, node: str, field: str, expected: object, got: object) -> None:
        self.node = node
        self.field = field
        self.expected = expected
        self.got = got
        super().__init__(
            f"{node}: the target infers {field} {got}, PyTorch infers {expected}. This is a "
            "defect of the conversion, not of the model: please report it with the graph that "
            "dump=<folder> (DICP_DUMP) writes."
        )


class PrototypeError(DicpError):
    """A graph operator is used in a way that violates its prototype: a defect in dicp."""

    def __init__(self, operator: str, detail: str, where: str = "") -> None:
        self.operator = operator
        self.detail = detail
        self.where = where
        super().__init__(
            f"graph operator {operator}: {detail}.{at(where)} This is a defect of the conversion, "
            "not of the model: please report it with the graph that dump=<folder> (DICP_DUMP) "
            "writes; on_compile_error='eager' runs the model uncompiled meanwhile."
        )


class SemanticsError(DicpError):
    """The meaning of a target's graph operator (its row of `Semantics`) raised an exception, the
    cause of this error, or returned other results than its prototype has. `place` is its line."""

    def __init__(self, operator: str, problem: str, place: str) -> None:
        self.operator = operator
        self.problem = problem
        self.place = place
        self.culprit = meaning_at(operator, place)
        super().__init__(
            f"graph operator {operator}: its meaning {problem}. Fix {self.culprit} or the "
            "operator's prototype, or report it; until then on_compile_error='eager' "
            "(DICP_ON_COMPILE_ERROR) runs the model eagerly."
        )


class GraphRejectedError(DicpError):
    """The vendor's graph compiler refused a graph. `message` holds its own words, `call` the
    operator with its arguments."""

    def __init__(
        self,
        target: str,
        message: str,
        operator: str = "",
        aten: str = "",
        user_line: str = "",
        node: str = "",
        call: str = "",
    ) -> None:
        self.target = target
        self.message = message
        self.operator = operator
        self.node = node
        self.aten = aten
        self.user_line = user_line
        self.call = call
        named = f" operator {operator}" if operator else " the graph"
        made = f", made from {aten}" if aten else ""
        made += f": {call}" if call else ""
        super().__init__(
            f"target {target!r}: the graph compiler refused{named}{made}.{at(user_line)} "
            f"It says: {sentence(message)} Set rejected='eager' (DICP_REJECTED) to run such "
            "operators eagerly, or dump=<folder> (DICP_DUMP) to keep the source."
        )
