"""The functions of PyTorch's operator database by their names. Importing it takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dicp.conformance.torch_tests.op_tests import full_name
from dicp.errors import CaseError
from dicp.torch_private import leave_seeds_to_the_caller, op_db

INPLACE = "inplace:"
"""How the name of an operator's variant begins that writes its input."""


@cache
def database() -> dict[str, Any]:
    """The operators by their full names."""
    leave_seeds_to_the_caller()
    found: dict[str, Any] = {}
    for op in op_db:
        found.setdefault(full_name(op), op)
    return found


def database_function(name: str) -> Callable[..., Any]:
    """The function of an operator, or of its variant that writes its input."""
    op = database().get(name.removeprefix(INPLACE))
    found = op and (op.get_inplace() if name.startswith(INPLACE) else op)
    if found is None:
        raise CaseError(name, "operator", database())
    return found  # type: ignore[no-any-return]
