"""The command line: what is installed, what a target does with each operator, the disk cache.

python -m dicp doctor [--backend NAME]
python -m dicp ops --backend NAME
python -m dicp cache info|clear|gc
python -m dicp config
python -m dicp device ops|check LIBRARY
python -m dicp new-vendor NAME --family loop|graph [--package DIR]
python -m dicp vendor-report NAME [--results FILE]
python -m dicp report [--out FILE] FOLDER|SCRIPT [ARGUMENTS]

Each command imports what only it needs when it runs: PyTorch and the targets take seconds.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dicp.cache import Cache, CacheInfo
from dicp.config import (
    DEVICE_VARIABLES,
    OPTIONS,
    SWITCH_VARIABLES,
    Config,
    DeviceSettings,
    Option,
    SwitchSettings,
)
from dicp.discovery import discover, target_name
from dicp.errors.command_line import run_command_line

if TYPE_CHECKING:
    from dicp.target import Check, Target

_PACKAGES = ("dicp", "torch", "numpy")
_PIPE_WIDTH = 240

app = typer.Typer(
    help="dicp: a torch.compile backend compiler with code generation per vendor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Look at and clean up the disk cache.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
device_app = typer.Typer(help="The eager device and its vendors' runtimes.", no_args_is_help=True)
app.add_typer(device_app, name="device")

Backend = Annotated[str, typer.Option("--backend", help="A backend or target name.")]


@app.command()
def doctor(backend: Backend = "") -> None:
    """Check each installed target: on its device, on a simulator or missing, and the fix.

    Fails if the target asked for by --backend is missing, or if no target is usable.
    """
    config = Config.from_env()
    names = [target_name(backend)] if backend else sorted(discover())
    examined = {name: _examined(name) for name in names}
    console = _console()
    console.print(_versions())
    console.print(_cache_line(Cache.open(config).info()))
    for name, found in examined.items():
        console.print(_checks_table(name, found))
    if all(found.state == "missing" for found in examined.values()):
        raise typer.Exit(1)


@app.command()
def ops(backend: Backend) -> None:
    """List every core ATen operator and what the target decides about it, with the reason.

    A decision is: compiled, library (a library call), view, decomposed or eager.
    """
    name = target_name(backend)
    from dicp.dynamo_bridge.conversion import operator_table
    from dicp.operator_choice import OperatorChoice

    target = _target(name)
    choice = OperatorChoice.of(Config.from_env())
    rows = sorted(operator_table(target, choice), key=lambda row: str(row.op))
    table = _table("operator", "decision", "reason", title=f"operators of {target.name}")
    for row in rows:
        table.add_row(*_cells(str(row.op), row.decision, row.reason))
    _print_counted(table, [row.decision for row in rows])


@device_app.command("ops")
def device_ops() -> None:
    """List every ATen operator, the path it takes on the eager device, and its dtypes there."""
    from dicp.device.active import registered  # registers the device in this process
    from dicp.device.listing import rows

    found = rows(registered)
    table = _table("operator", "path", "dtypes", title="operators of the device")
    for row in found:
        table.add_row(*_cells(row.operator, row.path, row.dtypes))
    _print_counted(table, [row.path.partition(":")[0] for row in found])


@device_app.command("check")
def device_check(library: Path) -> None:
    """Test a vendor's runtime library against the interface; fails if anything is wrong."""
    from dicp.device.runtime_check import check_library

    findings = check_library(library)
    console = _console()
    for finding in findings:
        console.print(Text(f"{'ok' if finding.ok else 'FAILED':8}{finding.name} {finding.detail}"))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command("new-vendor")
def new_vendor(
    name: Annotated[str, typer.Argument(help="The vendor's name, a lower-case identifier.")],
    family: Annotated[
        Literal["loop", "graph"],
        typer.Option(help="loop: programmed by kernels; graph: has a graph compiler."),
    ],
    package: Annotated[
        Path | None, typer.Option(help="An empty or new folder; NAME_dicp by default.")
    ] = None,
) -> None:
    """Write a working package for a new vendor: target, ten rules, code generator, simulator."""
    from dicp.new_vendor import new_vendor as write

    folder = package or Path(f"{name}_dicp")
    console = _console()
    for path in write(name, family, folder):
        console.print(Text(str(path)))
    console.print(Text(f"next: pip install -e {quote(str(folder))}; then {folder / 'README.md'}"))


@app.command("vendor-report")
def vendor_report(
    name: Annotated[str, typer.Argument(help="A backend or target name.")],
    results: Annotated[
        list[Path] | None, typer.Option(help="A file that pytest --results wrote; repeatable.")
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="How many next steps are listed.")] = 20,
) -> None:
    """Report a target's coverage of operators and tests, and the next steps by gain."""
    from dicp.vendor_report import vendor_report as reported

    report = reported(_target(target_name(name)), results or ())
    console = _console()
    table = _table("", "counts", title=f"{report.target}: how far it is")
    for title, counts in (
        ("core ATen", report.core), ("public DICP's tests", report.public),
        ("operators that dicp has rules for", report.listed),
        ("operator tests", report.tests), ("model tests", report.models),
    ):  # fmt: skip
        listed = ", ".join(f"{counts[key]} {key}" for key in sorted(counts))
        table.add_row(*_cells(title, listed or "none run: give --results"))
    console.print(table)
    for test in report.failures:
        console.print(Text(f"failed: {test}"))
    steps = _table("operator", "eager calls", "why", "", title="next, by gain")
    for step in report.steps[:most]:
        steps.add_row(*_cells(step.op, str(step.times), step.reason, step.hint))
    console.print(steps)


@app.command("report", context_settings={"ignore_unknown_options": True})
def report(
    source: Annotated[Path, typer.Argument(help="A folder of DICP_DUMP, or a script to run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page; options come before SOURCE.")] = Path(
        "dicp_report.html"
    ),
    tools: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A folder op_tools_results to show as well."
        ),
    ] = None,
) -> None:
    """Write one HTML page that shows a compilation: graph, times, compile time, memory, breaks."""
    from dicp.report import write_report

    path = write_report(source, out, arguments or (), tools)
    _console().print(Text(f"report written to {path}"))


@app.command("config")
def show_config(backend: Backend = "") -> None:
    """Describe every setting: option name, environment variable, default and current value.

    Those of the eager device and of `import ditorch` are variables alone. With --backend, the
    settings of that target's own, too.
    """
    own = _target(target_name(backend)).options if backend else ()
    config = Config.from_env(vendor=own)
    values = {option.name: getattr(config, option.name) for option in OPTIONS}
    device, switch = vars(DeviceSettings.from_env()), vars(SwitchSettings.from_env())
    console = _console()
    console.print(_settings_table("compilation", (*OPTIONS, *own), {**values, **config.vendor}))
    console.print(_settings_table("the eager device", DEVICE_VARIABLES, device))
    console.print(_settings_table("import ditorch", SWITCH_VARIABLES, switch))


@cache_app.command("info")
def cache_info() -> None:
    """Show where the cache is and what it holds."""
    info = Cache.open(Config.from_env()).info()
    _print_cache(_cache_line(info), info)


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every entry. Fails if entries are left."""
    _print_removed(Cache.open(Config.from_env()).clear())


@cache_app.command("gc")
def cache_gc(
    max_mb: Annotated[
        int | None, typer.Option(min=0, help="Size to reach in MiB; else cache_size_mb.")
    ] = None,
) -> None:
    """Remove the least recently used entries until the cache is within its size.

    Fails if it cannot remove them.
    """
    _print_removed(Cache.open(Config.from_env()).gc(None if max_mb is None else max_mb * 2**20))


def main() -> None:
    """Run the command line."""
    run_command_line(app, "python -m dicp")


def _console() -> Console:
    """A console that writes wide lines if stdout is not a terminal, so that grep finds all text."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


@dataclass(frozen=True)
class _Examined:
    """A target's checks, and where its programs run: device, simulator, or missing."""

    checks: Sequence[Check]
    state: str = "missing"


def _target(name: str) -> Target:
    from dicp.target import find_target

    return find_target(name)


def _examined(name: str) -> _Examined:
    from dicp.rule_errors import failure_of, result_of
    from dicp.target import Check

    target = None
    try:
        target = _target(name)
        config = Config.from_env(vendor=target.options)
        checks = result_of(target, "doctor", target.doctor(config), Sequence)
        for check in checks:
            result_of(target, "doctor", check, Check)
        if not all(check.ok for check in checks):
            return _Examined(checks)
        return _Examined(checks, "simulator" if target.simulated(config) else "device")
    except Exception as error:  # a broken third-party target must not hide the others
        error = (target and failure_of(target, error)) or error
        fix = "reinstall the package that brings this target, or report this to its authors"
        return _Examined([Check("target", False, f"{type(error).__name__}: {error}", fix)])


def _checks_table(name: str, found: _Examined) -> Table:
    table = _table("check", "", "found", "fix", title=f"{name}: {found.state}")
    for check in found.checks:
        table.add_row(*_cells(check.name, "ok" if check.ok else "missing", check.detail, check.fix))
    return table


def _settings_table(title: str, options: Sequence[Option], now: Mapping[str, object]) -> Table:
    table = _table("option", "type", "environment", "default", "now", "meaning", title=title)
    for option in options:
        row = (option.name, option.kind.name, ", ".join(option.environment), _shown(option.default))
        table.add_row(*_cells(*row, _shown(now[option.name]), option.meaning))
    return table


def _print_counted(table: Table, kinds: Sequence[str]) -> None:
    """A table of operators, and how many there are of each kind."""
    console = _console()
    console.print(table)
    counts = Counter(kinds)
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))
    console.print(Text(f"{len(kinds)} operators: {listed}"))


def _versions() -> Text:
    found = [f"{name} {_version(name)}" for name in _PACKAGES]
    return Text(", ".join([*found, f"python {platform.python_version()}"]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _print_cache(heading: Text, info: CacheInfo) -> None:
    console = _console()
    table = _table("kind", "entries", "size")
    for kind in info.kinds:
        table.add_row(*_cells(kind.kind, str(kind.entries), _size(kind.bytes)))
    table.add_row(*_cells("total", str(info.entries), _size(info.bytes)))
    console.print(heading)
    console.print(table)


def _print_removed(removed: CacheInfo) -> None:
    _print_cache(Text(f"removed from {removed.folder}{_trouble(removed)}"), removed)
    if removed.trouble:
        raise typer.Exit(1)


def _cache_line(info: CacheInfo) -> Text:
    return Text(
        f"cache: {info.folder}, {info.entries} entries, {_size(info.bytes)}{_trouble(info)}"
    )


def _trouble(info: CacheInfo) -> str:
    return f" ({info.trouble})" if info.trouble else ""


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _cells(*texts: str) -> list[Text]:
    """Literal text: an operator's or a file's name is never markup."""
    return [Text(text) for text in texts]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{each}" for key, each in value.items())
    return "" if value is None else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
