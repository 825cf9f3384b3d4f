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


def rivals(name: str) -> list[str]:
    """The packages that register different targets under one name; empty where one does."""
    points = {p.value: p for p in entry_points(group=TARGET_GROUP) if p.name == name}
    packages = [f"{p.dist.name} {p.dist.version}" if p.dist else "?" for p in points.values()]
    found = [f"{package} ({value})" for package, value in zip(packages, points, strict=True)]
    return found if len(found) > 1 else []


def target_name(backend: str) -> str:
    """The installed target that a target's or a backend's name ("xgraph" for "x") stands for.

    Raises TargetNotFoundError.
    """
    known = sorted(discover())
    for name in (backend, backend.removesuffix(SUFFIX)):
        if name in known:
            return name
    raise TargetNotFoundError(backend, known)
