"""What operator tests are written with: cases, the fp64 rule, the backend under test."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dicp.compare import Rule, assert_matches, check_tensor
    from dicp.testing.backends import BackendUnderTest
    from dicp.testing.cases import ALL_LAYOUTS, FLOATS, INTS, LAYOUTS, Op, created_on, op
    from dicp.testing.inputs import T, index

__all__ = [
    "ALL_LAYOUTS",
    "FLOATS",
    "INTS",
    "LAYOUTS",
    "BackendUnderTest",
    "Op",
    "Rule",
    "T",
    "assert_matches",
    "check_tensor",
    "created_on",
    "index",
    "op",
]
_MODULES = ("compare", "testing.backends", "testing.inputs", "testing.cases")


def __getattr__(name: str) -> Any:
    """The names above are imported when one is asked for: `fixtures` alone needs no PyTorch, which
    the process that distributes tests to others would import before it starts them."""
    for module in _MODULES if name in __all__ else ():
        found = vars(import_module(f"dicp.{module}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
