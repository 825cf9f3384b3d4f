"""Errors of a target's own code: an exception that a rule or a run raises, and results of a rule
that are not eager's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx

from dicp.errors import DicpError, RuleError, RunFailureError
from dicp.origin import call_of
from dicp.rules import NoRule
from dicp.torch_private import is_tracing_error


def rule_error(node: fx.Node, target: str, problem: str) -> RuleError:
    """The error for a rule that has `problem` with a node."""
    return RuleError(**call_of(node), target=target, problem=problem)


def paired_results(node: fx.Node, result: Any, target: str) -> list[tuple[Any, torch.Tensor]]:
    """The results of a rule, paired with the node's tensors.

    A result of several may be None. Raises RuleError for another number of results.
    """
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return [(result, val)] if isinstance(val, torch.Tensor) else []
    if not isinstance(result, (tuple, list)) or len(result) != len(val):
        raise rule_error(node, target, f"returns {described(result)} for {len(val)} results")
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
def naming_rule(node: fx.Node, target: str) -> Iterator[None]:
    """Raises RuleError, which names the call, for what a target's rule for `node` raises.

    Errors of dicp's and of tracing, and NoRule, pass as they are.
    """
    try:
        yield
    except (DicpError, NoRule):
        raise
    except Exception as error:
        if is_tracing_error(error):
            raise
        problem = f"raises {type(error).__name__}: {error}".rstrip(" .:")
        raise rule_error(node, target, problem) from error


def raise_run_failure(
    error: Exception, target: str, what: str, sources: Sequence[str] = ()
) -> NoReturn:
    """Raises RunFailureError for what a target's run of `what` raised.

    Errors of dicp's and of memory pass as they are. `sources`: the operators that `what` computes.
    """
    if isinstance(error, (DicpError, MemoryError, torch.OutOfMemoryError)):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    called = frames[min(1, len(frames) - 1)]  # below the frame that caught it: the target's
    problem = f"{type(error).__name__}: {error}".rstrip(" .:")
    place = f"{called.filename}:{called.lineno}"
    raise RunFailureError(target, what, problem, place, sources) from error
