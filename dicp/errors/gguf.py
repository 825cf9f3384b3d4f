"""Case files of GGUF, and packages that only some commands need."""

from __future__ import annotations

from pathlib import Path

from dicp.errors.base import DicpError
from dicp.errors.text import sentence

__all__ = ["GgufFileError", "MissingPackageError"]


class GgufFileError(DicpError):
    """A case file that cannot be read or written; `case`: the number of the case, if it is one."""

    def __init__(self, path: Path, problem: str, case: int | None = None) -> None:
        self.path = path
        self.problem = problem
        self.case = case
        where = "" if case is None else f"case {case}: "
        super().__init__(
            f"{path}: {where}{sentence(problem)} "
            "`python -m dicp.conformance gguf write OPERATOR -o FILE` writes a case file."
        )


class MissingPackageError(DicpError):
    """A package that is not installed; `extra`: dicp's extra that brings it."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        self.package = package
        super().__init__(
            f"{purpose} need the package {package!r}, which is not installed: "
            f"pip install {package}, or pip install 'dicp[{extra}]'."
        )
