"""`python -m dicp.conformance torch-tests --device dipu`: see `dicp.conformance`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from dicp.conformance.configuration import Configuration
from dicp.conformance.names import EAGER_DEVICE
from dicp.conformance.plan import plan_of
from dicp.conformance.processes import run
from dicp.conformance.rows import FAILURES, Row, read_rows, summary, table, totals
from dicp.errors.command_line import run_command_line

RESULTS, SUMMARY = "results.csv", "summary.md"

app = typer.Typer(
    help="Check operators on a device, or compiled by a backend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    test_seconds: Annotated[float, typer.Option(help="A test that takes longer hangs.")] = 120.0,
    file_seconds: Annotated[float, typer.Option(help="The time of a file or group.")] = 3600.0,
) -> None:
    """Run PyTorch's device-generic tests: of its operator database, and of files that are named.

    Fails if a test fails or ends its process.
    """
    _check_names(device, backend)
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

        run(plan, report, jobs, test_seconds, file_seconds)
    unused = settings.unused(plan.names, [row.name for row in rows])
    text = summary(plan.title, plan.names, rows, before, unused)
    (out / SUMMARY).write_text(text)
    for skip in unused:
        sys.stdout.write(f"a skip matches no test: {skip}\n")
    sys.stdout.write(f"{totals(rows)}; {out / SUMMARY}\n")
    raise typer.Exit(1 if any(row.result in FAILURES for row in rows) else 0)


def _check_names(device: str, backend: str) -> None:
    """Raises BadParameter for a device or backend that no test could use."""
    try:
        if backend:
            torch.compile(_check_names, backend=backend)
    except RuntimeError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--backend") from unknown
    try:
        if device != EAGER_DEVICE:  # the processes register it
            torch.empty(0, device=device)
    except Exception as error:  # PyTorch has errors of many types for devices
        problem = (str(error).splitlines() or [device])[0]
        raise typer.BadParameter(problem, param_hint="--device") from error


if __name__ == "__main__":
    run_command_line(app, "python -m dicp.conformance")
