"""What `on_compile_error` decides: a failure of the compiler is raised, or eager code runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from dicp.config import Config
from dicp.errors import FallbackWarning, UnsupportedOperatorError
from dicp.rule_errors import failure_of
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
        failure = failure_of(target, error)
        if config.on_compile_error == "raise":
            if failure is None:
                raise
            raise failure from error
        message = f"running eagerly: {failure or str(error) or type(error).__name__}"
        warnings.warn(FallbackWarning(message), stacklevel=2)
    return eagerly()
