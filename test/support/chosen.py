"""Operator cases picked by name, for tests that run some of them in another way."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from dicp.testing import Op


def cases_named(chosen: Mapping[str, Iterable[str]]) -> list[Op]:
    """The cases of the modules in `test/op` that have these names; KeyError where there is none."""
    found: list[Op] = []
    for module, names in chosen.items():
        cases = {case.name: case for case in importlib.import_module(module).CASES}
        found += [cases[name] for name in names]
    return found
