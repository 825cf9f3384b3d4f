"""`python -m dicp.conformance run_test`, and others: see `dicp.conformance`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dicp.conformance.arguments import as_commands
from dicp.conformance.configuration import Configuration
from dicp.conformance.device_checks.commands import utest
from dicp.conformance.families.commands import models
from dicp.conformance.per_operator.gguf_commands import app as gguf_app
from dicp.conformance.processes import run
from dicp.conformance.recorded.commands import record
from dicp.conformance.rows import FAILURES, Row, read_rows, summary, table, totals
from dicp.conformance.suite.commands import add_commands, check_names
from dicp.conformance.torch_tests.plan import plan_of
from dicp.errors.command_line import run_command_line, seconds_above_zero

RESULTS, SUMMARY = "results.csv", "summary.md"

app = typer.Typer(
    help="Check operators on a device, or compiled by a backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(gguf_app, name="gguf")


@app.callback()
def conformance() -> None:
    """Check operators on a device, or compiled by a backend."""


@app.command("torch-tests")
def torch_tests(
    device: Annotated[str, typer.Option(help="Where the tensors lie.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Compiles the operators; empty: eager.")] = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML: dtypes, samples, only, skip, tolerance.")
    ] = None,
    tests: Annotated[
        str, typer.Option(help="Files in test/ of TORCH_SOURCE_PATH, separated by commas.")
    ] = "",
    out: Annotated[Path, typer.Option(help="The folder of the results.")] = Path("torch_tests"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    group: Annotated[int, typer.Option(min=1, help="Operators in a process.")] = 40,
    test_seconds: Annotated[
        float, typer.Option(callback=seconds_above_zero, help="A test that takes longer hangs.")
    ] = 120.0,
    file_seconds: Annotated[
        float, typer.Option(callback=seconds_above_zero, help="The time of a file or group.")
    ] = 3600.0,
) -> None:
    """Run PyTorch's device-generic tests: of its operator database, and of files that are named.

    Fails if a test fails or ends its process.
    """
    check_names(device, backend)
    settings = Configuration.read(config)
    plan = plan_of(device, backend, settings, [t for t in tests.split(",") if t], group)
    before = read_rows(out / RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []

    with table(out / RESULTS) as add:

        def report(row: Row) -> None:
            rows.append(row)
            add(row)
            if row.result in FAILURES:
                sys.stdout.write(f"{row.result}: {row.file} {row.test}: {row.first_line}\n")
                sys.stdout.flush()

        run(plan.units, report, jobs, test_seconds, file_seconds)
    unused = settings.unused(plan.names, [row.name for row in rows])
    text = summary(plan.title, plan.names, rows, before, unused)
    (out / SUMMARY).write_text(text)
    for skip in unused:
        sys.stdout.write(f"a skip matches no test: {skip}\n")
    sys.stdout.write(f"{totals(rows)}; {out / SUMMARY}\n")
    raise typer.Exit(1 if any(row.result in FAILURES for row in rows) else 0)


add_commands(app)
app.command("models")(models)
app.command("record")(record)
app.command("utest")(utest)


def main() -> None:
    """The command line, with sub-commands or in the form of the public suite."""
    names = [str(command.name) for command in app.registered_commands]
    arguments = as_commands(sys.argv[1:], names)
    run_command_line(partial(app, args=arguments), "python -m dicp.conformance")


if __name__ == "__main__":
    main()
