"""`python -m dicp.oplib`: the C interface of operator libraries."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Annotated

import typer

from dicp.errors.command_line import run_command_line
from dicp.oplib.reference import build
from dicp.oplib.text import declarations, header

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)


@app.command("header")
def write_header(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
) -> None:
    """Print or write the C header, functions.h."""
    if output is None:
        typer.echo(header(), nl=False)
    else:
        output.write_text(header())


@app.command()
def missing(
    library: Annotated[Path, typer.Argument(help="The shared object of a vendor.", exists=True)],
) -> None:
    """List the functions that a library lacks; their operators take the device's other paths."""
    loaded = ctypes.PyDLL(str(library.resolve()), mode=ctypes.DEFAULT_MODE)
    lacking = [d for d in declarations() if not d.in_place and not hasattr(loaded, d.name)]
    for declaration in lacking:
        typer.echo(f"{declaration.name}: {', '.join(declaration.operators)}")
    count = sum(not declaration.in_place for declaration in declarations())
    typer.echo(f"{library.name} has {count - len(lacking)} of {count} functions")


@app.command()
def reference(
    folder: Annotated[Path, typer.Argument(help="Where to write the library and its headers.")],
) -> None:
    """Build the reference library, whose functions are compiled one-operator graphs."""
    typer.echo(str(build(folder)))


if __name__ == "__main__":
    run_command_line(app, "python -m dicp.oplib")
