"""What `on_compile_error` decides: a failure of the compiler is raised, or eager code runs."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TypeVar

from dicp.config import Config
from dicp.errors import DicpError, FallbackWarning, TargetFailureError, UnsupportedOperatorError
from dicp.rule_errors import worded
from dicp.target import Target
from dicp.torch_private import TorchDynamoException

T = TypeVar("T")


def attempt(target: Target, config: Config, work: Callable[[], T], eagerly: Callable[[], T]) -> T:
    """The result of `work`; where that fails and `config` asks for it, a warning and `eagerly`.

    Raises UnsupportedOperatorError (the user forbids eager operators) and what Dynamo raises to
    trace again, in either case, and TargetFailureError in place of what a function of the target's
    own raises.
    """
    try:
        return work()
    except (TorchDynamoException, UnsupportedOperatorError):
        raise
    except Exception as error:
        failure = None if isinstance(error, DicpError) else _failure_of(target, error)
        if config.on_compile_error == "raise":
            if failure is None:
                raise
            raise failure from error
        message = f"running eagerly: {failure or str(error) or type(error).__name__}"
        warnings.warn(FallbackWarning(message), stacklevel=2)
    return eagerly()


def _failure_of(target: Target, error: Exception) -> TargetFailureError | None:
    """The error that names the target's function which raised `error`, or cannot be called."""
    places = list(_own_calls(target, error))
    if not places:
        return None
    return TargetFailureError(target.name, places[0][0], f"raises {worded(error)}", places[-1][1])


def _own_calls(target: Target, error: Exception) -> Iterator[tuple[str, str]]:
    """Functions of the target's package that ran or could not be called, each with its line."""
    module = type(target).__module__
    inside, _, _ = module.rpartition(".") if module.startswith("dicp.") else module.partition(".")
    for frame, line in traceback.walk_tb(error.__traceback__):
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{inside}."):
            yield frame.f_code.co_name, f"{frame.f_code.co_filename}:{line}"
    name = str(error).partition("(")[0].rpartition(".")[2]
    hook = getattr(type(target), name, None) if isinstance(error, TypeError) else None
    if isinstance(hook, FunctionType) and f"{hook.__module__}.".startswith(f"{inside}."):
        yield name, f"{hook.__code__.co_filename}:{hook.__code__.co_firstlineno}"
