"""The options of pytest that tests in the form of an earlier suite read when they are imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arguments:
    """The options that a test of this form reads when it is imported."""

    backend: str = ""
    dynamic: bool = False
    device: str = "cpu"


_given = [Arguments()]


def set_args(arguments: Arguments) -> None:
    """Called by `dicp.testing.fixtures` before tests are imported: they are handed no pytest."""
    _given[0] = arguments


def parse_args() -> Arguments:
    """The options of this pytest run; static shapes unless `--dynamic true` is given."""
    return _given[0]
