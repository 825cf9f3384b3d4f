"""Choosing operator cases by operator: `--op NAME`, and lists with one file per operator."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from dicp.testing.coverage import OP_TESTS, overloads_reached

FILE = re.compile(r"test_(\w+)\.py")
"""The file of a list that has one per operator: test__softmax.py."""


def operators_of_files(patterns: Iterable[str]) -> list[str]:
    """The operators that the names of test files stand for, where there is no such file here."""
    named = (FILE.fullmatch(pattern.rsplit("/", 1)[-1]) for pattern in patterns)
    return [m[1] for m in named if m and not (OP_TESTS / m[0]).exists()]


def by_operator(
    items: Sequence[pytest.Item], patterns: Sequence[str], files: Sequence[str] = ()
) -> list[pytest.Item]:
    """Those of `items` whose case has, or reaches an operator that has, a name in `patterns`.

    `files` are kept whole. Raises pytest.UsageError for a pattern without a case, with near names.
    """
    wanted = {pattern: re.compile(pattern) for pattern in patterns}
    found: set[str] = set()
    known: set[str] = set()
    kept = []
    names_of: dict[int, frozenset[str]] = {}
    for item in items:
        case = _case(item)  # static and dynamic tests share it
        names = names_of.setdefault(id(case), frozenset()) or _names(case)
        names_of[id(case)] = names
        known |= names
        hits = [p for p, regex in wanted.items() if any(map(regex.fullmatch, names))]
        found.update(hits)
        if hits or item.path.name in files:
            kept.append(item)
    for pattern in wanted.keys() - found:
        near = difflib.get_close_matches(pattern, sorted(known), n=5, cutoff=0.4)
        raise pytest.UsageError(f"--op {pattern} matches no case. Near names: {', '.join(near)}")
    return kept


def _case(item: pytest.Item) -> Any:
    return getattr(getattr(item, "callspec", None), "params", {}).get("case")


def _names(case: Any) -> frozenset[str]:
    """A case's own name, and those of the operators that it reaches: add, add.Tensor, aten.add."""
    if case is None:
        return frozenset()
    names = {case.name}
    for overload in overloads_reached([case]):
        namespace, name, _ = overload.split(".", 2)
        names |= {overload, overload.removeprefix("aten."), name, f"{namespace}.{name}"}
    return frozenset(names)
