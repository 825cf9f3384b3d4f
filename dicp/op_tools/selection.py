"""Which operators a tool looks at: OP_<TOOL>_LIST, OP_<TOOL>_DISABLE_LIST or arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from dicp.config import tool_variable
from dicp.errors import ToolVariableError
from dicp.op_tools.names import names_of

_EXPECTED = "names or regular expressions of operators, separated by commas"


def is_selected(
    tool: str, name: str, ops: Sequence[str] | None = None, exclude: Sequence[str] | None = None
) -> bool:
    """Whether the tool looks at the operator; what disables wins, and arguments beat variables.

    Raises ToolVariableError for a text that is no regular expression.
    """
    wanted = f"OP_{tool}_LIST"
    unwanted = f"OP_{tool}_DISABLE_LIST"
    if exclude is None:
        if _matches(unwanted, tool_variable(unwanted), name):
            return False
    elif _any_matches("exclude", tuple(exclude), name):
        return False
    if ops is not None:
        return _any_matches("ops", tuple(ops), name)
    return _matches(wanted, tool_variable(wanted) or ".*", name)


def unmatched_names(tool: str, ops: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """The plain names in the tool's list, or in `ops`, that match none of `names`."""
    variable = f"OP_{tool}_LIST"
    chosen = (entries(tool_variable(variable)) or ()) if ops is None else ops
    plain = [entry for entry in chosen if re.fullmatch(r"[\w.]+", entry)]
    return [e for e in plain if not any(_any_matches(variable, (e,), name) for name in names)]


def entries(given: str | Iterable[str] | None, argument: str = "ops") -> tuple[str, ...] | None:
    """The entries of a list, or of a text in which commas separate them.

    Raises ToolVariableError, with the name of the argument, for what is neither.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return tuple(entry.strip() for entry in given.split(","))
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(entry, str) for entry in found):
        raise ToolVariableError(argument, str(given), _EXPECTED)
    return found


@lru_cache(maxsize=1 << 16)
def _matches(variable: str, text: str, name: str) -> bool:
    return _any_matches(variable, entries(text) or (), name)


@lru_cache(maxsize=1 << 16)
def _any_matches(variable: str, chosen: tuple[str, ...], name: str) -> bool:
    return any(
        _one_matches(variable, entry, each) for entry in chosen if entry for each in names_of(name)
    )


def _one_matches(variable: str, entry: str, name: str) -> bool:
    if entry == name:
        return True
    try:
        return re.fullmatch(entry, name) is not None
    except re.error as error:
        raise ToolVariableError(variable, entry, f"{_EXPECTED} ({error})") from None
