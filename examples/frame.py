"""What all examples share: their options, errors, the compiled function and the tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dicp.errors import DicpError
from dicp.errors.command_line import above_zero
from dicp.machine import device_problem
from dicp.testing.backends import find_backend

PIP_NAMES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "torchvision": "--no-deps torchvision",  # else pip replaces torch by a build of its choosing
}
"""Packages that pip knows by another name than Python, or installs in a special way."""


def present_device(name: str) -> str:
    """Raises BadParameter for a device that has no memory here."""
    if problem := device_problem(name):
        raise typer.BadParameter(problem)
    return name


Backend = Annotated[str, typer.Option(help="A backend of torch.compile, such as cpugraph.")]
Dynamic = Annotated[bool, typer.Option("--dynamic/--static", help="Compile symbolic sizes.")]
Device = Annotated[
    str, typer.Option(callback=present_device, help="Where the model runs: cpu, cuda, dipu.")
]
Rate = Annotated[float, typer.Option(callback=above_zero, help="Learning rate.")]
Compare = Annotated[bool, typer.Option("--compare", help="Run eager, too, and compare.")]
Seed = Annotated[int, typer.Option(help="Of weights, data and draws.")]


class ExampleError(DicpError):
    """What an example lacks: a package, a file, a backend; the message says how to get it."""


@dataclass(frozen=True)
class Compiler:
    """How an example compiles, as its command line says."""

    backend: str
    dynamic: bool = False

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`torch.compile` of a function; raises ExampleError for an unknown backend."""
        try:
            found = find_backend(self.backend)
        except LookupError as error:
            raise ExampleError(str(error.args[0])) from error
        known = self.backend in torch.compiler.list_backends(exclude_tags=())
        backend = self.backend if known else found  # options of inductor need its name
        return torch.compile(fn, backend=backend, dynamic=self.dynamic, options=options or None)


def weights_folder(variable: str, holds: str) -> Any:
    """The option --weights, whose default an environment variable names."""
    return typer.Option(
        "--weights", envvar=variable, exists=True, file_okay=False, help=f"A folder with {holds}."
    )


def say_random(weights: Path | None, variable: str, holds: str) -> None:
    """Print, where no folder of weights was given, that they are random."""
    if weights is None:
        print(f"random weights; for real ones set --weights or {variable} to a folder with {holds}")


@contextmanager
def loading(folder: Path | None, holds: str) -> Iterator[None]:
    """A block that reads a folder; files that lack are an error that names what is expected."""
    try:
        yield
    except OSError as error:
        raise ExampleError(f"{error}\n{folder} should hold {holds}") from error


@contextmanager
def packages() -> Iterator[None]:
    """A block that imports packages; a missing one is an error that names the pip command."""
    try:
        yield
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if not name and "pip install" in str(error):  # a library's own words
            raise ExampleError(str(error)) from error
        if not name or not isinstance(error, ModuleNotFoundError):
            raise
        command = f"pip install {PIP_NAMES.get(name, name)}"
        raise ExampleError(f"this example needs {name}: {command}") from error


@contextmanager
def folder_or_temporary(folder: Path | None) -> Iterator[Path]:
    """The folder, or one that is removed after the block."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory() as made:
        yield Path(made)


def timed(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What a function returns for arguments, and the seconds it takes."""
    start = time.perf_counter()
    result = fn(*args)
    return result, time.perf_counter() - start


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers with a point have six significant digits."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
