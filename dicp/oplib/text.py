"""Texts written from the table: the C header, and the list of functions in the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dicp.oplib.table import Function, functions
from dicp.template import render_template


@dataclass(frozen=True)
class Declaration:
    """A symbol of a library, and the functions of the table that it serves."""

    name: str
    functions: tuple[Function, ...]
    in_place: bool

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """The C type and the name of each, after the context."""
        return list(self.functions[0].c_parameters(self.in_place))

    @property
    def operators(self) -> list[str]:
        return [f"{f.operator}, in place" if self.in_place else f.operator for f in self.functions]


@cache
def declarations() -> Sequence[Declaration]:
    """Every symbol once, in the table's order, each followed by its in-place form."""
    found: dict[tuple[str, bool], list[Function]] = {}
    for function in functions():
        found.setdefault((function.name, False), []).append(function)
        if function.in_place is not None:
            found.setdefault((function.in_place, True), []).append(function)
    return [Declaration(name, tuple(of), in_place) for (name, in_place), of in found.items()]


def header() -> str:
    """The text of a C header that declares every function."""
    rows = [(d.name, ", ".join(d.operators), d.parameters) for d in declarations()]
    return _rendered("functions.h.jinja", rows)


def _rendered(template: str, rows: object) -> str:
    return render_template(Path(__file__).parent / template, declarations=rows)


def reference() -> str:
    """The source of the reference library: functions that hand their arguments to one callback."""
    rows = [(d.name, d.parameters) for d in declarations()]
    return _rendered("reference.cpp.jinja", rows)


def listing() -> str:
    """The table as Markdown: operator, function, its parameters, in-place form and gradient."""
    return "\n".join(["| ATen's operator | function after the context | in place | gradient |",
                      "| --- | --- | --- | --- |", *_rows()])  # fmt: skip


def _rows() -> Iterator[str]:
    names = {function.name for function in functions()}
    for function in functions():
        parameters = ", ".join(name for _, name in function.c_parameters())
        backward = f"{function.name}Backward"
        yield (
            f"| `{function.operator}` | `{function.name}({parameters})` "
            f"| {'`' + function.in_place + '`' if function.in_place else ''} "
            f"| {'`' + backward + '`' if backward in names else ''} |"
        )
