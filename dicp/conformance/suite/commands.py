"""The sub-commands of the case suite."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dicp.conformance.configuration import FILE, found_in
from dicp.conformance.names import DTYPES, EAGER_DEVICE
from dicp.conformance.rows import FAILURES, Row, totals
from dicp.conformance.suite.convert import converted
from dicp.conformance.suite.convert_cases import converted_cases
from dicp.conformance.suite.coverage import DECISIONS, coverage_of, write_coverage
from dicp.conformance.suite.history import DEFAULT, kept, path_of
from dicp.conformance.suite.plan import (
    Processes,
    compare,
    generate,
    log_row,
    logger,
    stored_operators,
)
from dicp.conformance.suite.reports import write_reports
from dicp.conformance.suite.runs import CaseUnit
from dicp.conformance.suite.sources import (
    ALL,
    UnknownModelError,
    UnknownOperatorError,
    chosen,
    model_entries,
    model_file,
    model_names,
)
from dicp.discovery import SUFFIX, discover
from dicp.errors import MissingPackageError
from dicp.errors.command_line import existing_folder, seconds_above_zero
from dicp.errors.text import did_you_mean, nearest
from dicp.machine import device_problem
from dicp.target import find_target
from dicp.testing.backends import name_of

Names = Annotated[list[str], typer.Option("--fname", help="Operators' names or patterns.")]
Data = Annotated[Path, typer.Option(help="The folder of the reference data.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time.")]
Seconds = Annotated[
    float, typer.Option("--case_seconds", callback=seconds_above_zero,
                        help="A case that takes longer hangs.")
]  # fmt: skip
Filter = Annotated[
    list[str], typer.Option("--filter_dtype", help="Dtypes whose cases are left out.")
]  # fmt: skip
Nhwc = Annotated[bool, typer.Option("--nhwc", help="Inputs are channels-last.")]
NhwcMinDim = Annotated[
    int, typer.Option("--nhwc_min_dim", min=3, help="From this number of dimensions.")
]  # fmt: skip
FourBytes = Annotated[
    bool, typer.Option("--four_bytes", help="int32 for int64 where the operator takes it.")
]  # fmt: skip
ImplFolder = Annotated[
    Path | None, typer.Option("--impl_folder", callback=existing_folder,
                              help="The folder of device_config.toml.")
]  # fmt: skip
DeviceConfig = Annotated[
    Path | None, typer.Option("--device_config", help="TOML: skip, tolerance.")
]  # fmt: skip
Model = Annotated[
    str, typer.Option("--model_name", help="Only the cases of this model, or of FILE.json.")
]  # fmt: skip
Strict = Annotated[bool, typer.Option("--strict", help="A skip whose case passes is a failure.")]
HtmlReport = Annotated[bool, typer.Option("--html_report", help="Also write report.html.")]
ResultPath = Annotated[
    Path, typer.Option("--test_result_path", help="The workbook; other reports lie beside it.")
]  # fmt: skip
DebugLevel = Annotated[
    int, typer.Option("--failure_debug_level", min=0, max=2,
                      help="1 prints failing cases, 2 their tensors, too.")
]  # fmt: skip
Backend = Annotated[
    str | None, typer.Option(help="Compiles the operators; of a --device alone: none.")
]  # fmt: skip
Device = Annotated[str | None, typer.Option(help="Where the tensors lie.")]
Profile = Annotated[
    bool, typer.Option("--profile", help="Time each case that passes, beside eager.")
]  # fmt: skip
Iterations = Annotated[
    int, typer.Option("--num_iterations", min=1, help="Calls whose median --profile takes.")
]  # fmt: skip
UseDb = Annotated[
    bool, typer.Option("--use_db", help="Keep the results, and print what changed since.")
]  # fmt: skip
DbPath = Annotated[str, typer.Option("--db_path", help="sqlite:///PATH, for --use_db.")]
TestCases = Annotated[
    Path | None, typer.Option("--test_cases_path", help="Run these files that gen_case wrote.")
]  # fmt: skip
PytestArgs = Annotated[
    str, typer.Option("--pytest_args", help="Options of pytest for --test_cases_path.")
]  # fmt: skip
DATA = Path("conformance_data")
CASES = Path("gencases")


def add_commands(app: typer.Typer) -> None:
    """Add the sub-commands to an application."""
    app.command("gen_data")(gen_data)
    app.command("gen_case")(gen_case)
    app.command("run_test")(run_test)
    app.command("convert-config")(convert_config)
    app.command("convert-cases")(convert_cases)
    app.command("coverage")(coverage)
    app.command("list")(list_operators)
    app.command("get_model_list")(get_model_list)


def gen_data(
    fname: Names = [ALL],  # noqa: B006
    device: Annotated[str, typer.Option(help="The device on which eager computes.")] = "cpu",
    data: Data = DATA,
    samples: Annotated[
        int, typer.Option(min=0, help="Cases of each dtype from PyTorch's database; 0: all.")
    ] = 4,
    cases: Annotated[
        Path | None,
        typer.Option(callback=existing_folder, help="A folder of case files besides dicp's own."),
    ] = None,
    model_name: Model = "",
    jobs: Jobs = 1,
    case_seconds: Seconds = 600.0,
) -> None:
    """Store reference data: inputs, eager's results, and those in float64.

    Data that are there are kept; what is missing is added.
    """
    check_names(device, "")
    folder = str(cases.resolve()) if cases else ""
    data, model = _of_model(data, model_name)
    unit = CaseUnit(
        "", "gen_data", device, str(data), (), samples=samples, cases=folder, model=model
    )
    log = logger()

    def report(row: Row) -> None:
        if row.result in FAILURES:
            log.error("gen_data %s failed: %s", row.test, row.reason)

    made = _usable(lambda: generate(fname, unit, Processes(jobs, case_seconds), report))
    for reason, count in sorted(made.left_out.items()):
        log.info("%d cases left out: %s", count, reason)
    sys.stdout.write(
        f"{made.cases} cases, {made.bytes} bytes in {data}; {made.current} operators were there\n"
    )
    raise typer.Exit(1 if made.failed else 0)


def run_test(
    fname: Names = [ALL],  # noqa: B006
    backend: Backend = None,
    device: Device = None,
    data: Data = DATA,
    filter_dtype: Filter = [],  # noqa: B006
    nhwc: Nhwc = False,
    nhwc_min_dim: NhwcMinDim = 3,
    four_bytes: FourBytes = False,
    impl_folder: ImplFolder = None,
    device_config: DeviceConfig = None,
    model_name: Model = "",
    strict: Strict = False,
    html_report: HtmlReport = False,
    test_result_path: ResultPath = Path("report.xlsx"),
    failure_debug_level: DebugLevel = 0,
    profile: Profile = False,
    num_iterations: Iterations = 20,
    use_db: UseDb = False,
    db_path: DbPath = DEFAULT,
    test_cases_path: TestCases = None,
    pytest_args: PytestArgs = "",
    jobs: Jobs = 1,
    case_seconds: Seconds = 120.0,
) -> None:
    """Run the stored cases, compiled by a backend or in eager on a device, and compare.

    Fails if a case fails, hangs or ends its process.
    """
    if test_cases_path is not None:
        raise typer.Exit(_run_pytest(test_cases_path, pytest_args))
    for dtype in filter_dtype:
        if dtype not in DTYPES:
            hint = did_you_mean(nearest(dtype, DTYPES))
            raise typer.BadParameter(f"unknown dtype {dtype!r}.{hint}", param_hint="--filter_dtype")
    unit = replace(
        _unit(backend, device, data, model_name, impl_folder, device_config),
        filter_dtype=tuple(filter_dtype), nhwc_min_dim=nhwc_min_dim if nhwc else 0,
        four_bytes=four_bytes, strict=strict, debug_level=failure_debug_level,
        profile=num_iterations if profile else 0,
    )  # fmt: skip
    database = _database(db_path) if use_db else None
    raise typer.Exit(_compared(fname, unit, Processes(jobs, case_seconds), test_result_path,
                               html_report, database))  # fmt: skip


def gen_case(
    fname: Names = [ALL],  # noqa: B006
    backend: Backend = None,
    device: Device = None,
    data: Data = DATA,
    model_name: Model = "",
    impl_folder: ImplFolder = None,
    device_config: DeviceConfig = None,
    case_output_dir: Annotated[
        Path, typer.Option("--case_output_dir", help="The folder of the files.")
    ] = CASES,
) -> None:
    """Write the stored cases as files of pytest, an operator each."""
    unit = _unit(backend, device, data, model_name, impl_folder, device_config)
    names = _usable(lambda: stored_operators(fname, unit))
    from dicp.conformance.suite.generated import write_test_files  # imports pytest

    written = write_test_files(names, unit, case_output_dir)
    sys.stdout.write(f"{len(written)} files in {case_output_dir}\n")


def _run_pytest(path: Path, options: str) -> int:
    """Run files that `gen_case` wrote; the exit status."""
    if not path.exists():
        raise typer.BadParameter(f"there is no {path}: `gen_case` writes it",
                                 param_hint="--test_cases_path")  # fmt: skip
    try:
        pytest = importlib.import_module("pytest")
    except ImportError as error:
        raise MissingPackageError("pytest", "files of test cases", "test") from error
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise typer.BadParameter(f"{options!r}: {error}", param_hint="--pytest_args") from error
    return int(pytest.main([str(path), *words]))


def _unit(
    backend: str | None, device: str | None, data: Path, model_name: str,
    impl_folder: Path | None, device_config: Path | None,
) -> CaseUnit:  # fmt: skip
    """What runs stored cases, with names that are checked."""
    if backend is None:
        backend = "" if device is not None else name_of("")
    check_names(device or "cpu", backend)
    if device_config is None and impl_folder is not None:
        device_config = found_in(impl_folder)
    data, model = _of_model(data, model_name)
    config = str(device_config.resolve()) if device_config else ""
    return CaseUnit("", "run_test", device or "cpu", str(data), (), backend, model=model,
                    config=config)  # fmt: skip


def _database(url: str) -> Path:
    try:
        return path_of(url)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--db_path") from error


def _compared(
    names: Sequence[str], unit: CaseUnit, processes: Processes, workbook: Path, html: bool,
    database: Path | None,
) -> int:  # fmt: skip
    """Run, print a line for each case, write the reports; the exit status."""
    log = logger()
    found = _usable(
        lambda: compare(names, unit, processes, lambda row: log_row(log, row, unit.debug_level))
    )
    for skip in found.unused:
        sys.stdout.write(f"a skip matches no case: {skip}\n")
    of = f" of {Path(unit.model).stem}" if unit.model else ""
    what = f"{f'compiled by {unit.backend}, ' if unit.backend else ''}on {unit.device}"
    title = f"Operator cases{of} {what}"
    written = write_reports(found.rows, workbook, html, title)
    if database is not None:
        _keep(database, title, found.rows)
        written.append(database)
    sys.stdout.write(f"{totals(found.rows)}; {', '.join(map(str, written))}\n")
    return 1 if found.failures else 0


def _keep(database: Path, title: str, rows: Sequence[Row]) -> None:
    """Keep a run, and print how it differs from the last one of the title."""
    changes = kept(database, title, rows)
    if changes is not None:
        sys.stdout.write(f"{len(changes)} results differ from those of the last run\n")
        sys.stdout.write("".join(f"{change}\n" for change in changes))


def convert_config(
    file: Annotated[Path, typer.Argument(help="device_configs.py of public DIOPI.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The TOML file.")] = Path(FILE),
) -> None:
    """Convert a device configuration in Python into TOML; it is parsed, not run."""
    out.write_text(converted(file), "utf-8")
    sys.stdout.write(f"{out}\n")


def convert_cases(
    file: Annotated[Path, typer.Argument(help="diopi_configs.py of public DIOPI.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The case file.")] = Path("cases.toml"),
) -> None:
    """Convert a case file in Python into TOML; it is parsed, not run."""
    out.write_text(converted_cases(file), "utf-8")
    sys.stdout.write(f"{out}\n")


def coverage(
    backend: Annotated[str, typer.Option(help="A backend of dicp; empty: the host's.")] = "",
    report: Annotated[
        Path | None, typer.Option(help="report.json of run_test, for the failing cases.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the tables.")] = Path("."),
) -> None:
    """Write how a backend handles each operator, and in how many cases it failed."""
    backend = name_of(backend)
    name = backend.removesuffix(SUFFIX)
    if name not in discover():
        known = sorted(f"{target}{SUFFIX}" for target in discover())
        raise typer.BadParameter(f"{backend!r} is none of {known}", param_hint="--backend")
    rows = coverage_of(find_target(name), report)
    written = write_coverage(rows, out, f"Operators of {backend}")
    counts = Counter(row.decision for row in rows)
    failing = sum(bool(row.failing) for row in rows)
    decided = ", ".join(f"{counts[decision]} {decision}" for decision in DECISIONS)
    sys.stdout.write(f"{decided}, {failing} failing; {', '.join(map(str, written))}\n")


def list_operators(fname: Names = [ALL], model_name: Model = "") -> None:  # noqa: B006
    """List the operators that there are cases for."""
    known = None
    if model_name:
        known = sorted(model_entries(Path(_of_model(Path(), model_name)[1])))
    sys.stdout.write("".join(f"{name}\n" for name in _usable(lambda: chosen(fname, known))))


def get_model_list() -> None:
    """List the models that there are recorded cases of, each with its operators."""
    for model in model_names():
        operators = sorted(model_entries(model_file(model)))
        sys.stdout.write(f"{model}: {', '.join(operators)}\n")


def _of_model(data: Path, model: str) -> tuple[Path, str]:
    """The folder of a model's data, and the file of its list; of no model, as they are."""
    if not model:
        return data, ""
    try:
        path = model_file(model).resolve()
    except UnknownModelError as error:
        raise typer.BadParameter(str(error), param_hint="--model_name") from error
    return data / path.stem, str(path)


def _usable(call: Any) -> Any:
    """The result of a call; an unknown operator is an error of the command line."""
    try:
        return call()
    except UnknownOperatorError as error:
        raise typer.BadParameter(str(error), param_hint="--fname") from error


def check_names(device: str, backend: str) -> None:
    """Raises BadParameter for a device or backend that no test could use."""
    try:
        if backend:
            torch.compile(check_names, backend=backend)
    except RuntimeError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--backend") from unknown
    problem = "" if device == EAGER_DEVICE else device_problem(device)  # processes register it
    if problem:
        raise typer.BadParameter(problem, param_hint="--device")
