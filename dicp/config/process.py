"""The process environment, read and set for others than `Config`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "environment", "environment_with", "is_set", "misspelled_tool_variables", "tool_variable",
    "tools_environment", "vendor_variable",
]  # fmt: skip


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set `variables` in the process environment, for a library that reads it when imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment_with(**variables: str) -> dict[str, str]:
    """The environment for a child process: this one's, changed by `variables`."""
    return {**_current(), **variables}


def tools_environment() -> dict[str, str]:
    """The environment for a compiler: this one's, with the system's PATH where it has none."""
    return {"PATH": os.defpath, **_current()}


def _current() -> dict[str, str]:
    """A copy of the environment; compilers start in threads, and another may remove a variable."""
    values = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in values.items() if value is not None}


def is_set(variable: str) -> bool:
    """Whether an environment variable has a value."""
    return bool(os.environ.get(variable))


def vendor_variable(name: str) -> str:
    """An environment variable that a vendor's own tools define, such as its toolkit's location."""
    return os.environ.get(name, "")


_TOOLS = "CAPTURE AUTOCOMPARE TIME_MEASURE FALLBACK DTYPE_CAST OBSERVE OVERFLOW_CHECK".split()
_OF_ALL_TOOLS = ("OP_TOOLS_MAX_CACHE_SIZE", "OP_TOOLS_PRINT_STACK")


def tool_variable(name: str) -> str:
    """A variable of the operator tools, such as OP_CAPTURE_LIST, as it is set now.

    Programs change these between two runs of one process, so they are read at every call.
    """
    return os.environ.get(name, "")


def misspelled_tool_variables() -> dict[str, str]:
    """Variables that are set and spelled almost as the operator tools', each with that one."""
    kinds = [f"OP_{tool}_{kind}" for tool in _TOOLS for kind in ("LIST", "DISABLE_LIST")]
    tolerance = "AUTOCOMPARE_ERROR_TOLERANCE"
    dtypes = (f"{tolerance}_{dtype}" for dtype in ("FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64"))
    known = [*kinds, tolerance, *dtypes, "OP_DTYPE_CAST_DICT", *_OF_ALL_TOOLS]
    unknown = (n for n in os.environ if n.startswith(("OP_", "AUTOCOMPARE_")) and n not in known)
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.9) for name in unknown}
    return {name: found[0] for name, found in near.items() if found}


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
