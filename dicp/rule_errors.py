"""Errors of a target's own code: an exception that a rule or a run raises, results of a rule that
are not eager's, and results of other functions that are not what they must be."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

from dicp.errors import (
    DicpError,
    DicpWarning,
    PrototypeError,
    RuleError,
    RunFailureError,
    SemanticsError,
    TargetFailureError,
)
from dicp.origin import Origin, call_of
from dicp.rules import NoRule, RuleEntry
from dicp.torch_private import is_tracing_error

T = TypeVar("T")


class InvalidResult(Exception):
    """What a rule returns is not what eager gives; `naming_rule` makes a RuleError of it.
    `meaning`: the meaning of the graph operator that made the result."""

    def __init__(self, result: Any, fake: Any, meaning: str = "") -> None:
        self.meaning = meaning
        given, wanted = described(result), described(fake)
        given = f"a {type(result).__name__}, no Value," if given == wanted else given
        super().__init__(f"returns {given} where eager gives {wanted}")


def paired_results(node: fx.Node, result: Any) -> list[tuple[Any, torch.Tensor]]:
    """The results of a rule, paired with the node's tensors.

    A result of several may be None. Raises InvalidResult for another number of results.
    """
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return [(result, val)] if isinstance(val, torch.Tensor) else []
    if not isinstance(result, (tuple, list)) or len(result) != len(val):
        raise InvalidResult(result, val)
    pairs = zip(result, val, strict=True)
    return [(r, v) for r, v in pairs if isinstance(v, torch.Tensor) and r is not None]


def described(value: Any) -> str:
    """`float32[2, 3]` for what has a dtype and sizes, else the type."""
    if isinstance(value, (tuple, list)):
        return f"{len(value)} results"
    if not hasattr(value, "dtype"):
        return "None" if value is None else type(value).__name__
    return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")


@contextmanager
def _naming(named: Callable[[Exception], DicpError | None]) -> Iterator[None]:
    """Raises the error that `named` makes of one; for None that one passes as it is."""
    try:
        yield
    except Exception as error:
        found = named(error)
        if found is None:
            raise
        raise found from error


def naming_rule(
    node: fx.Node, target: str, entry: RuleEntry | None
) -> AbstractContextManager[None]:
    """Raises RuleError, which names the call, for what a target's rule for `node` raises, for
    operators that it misuses and for results that are not eager's.

    Other errors of dicp's, errors of tracing, and NoRule, pass as they are.
    """

    def named(error: Exception) -> DicpError | None:
        problem = _problem(error)
        if problem is None:
            return None
        place = "" if entry is None else failing_line(entry.function, error)
        culprits = _culprits(f"the rule at {place}" if place else "the rule", error)
        return RuleError(
            **call_of(node), target=target, problem=problem, place=place, culprits=culprits
        )

    return _naming(named)


def naming_semantics(operator: str, function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Raises SemanticsError for what the meaning of a graph operator raises; what `naming_rule`
    lets pass, passes here too."""

    def named(error: Exception) -> DicpError | None:
        problem = _problem(error)
        if problem is None:
            return None
        return SemanticsError(operator, problem, failing_line(function, error))

    return _naming(named)


def _problem(error: Exception) -> str | None:
    """What a rule did wrong, in words; None for an error that passes as it is."""
    match error:
        case InvalidResult():
            return str(error)
        case PrototypeError():
            return f"misuses the graph operator {error.operator}: {error.detail}"
        case SemanticsError():
            return f"makes the graph operator {error.operator}, whose meaning {error.problem}"
        case DicpError() | DicpWarning() | NoRule():
            return None
    return None if is_tracing_error(error) else f"raises {worded(error)}"


def _culprits(rule: str, error: Exception) -> str:
    """What may be at fault: the rule, or the graph operator that it makes."""
    match error:
        case PrototypeError():
            return f"{rule}, or the prototype of {error.operator}"
        case SemanticsError():
            return f"{error.culprit}, or {rule}"
        case InvalidResult() if error.meaning:
            return f"{rule}, or {error.meaning}"
    return rule


def worded(error: Exception) -> str:
    """`KeyError: 'x'`, for the middle of a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(" .:")


def failing_line(function: Callable[..., Any], error: Exception) -> str:
    """The last line of a function's file where `error` passed, else where the function is."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    passed = code and _last_line(error, lambda frame: frame.f_code.co_filename == code.co_filename)
    return passed or definition_of(function)


def definition_of(function: Callable[..., Any]) -> str:
    """Where a function is defined; empty if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def line_in(error: Exception, package: str) -> str:
    """The last line of a package where `error` passed, or that Python cannot parse; empty if it
    passed none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return _last_line(
        error, lambda frame: f"{frame.f_globals.get('__name__')}.".startswith(f"{package}.")
    )


def _last_line(error: Exception, wanted: Callable[[FrameType], bool]) -> str:
    passed = [place for place in traceback.walk_tb(error.__traceback__) if wanted(place[0])]
    return f"{passed[-1][0].f_code.co_filename}:{passed[-1][1]}" if passed else ""


def result_of(target: Any, hook: str, result: T, kind: Any) -> T:
    """The result of a function of a target's own; `kind`: its type, or several.

    Raises TargetFailureError for another.
    """
    if isinstance(result, kind):
        return result
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(each.__name__ for each in kinds)
    problem = f"returns {described(result)}, no {wanted}"
    raise TargetFailureError(target.name, hook, problem, definition_of(getattr(target, hook)))


def failure_of(
    target: Any, error: Exception, sources: Sequence[str] = ()
) -> TargetFailureError | None:
    """The error that names the target's function which raised `error`, or cannot be called; None
    for errors and warnings of dicp's, and where no function of the target's took part."""
    places = [] if isinstance(error, (DicpError, DicpWarning)) else list(_own_calls(target, error))
    if not places:
        return None
    hook, place = places[0][0], places[-1][1]
    return TargetFailureError(target.name, hook, f"raises {worded(error)}", place, sources)


def _own_calls(target: Any, error: Exception) -> Iterator[tuple[str, str]]:
    """Functions of the target's package that ran or could not be called, and skeletons beside its
    module, each with its line."""
    module = type(target).__module__
    inside, _, _ = module.rpartition(".") if module.startswith("dicp.") else module.partition(".")
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        own = f"{frame.f_globals.get('__name__')}.".startswith(f"{inside}.")
        if own or _is_skeleton(file, module):
            yield frame.f_code.co_name, f"{file}:{line}"
    name = str(error).partition("(")[0].rpartition(".")[2]
    hook = getattr(type(target), name, None) if isinstance(error, TypeError) else None
    if isinstance(hook, FunctionType) and f"{hook.__module__}.".startswith(f"{inside}."):
        yield name, f"{hook.__code__.co_filename}:{hook.__code__.co_firstlineno}"


def _is_skeleton(file: str, module: str) -> bool:
    """Whether a file is a skeleton beside the source of a module; a notebook has no source."""
    source = getattr(sys.modules.get(module), "__file__", None)
    beside = source is not None and Path(file).is_relative_to(Path(source).parent)
    return beside and file.endswith(".jinja")


def naming_operators(target: Any, origins: Sequence[Origin]) -> AbstractContextManager[None]:
    """Raises TargetFailureError, which lists the operators, for what a function of a target's own
    raises that works on a kernel or graph of theirs; dicp's errors pass as they are."""
    return _naming(lambda error: failure_of(target, error, list(map(str, origins))))


def refusal(
    function: Callable[..., Any], positional: Iterable[str], named: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> str:  # fmt: skip
    """Why a function does not take these arguments, and those `optional` ones that it names; empty
    where it does, and where Python does not know: PyTorch's own functions have no signature."""
    try:
        signature = inspect.signature(function)
        stated = (*named, *(name for name in optional if name in signature.parameters))
        signature.bind(*positional, **dict.fromkeys(stated))
    except TypeError as error:
        return str(error)
    except ValueError:
        return ""
    return ""


def raise_run_failure(
    error: Exception, function: Callable[..., Any], target: str, what: str,
    sources: Sequence[str] = (),
) -> NoReturn:  # fmt: skip
    """Raises RunFailureError for what a target's function raised as it ran `what`.

    Errors of dicp's and of memory pass as they are. `sources`: the operators that `what` computes.
    """
    if isinstance(error, (DicpError, MemoryError, torch.OutOfMemoryError)):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    below = [f"{frame.filename}:{frame.lineno}" for frame in frames[1:2]]  # of what caught it
    place = below[0] if below else definition_of(getattr(function, "func", function))
    raise RunFailureError(target, what, worded(error), place, sources) from error
