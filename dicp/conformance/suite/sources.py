"""All cases by operator: those of the case files, and those of PyTorch's operator database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Final

from dicp.conformance.suite.case import Case, function
from dicp.conformance.suite.files import Entry, case_entries
from dicp.errors import CaseError
from dicp.errors.text import nearest

ALL: Final = "all_ops"


@cache
def file_entries(folder: str = "") -> dict[str, list[Entry]]:
    """The entries of the case files whose functions this installation has, by operator.

    folder: of case files besides dicp's own.
    """
    found: dict[str, list[Entry]] = {}
    for entry in [*case_entries(), *(case_entries(Path(folder)) if folder else ())]:
        try:
            function(entry.call)
        except CaseError:
            if not entry.call.startswith("torchvision."):
                raise
            continue  # an optional package
        found.setdefault(entry.name, []).append(entry)
    return found


def operator_names(folder: str = "") -> list[str]:
    """The operators that there are cases for. It imports the database, which takes seconds."""
    from dicp.conformance.suite.database import database

    return sorted({*file_entries(folder), *database()})


def cases_of(operator: str, samples: int, folder: str = "") -> Iterator[Case]:
    """The cases of an operator; `samples`: of each dtype, from the database, 0: all.

    A name in a case file takes the place of the same name in the database.
    """
    entries = file_entries(folder).get(operator, [])
    for number, entry in enumerate(entries):
        for case in entry.cases:
            yield replace(case, key=f"{case.key}-{number}") if number else case
    if not entries:
        from dicp.conformance.suite.database_cases import database_cases  # takes seconds

        yield from database_cases(operator, samples)


class UnknownOperatorError(ValueError):
    """A name or pattern that matches no operator."""


def chosen(
    patterns: Sequence[str], known: Iterable[str] | None = None, folder: str = ""
) -> list[str]:  # fmt: skip
    """The operators that match names or patterns, in order of their names.

    A pattern is a regular expression, or one of the shell's; both have to match in full.
    known: the operators to choose from; None: all that there are cases for, in `folder`, too.

    Raises UnknownOperatorError, with near names.
    """
    exact = file_entries(folder)
    if known is None and all(pattern in exact for pattern in patterns):
        return sorted(set(patterns))
    names = list(operator_names(folder) if known is None else known)
    if ALL in patterns:
        return sorted(names)
    found = {name for pattern in patterns for name in matching(pattern, names)}
    return sorted(found)


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern matches. Raises UnknownOperatorError if there are none."""
    if pattern in names:
        return [pattern]
    expressions = []
    for text in (pattern, translate(pattern)):
        try:
            expressions.append(re.compile(text))
        except re.error:
            continue
    found = [name for name in names if any(e.fullmatch(name) for e in expressions)]
    if not found:
        near = nearest(pattern, names)
        hint = f"; the nearest is {near!r}" if near else ""
        raise UnknownOperatorError(f"no operator matches {pattern!r}{hint}")
    return found
