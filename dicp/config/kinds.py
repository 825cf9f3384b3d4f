"""Kinds of values: what a setting accepts, as text of the environment or as an option."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BOOLEAN", "COMMAND", "COUNT", "NAME", "PATH", "TEXT", "WORDS", "Kind", "choice"]

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


class Invalid(Exception):
    """A value that its kind rejects; `Option.parse`, which knows its source, raises the error."""


@dataclass(frozen=True)
class Kind:
    """A type of value: its name, what it accepts in words, and the parser for text and values."""

    name: str
    expected: str
    fix: str
    parse: Callable[[Any], Any]


def _parse_boolean(value: Any) -> bool:
    parsed = _BOOLEANS.get(str(value).strip().lower())
    if parsed is None:
        raise Invalid
    return parsed


def _parse_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Invalid
    try:
        count = int(value)
    except ValueError:
        raise Invalid from None
    if count < 0:
        raise Invalid
    return count


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise Invalid
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, TypeError, ValueError):  # no home folder, or bytes
        raise Invalid from None


def _parse_optional_path(value: Any) -> Path | None:
    return None if value is None else _parse_path(value)


def _parse_words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError:  # an open quotation
            raise Invalid from None
    if not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise Invalid
    return tuple(value)


def _parse_sizes(value: Any) -> tuple[int, ...]:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, Sequence):
        raise Invalid
    sizes = tuple(_parse_count(word) for word in words)
    if list(sizes) != sorted(set(sizes)) or 0 in sizes:
        raise Invalid
    return sizes


def _parse_patterns(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise Invalid
    patterns = tuple(word.strip() for word in words if word.strip())
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error:
        raise Invalid from None
    return patterns


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or len(value.split()) > 1:
        raise Invalid
    return value.strip()


def _parse_text(value: Any) -> str:
    return str(value).strip()


def _parse_indices(value: Any) -> tuple[int, ...]:
    return tuple(_parse_count(part.strip()) for part in str(value).split(","))


def _parse_command(value: Any) -> str:
    if not isinstance(value, str):
        raise Invalid
    _parse_words(value)
    return value.strip()


def choice(*values: str) -> Kind:
    def parse(value: Any) -> str:
        if value not in values:
            raise Invalid
        return str(value)

    listed = " or ".join((", ".join(map(repr, values[:-1])), repr(values[-1])))
    return Kind("|".join(values), listed, "Choose one of these.", parse)


BOOLEAN = Kind(
    "bool",
    "one of 1, true, on, yes, 0, false, off, no",
    "Use 1 to switch it on and 0 to switch it off.",
    _parse_boolean,
)
COUNT = Kind("int", "a whole number, 0 or more", "Give it in digits.", _parse_count)
PATH = Kind("path", "the path of a folder", "Give a path, such as ~/.cache/dicp.", _parse_path)
OPTIONAL_PATH = Kind(
    "path", "a path, or nothing", "Give a path, or leave it unset.", _parse_optional_path
)
COMMAND = Kind(
    "command",
    "the command of a compiler, such as 'g++-13' or 'ccache g++'",
    "Give it as in a shell, with every quotation closed.",
    _parse_command,
)
SIZES = Kind(
    "sizes",
    "sizes in rising order, such as '128 256 512'",
    "Give one text with spaces between, or a list of numbers.",
    _parse_sizes,
)
NAME = Kind("name", "the name of an installed target", "Give one word.", _parse_name)
OPERATORS = Kind(
    "operators",
    "regular expressions of operator names with commas between, such as 'conv2d,add.out'",
    "Give one text, or a list of texts.",
    _parse_patterns,
)
WORDS = Kind(
    "flags",
    "compiler flags, such as '-O2 -g'",
    "Give one text as in a shell, with every quotation closed, or a list of texts.",
    _parse_words,
)
TEXT = Kind("text", "a text", "Give a text.", _parse_text)
INDICES = Kind(
    "indices", "device indices such as 0,1", "Give indices separated by commas.", _parse_indices
)
