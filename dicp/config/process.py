"""The process environment, read and set for others than `Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "environment", "environment_with", "is_set", "tool_variable", "tools_environment",
    "vendor_variable",
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
    return {**os.environ, **variables}


def tools_environment() -> dict[str, str]:
    """The environment for a compiler: this one's, with the system's PATH where it has none."""
    return {"PATH": os.defpath, **os.environ}


def is_set(variable: str) -> bool:
    """Whether an environment variable has a value."""
    return bool(os.environ.get(variable))


def vendor_variable(name: str) -> str:
    """An environment variable that a vendor's own tools define, such as its toolkit's location."""
    return os.environ.get(name, "")


def tool_variable(name: str) -> str:
    """A variable of the operator tools, such as OP_CAPTURE_LIST, as it is set now.

    Programs change these between two runs of one process, so they are read at every call.
    """
    return os.environ.get(name, "")


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
