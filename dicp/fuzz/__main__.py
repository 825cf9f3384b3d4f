"""`python -m dicp.fuzz --backend NAME --seconds 60`: see `dicp.fuzz`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from dicp.errors.command_line import run_command_line
from dicp.errors.text import did_you_mean, nearest
from dicp.fuzz.batch import Find, as_test, draw_batch
from dicp.fuzz.campaign import Plan, run
from dicp.fuzz.table import GROUPS

TEMPLATES = tuple(dict.fromkeys(row.template for rows in GROUPS.values() for row in rows))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fuzz(
    backend: Annotated[str, typer.Option(help="As torch.compile takes it.")] = "dicp",
    seed: Annotated[str, typer.Option(help="Any text; the same one draws the same.")] = "0",
    seconds: Annotated[float, typer.Option(min=0, help="How long to run; 0: no limit.")] = 60.0,
    programs: Annotated[int, typer.Option(min=0, help="How many to run; 0: no limit.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Programs compiled in one graph.")] = 64,
    without: Annotated[
        list[str] | None, typer.Option(help="A template of the table not to draw.")
    ] = None,
    group: Annotated[
        str, typer.Option(help="A group of the table that half of the statements come from.")
    ] = "",
    pytorch: Annotated[
        bool, typer.Option(help="Print what fails in PyTorch's own front end, too.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A file that finds are added to.")] = None,
    show: Annotated[
        int | None, typer.Option(min=0, help="Only print the programs of a batch.")
    ] = None,
) -> None:
    """Run random programs compiled and in eager; print each that differs as a test.

    Fails if one does.
    """
    try:
        torch.compile(lambda: None, backend=backend)
    except RuntimeError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--backend") from unknown
    for name in without or ():
        if name not in TEMPLATES:
            hint = did_you_mean(nearest(name, TEMPLATES))
            raise typer.BadParameter(f"no template {name!r}.{hint}", param_hint="--without")
    if group and group not in GROUPS:
        known = ", ".join(GROUPS)
        raise typer.BadParameter(f"no group {group!r}; there are {known}", param_hint="--group")
    if out is not None:
        out.open("a").close()  # now, rather than at the first find
    if show is not None:
        drawn = draw_batch(f"{seed}/{show}", backend, batch, without or (), group)
        sys.stdout.write(f"# {drawn.mode}\n" + "\n".join(p.source() for p in drawn.programs))
        return

    def report(found: str, find: Find) -> None:
        text = f"# seed {found}: {find.text}\n{as_test(find)}\n\n"
        sys.stdout.write(text)
        sys.stdout.flush()
        if out is not None:
            with out.open("a") as file:
                file.write(text)

    def progress(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    plan = Plan(backend, seed, seconds, programs, jobs, batch, tuple(without or ()), group, pytorch)
    tally = run(plan, report, progress)
    sys.stdout.write(f"{tally}\n")
    raise typer.Exit(1 if tally.finds else 0)


if __name__ == "__main__":
    run_command_line(app, "python -m dicp.fuzz")
