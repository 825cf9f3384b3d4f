"""The commands `gguf write` and `gguf run`; `infiniop-test` is the latter."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dicp.errors import SimulatorWarning
from dicp.errors.command_line import run_command_line

if TYPE_CHECKING:
    from dicp.conformance.per_operator.gguf_cases import FileCase

FLAGS = {"ignore_unknown_options": True}
"""Platform flags are the installed targets', so that they reach the commands as arguments."""

app = typer.Typer(help="Case files of GGUF: operators with operands and answers.",
                  no_args_is_help=True)  # fmt: skip


@app.command("write")
def write_file(
    operator: Annotated[str, typer.Argument(help="An operator of test/infiniop.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file.")],
    dtype: Annotated[str, typer.Option(help="f16, bf16, f32 or f64.")] = "f32",
) -> None:
    """Write an operator's cases, with random operands and answers in float64."""
    from dicp.conformance.per_operator.gguf_cases import operator_called, write_cases
    from dicp.conformance.per_operator.runs import DTYPES

    try:
        operator_called(operator)
    except LookupError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="OPERATOR") from unknown
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise typer.BadParameter(f"unknown dtype {dtype!r}; there are {known}",
                                 param_hint="--dtype")  # fmt: skip
    count = write_cases(out, operator, DTYPES[dtype])
    sys.stdout.write(f"{count} cases of {operator} in {dtype}: {out}\n")


@app.command("run", context_settings=FLAGS)
def run_files(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE... --PLATFORM...", help="Case files; hardware by its name."),
    ],
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend by its name, beside or for a platform.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Calls before a case's time is taken.")] = 5,
    run: Annotated[int, typer.Option(min=1, help="Calls whose median is a case's time.")] = 20,
) -> None:
    """Check the cases of files on platforms; one without its chip runs its simulator.

    A line per case: attributes, whether it passes, largest error, median time. Fails if a case
    does.
    """
    from dicp.conformance.per_operator.gguf_cases import read_cases
    from dicp.conformance.per_operator.platforms import device_of

    backends = _backends([a for a in arguments if a.startswith("-")], backend or [])
    cases = [case for a in arguments if not a.startswith("-") for case in read_cases(Path(a))]
    failed = 0
    for name in backends:
        device, note = device_of(name)
        sys.stdout.write(f"{note}\n" if note else "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SimulatorWarning)  # the note says it
            failed += sum(not _passes(case.on(device), name, warmup, run) for case in cases)
    sys.stdout.write(f"{failed} failed\n" if failed else "all passed\n")
    raise typer.Exit(1 if failed else 0)


def _backends(flags: list[str], named: list[str]) -> list[str]:
    """Raises BadParameter for a flag of no target, and for a backend that there is not."""
    from dicp.conformance.per_operator.platforms import backends_of, listed, platforms
    from dicp.testing.backends import find_backend

    try:
        found = [*backends_of(flags), *named]
        for name in found:
            find_backend(name)
    except LookupError as unknown:
        raise typer.BadParameter(str(unknown.args[0]), param_hint="platform") from unknown
    if not found:
        problem = f"name one: {listed(platforms())}, or --backend B"
        raise typer.BadParameter(problem, param_hint="platform")
    return found


def _passes(case: FileCase, backend: str, warmup: int, runs: int) -> bool:
    """Run a case and print its line; whether its results are right."""
    dtype = str(case.run.dtype).removeprefix("torch.")
    sys.stdout.write(f"{backend} case {case.number} {case.name} {dtype} {case.run.case}: ")
    sys.stdout.flush()
    expected = case.expected()
    case = case.placed(expected)
    try:
        compiled = case.run.compile(backend)
        outcome = case.check(compiled, expected)
    except Exception as error:  # the other cases run
        sys.stdout.write(f"failed: {(str(error).splitlines() or [repr(error)])[0]}\n")
        return False
    state = f"failed: {outcome.trouble}" if outcome.trouble else "passed"
    seconds = case.run.median_seconds(compiled, case.inputs, warmup, runs)
    share = f"{outcome.error:.2f} of the tolerance"
    sys.stdout.write(f"{state}, largest error {outcome.absolute:.3g} ({share}), "
                     f"median {seconds * 1e3:.4f} ms\n")  # fmt: skip
    return not outcome.trouble


def main() -> None:
    """The console script `infiniop-test`."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(context_settings=FLAGS)(run_files)
    run_command_line(single, "infiniop-test")
