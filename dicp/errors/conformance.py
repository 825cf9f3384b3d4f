"""Errors of the conformance suite: its cases, data, configuration, model families and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dicp.errors.base import DicpError
from dicp.errors.text import did_you_mean, nearest, sentence

__all__ = [
    "CaseError", "CaseFileError", "ConformanceConfigError", "FamilyNameError",
    "FamilyPackageError", "GgufFileError", "MissingPackageError", "OldDeviceConfigError",
    "RecordedScriptError", "ReferenceDataError",
]  # fmt: skip


class ConformanceConfigError(DicpError):
    """A configuration of conformance tests with an entry that has no meaning."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path = path
        self.line = line
        self.problem = problem
        super().__init__(
            f"{path}:{line}: {problem}. dicp/conformance/configuration.py shows the form."
        )


class CaseError(DicpError):
    """A text of a case that names nothing: its call, or what draws a tensor."""

    def __init__(self, text: str, what: str, known: Iterable[str]) -> None:
        self.text = text
        self.what = what
        names = list(known)
        super().__init__(
            f"unknown {what} {text!r}.{did_you_mean(nearest(text, names))} "
            f"It begins with one of: {', '.join(names)}."
        )


class CaseFileError(DicpError):
    """A case file with an entry that has no meaning; `case`: the entry's name."""

    def __init__(self, path: Path, case: str, problem: str) -> None:
        self.path = path
        self.case = case
        self.problem = problem
        where = f"case {case!r}: " if case else ""
        super().__init__(
            f"{path}: {where}{sentence(problem)} dicp/conformance/suite/files.py shows the form."
        )


class RecordedScriptError(DicpError):
    """A command that cannot be recorded."""

    def __init__(self, command: str, problem: str) -> None:
        self.command = command
        self.problem = problem
        super().__init__(
            f"cannot record {command!r}: {problem}. It has to be `python FILE ...` or "
            "`python -m MODULE ...`, and to end with status 0 by itself."
        )


class ReferenceDataError(DicpError):
    """Reference data that are absent, damaged or of another version; `command` makes them."""

    def __init__(self, path: Path, problem: str, command: str) -> None:
        self.path = path
        self.problem = problem
        self.command = command
        super().__init__(f"{path}: {sentence(problem)} `{command}` makes reference data.")


class OldDeviceConfigError(DicpError):
    """A device configuration in Python, which is not run."""

    def __init__(self, path: Path, new: Path) -> None:
        self.path = path
        command = f"python -m dicp.conformance convert-config {path} -o {new}"
        super().__init__(
            f"{path} is a configuration in Python, which is not run. Convert it: `{command}`."
        )


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
