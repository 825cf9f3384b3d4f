"""All cases by operator: those of the case files, and those of PyTorch's operator database."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any, Final

from dicp.conformance.suite.case import Case, function
from dicp.conformance.suite.files import Entry, case_entries, read_case_file
from dicp.errors import CaseError
from dicp.errors.text import nearest_is

ALL: Final = "all_ops"
MODELS: Final = Path(__file__).parent / "models"
"""The lists recorded from the reference models: NAME.json."""


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


def model_names() -> list[str]:
    """The models that there are recorded lists of."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def model_file(model: str) -> Path:
    """The list of a model: a name, or the path of a recorded list. Raises UnknownModelError."""
    path = MODELS / f"{model}.json" if model in model_names() else Path(model)
    if path.suffix != ".json" or not path.is_file():
        hint = nearest_is(model, model_names())
        raise UnknownModelError(f"no model {model!r}, nor a file of that name{hint}")
    return path


def model_entries(path: Path) -> dict[str, list[Entry]]:
    """The entries of a recorded list, by operator. Raises CaseFileError."""
    found: dict[str, list[Entry]] = {}
    for entry in read_case_file(path):
        found.setdefault(entry.name, []).append(entry)
    return found


def operator_names(folder: str = "") -> list[str]:
    """The operators that there are cases for. It imports the database, which takes seconds."""
    from dicp.conformance.suite.database import database

    return sorted({*file_entries(folder), *database()})


def cases_of(
    operator: str, samples: int, folder: str = "", model: str = ""
) -> Iterator[Case]:  # fmt: skip
    """The cases of an operator; `samples`: of each dtype, from the database, 0: all.

    A name in a case file takes the place of the same name in the database. model: the file of a
    recorded list, whose cases alone are meant.
    """
    known = model_entries(Path(model)) if model else file_entries(folder)
    entries = known.get(operator, [])
    for number, entry in enumerate(entries):
        for case in entry.cases:
            yield replace(case, key=f"{case.key}-{number}") if number else case
    if not entries and not model:
        from dicp.conformance.suite.database_cases import database_cases  # takes seconds

        yield from database_cases(operator, samples)


def made_from(
    operator: str, samples: int, device: str, folder: str = "", model: str = ""
) -> dict[str, Any]:  # fmt: skip
    """What an operator's reference data depend on: they are made again when it changes."""
    known = model_entries(Path(model)) if model else file_entries(folder)
    files = {entry.path for entry in known.get(operator, [])}
    digests = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    own = folder if any(path.parent == Path(folder) for path in files) else ""
    given = {"cases": own, "model": model}
    return {
        "samples": samples, "device": device, "case_files": digests,
        **{name: value for name, value in given.items() if value},
    }  # fmt: skip


def making_command(folder: Path, operators: Sequence[str], made: Mapping[str, Any]) -> str:
    """The command that makes operators' reference data; `made`: as `made_from` returns it."""
    words = ["python", "-m", "dicp.conformance", "gen_data", "--fname", *operators]
    model, cases = Path(made.get("model", "")), made.get("cases")
    if model.name:  # whose data lie in a folder of its own
        folder = folder.parent
        words += ["--model_name", model.stem if model.parent == MODELS else str(model)]
    words += ["--cases", cases] if cases else []
    return shlex.join([*words, "--data", str(folder)])


class UnknownOperatorError(ValueError):
    """A name or pattern that matches no operator."""


class UnknownModelError(ValueError):
    """A name that no recorded list has."""


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
        raise UnknownOperatorError(f"no operator matches {pattern!r}{nearest_is(pattern, names)}")
    return found
