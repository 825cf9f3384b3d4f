"""The installed pytest plugin: the options of dicp's tests, for tests anywhere.

    pytest --pyargs dicp.testing.operators --backend mychipgraph  the operator cases, on any backend
    pytest --pyargs dicp.testing.models --backend mychipgraph     the models
    pytest -c /a/folder/static.ini --backend mychipgraph       a list of tests, from any folder

Every pytest run where dicp is installed loads this module. So it imports nothing but pytest, and a
run that uses none of its options is left alone. An option whose name another plugin or conftest has
is theirs; ours has a second name, `--dicp-backend` for `--backend`, that no other plugin has.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

DYNAMIC = ("true", "false", "both")
NO_VALUE = "store_true"
OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {
        "default": "",
        "help": "a backend registered with Dynamo, or the name of a dicp target (that of the CPU, "
        "and dicp where --device is another)",
    },
    "dynamic": {
        "default": "both", "type": str.lower, "choices": DYNAMIC,
        "help": "shapes of the operator and model tests: true, false or both (default)",
    },
    "device": {"default": "cpu", "help": "where the tensors of the tests lie (cpu)"},
    "allow-eager": {
        "action": NO_VALUE,
        "help": "operators without a rule may run eagerly in cases that expect compiled ones",
    },
    "op": {
        "action": "append", "metavar": "NAME", "default": None,
        "help": "only operator cases of this name, or that reach such an operator, forward or "
        "backward: a regular expression, such as _softmax or .*pool2d (repeatable)",
    },
    "without-dtypes": {
        "default": "",
        "help": "dtypes that the operator cases leave out: float64,complex64",
    },
    "eager-nodes": {
        "action": NO_VALUE, "help": "at the end, list what the tests left to eager and why",
    },
    "results": {
        "default": "", "metavar": "FILE",
        "help": "add outcomes and what ran eagerly to a JSON file, which vendor-report reads",
    },
    "sample": {
        "default": "", "metavar": "PARTS[:NUMBER]",
        "help": "one of so many parts of the tests, another one every few hours, and what changed",
    },
    "sweeps": {
        "default": "", "metavar": "PARTS[:NUMBER]",
        "help": "all tests, but one of so many parts of the sweeps: static or dynamic shapes, "
        "tests marked sweep, an operator's dtypes and layouts",
    },
    "update-golden": {"action": NO_VALUE, "help": "write the golden texts anew"},
}  # fmt: skip


def add_options(parser: pytest.Parser) -> None:
    """Add the options, each under its second name and, where that is free, its own."""
    group = parser.getgroup("dicp")
    for name, settings in OPTIONS.items():
        own, second = f"--{name}", f"--dicp-{name}"
        value = () if settings.get("action") == NO_VALUE else (settings.get("choices", "x")[0],)
        try:
            _, unknown = parser.parse_known_and_unknown_args([own, *value])
        except pytest.UsageError:  # theirs wants other values
            unknown = []
        names = (own, second) if own in unknown else (second,)
        group.addoption(*names, dest=_dest(name), **settings)


def _dest(name: str) -> str:
    return f"dicp_{name.replace('-', '_')}"


def option(config: pytest.Config, name: str) -> Any:
    """The value of one of OPTIONS."""
    return config.getoption(_dest(name))


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, None, None]:
    """All plugins and first conftests have added their options when ours are added."""
    yield
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    defaults = {_dest(name): settings.get("default", False) for name, settings in OPTIONS.items()}
    if any(config.getoption(dest, default) != default for dest, default in defaults.items()):
        config.pluginmanager.import_plugin("dicp.testing.fixtures")
