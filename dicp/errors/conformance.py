"""Errors of the adaptation table and of the checks of a device."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.errors.base import DicpError
from dicp.errors.text import did_you_mean, nearest

__all__ = ["FamilyNameError", "FamilyPackageError"]


class FamilyNameError(DicpError):
    """A name that no family of models has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = nearest(name, known)
        super().__init__(
            f"no family of models is called {name!r}.{did_you_mean(self.nearest)} "
            f"Families: {', '.join(known)}."
        )


class FamilyPackageError(DicpError):
    """A family of models whose package is not installed, or cannot be imported."""

    def __init__(self, family: str, package: str, problem: str) -> None:
        self.family = family
        self.package = package
        super().__init__(
            f"{family} is built by {package}: {problem}. Install it: pip install {package}"
        )
