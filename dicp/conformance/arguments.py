"""The command line of the public suite in the form of sub-commands: `--mode X` is `X`, and an
option with several values becomes as many options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

MODES: Final = {"test": "run_test"}
"""Modes that have another name as a sub-command."""
SEVERAL: Final = ("--fname", "--filter_dtype")
DEFAULT: Final = "run_test"
MODEL_LIST: Final = "--get_model_list"
"""An option of the public suite that is a command of its own."""


def as_commands(arguments: Sequence[str], commands: Collection[str]) -> list[str]:
    """The arguments with a sub-command in front; without any arguments, the help."""
    rest = _one_value_each(arguments)
    if MODEL_LIST in rest:
        return [MODEL_LIST.removeprefix("--"), *(text for text in rest if text != MODEL_LIST)]
    if not rest or rest[0] in ("--help", "-h"):
        return ["--help"]
    mode, rest = _mode(rest)
    if mode is not None:
        return [MODES.get(mode, mode), *rest]
    return rest if rest[0] in commands or not rest[0].startswith("-") else [DEFAULT, *rest]


def _mode(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--mode`, and the other arguments."""
    rest = list(arguments)
    for k, text in enumerate(rest):
        if text.startswith("--mode="):
            return text.removeprefix("--mode="), rest[:k] + rest[k + 1 :]
        if text == "--mode" and k + 1 < len(rest):
            return rest[k + 1], rest[:k] + rest[k + 2 :]
    return None, rest


def _one_value_each(arguments: Sequence[str]) -> list[str]:
    found: list[str] = []
    option = ""
    for text in arguments:
        if text.startswith("-"):
            option = text if text in SEVERAL else ""
        elif option and found[-1] != option:
            found.append(option)
        found.append(text)
    return found
