"""`models`: which families of models run on which backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Printed
from rich.text import Text

from dicp.conformance.families.adaptation import Verdict
from dicp.conformance.families.models import Family, families_named
from dicp.conformance.families.table import Table, columns_of
from dicp.conformance.isolation import run_module
from dicp.errors import FamilyNameError
from dicp.errors.command_line import seconds_above_zero
from dicp.testing.backends import find_backend

WORKER = "dicp.conformance.families.worker"
WIDTH = 160


def models(
    backends: Annotated[str, typer.Option(help="Backends, separated by commas.")],
    families: Annotated[str, typer.Option(help="Families, separated by commas; empty: all.")] = "",
    train: Annotated[bool, typer.Option("--train", help="A training step, too.")] = False,
    by_chip: Annotated[
        bool, typer.Option("--by-chip", help="A column for each chip, with those of no target.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the table as Markdown, JSON and HTML.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    seconds: Annotated[
        float, typer.Option(callback=seconds_above_zero, help="A family that takes longer hangs.")
    ] = 1800.0,
) -> None:
    """Build each family of models at a tiny size, run it on each backend, and print a table.

    A cell is `ok`, `eager n` (right, with n calls left to eager), `wrong` (an error beyond the fp64
    rule) or `failed`. Fails if a cell is `wrong` or `failed`.
    """
    names = _checked(backends)
    try:
        wanted = families_named([name for name in families.split(",") if name])
    except FamilyNameError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--families") from unknown
    cells = [(family, name) for family in wanted for name in names]

    def verdict(cell: tuple[Family, str]) -> Verdict:
        return isolated_verdict(*cell, train, seconds)

    verdicts: dict[tuple[str, str], Verdict] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for one in pool.map(verdict, cells):
            verdicts[one.family, one.backend] = one
            sys.stdout.write(f"{one.family}, {one.backend}: {one.text}\n")
            sys.stdout.flush()
    what = "inference and a training step" if train else "inference"
    titles = [family.title for family in wanted]
    table = Table(f"Families of models: {what}", columns_of(names, by_chip), titles, verdicts)
    _print(table)
    for path in table.write(out) if out else ():
        sys.stdout.write(f"{path}\n")
    raise typer.Exit(0 if all(one.good for one in verdicts.values()) else 1)


def isolated_verdict(family: Family, backend: str, train: bool, seconds: float) -> Verdict:
    """A verdict of a process of its own: `failed`, too, where that crashes or hangs."""
    job = {"family": family.title, "backend": backend, "train": train}
    ended = run_module(WORKER, job, seconds)
    if ended.told:
        return Verdict(**ended.told[0])
    return Verdict(family.title, backend, "failed", ended.how)


def _checked(backends: str) -> Sequence[str]:
    """The backends' names. Raises BadParameter for one that is not there, or for none."""
    names = [name for name in backends.split(",") if name]
    try:
        for name in names:
            find_backend(name)
    except LookupError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--backends") from unknown
    if not names:
        raise typer.BadParameter("names no backend", param_hint="--backends")
    return names


def _print(table: Table) -> None:
    printed = Printed(title=table.title, title_justify="left", show_lines=True)
    printed.add_column("family", no_wrap=True)
    for column in table.columns:
        printed.add_column(Text(column.heading), overflow="fold")
    for family, cells in table.rows():
        printed.add_row(family, *map(Text, cells))
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(printed)
