"""The names of installed targets and of their backends, read without PyTorch."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from dicp.config import TARGET_GROUP
from dicp.errors import TargetNotFoundError

SUFFIX = "graph"
"""The backend "xgraph" compiles for the target "x"."""


def discover() -> dict[str, EntryPoint]:
    """Targets installed on this machine, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=TARGET_GROUP)}


def target_name(backend: str) -> str:
    """The installed target that a target's or a backend's name ("xgraph" for "x") stands for.

    Raises TargetNotFoundError.
    """
    known = sorted(discover())
    for name in (backend, backend.removesuffix(SUFFIX)):
        if name in known:
            return name
    raise TargetNotFoundError(backend, known)
