"""The command line: what is installed, what a target does with each operator, the disk cache.

python -m dicp doctor [--backend NAME]
python -m dicp ops --backend NAME
python -m dicp cache info|clear|gc
python -m dicp config
python -m dicp device ops|check LIBRARY
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dicp.cache import Cache, CacheInfo
from dicp.config import OPTIONS, Config
from dicp.errors import DicpError, TargetNotFoundError
from dicp.target import Check, discover, find_target

_SUFFIX = "graph"  # the backend "xgraph" compiles for the target "x"
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
    names = [_target_name(backend)] if backend else sorted(discover())
    examined = {name: _examined(name, config) for name in names}
    console = _console()
    console.print(_versions())
    console.print(_cache_line(Cache.open(config).info()))
    for name, checks in examined.items():
        console.print(_checks_table(name, checks))
    if not any(_state(checks) != "missing" for checks in examined.values()):
        raise typer.Exit(1)


@app.command()
def ops(backend: Backend) -> None:
    """List every core ATen operator and what the target decides about it, with the reason.

    A decision is: compiled, library (a library call), view, decomposed or eager.
    """
    name = _target_name(backend)
    # These imports cost seconds; only this command needs them.
    from dicp.dynamo_bridge.conversion import operator_table
    from dicp.operator_choice import OperatorChoice

    target = find_target(name)
    choice = OperatorChoice.of(Config.from_env())
    rows = sorted(operator_table(target, choice), key=lambda row: str(row.op))
    table = _table("operator", "decision", "reason", title=f"operators of {target.name}")
    for row in rows:
        table.add_row(*_cells(str(row.op), row.decision, row.reason))
    console = _console()
    console.print(table)
    counts = Counter(row.decision for row in rows)
    listed = ", ".join(f"{counts[decision]} {decision}" for decision in sorted(counts))
    console.print(Text(f"{len(rows)} operators: {listed}"))


@device_app.command("ops")
def device_ops() -> None:
    """List every ATen operator, the road it takes on the eager device, and its dtypes there."""
    from dicp.device import registered  # registers the device in this process
    from dicp.device.listing import rows

    found = rows(registered)
    table = _table("operator", "road", "dtypes", title="operators of the device")
    for row in found:
        table.add_row(*_cells(row.operator, row.road, row.dtypes))
    console = _console()
    console.print(table)
    counts = Counter(row.road for row in found)
    listed = ", ".join(f"{counts[road]} {road}" for road in sorted(counts))
    console.print(Text(f"{len(found)} operators: {listed}"))


@device_app.command("check")
def device_check(library: Path) -> None:
    """Test a vendor's runtime library against the interface; fails if anything is wrong."""
    from dicp.runtime_check import check_library

    findings = check_library(library)
    console = _console()
    for finding in findings:
        console.print(Text(f"{'ok' if finding.ok else 'FAILED':8}{finding.name} {finding.detail}"))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@app.command("config")
def show_config() -> None:
    """Describe every setting: option name, environment variable, default, and value now."""
    config = Config.from_env()
    table = _table("option", "type", "environment", "default", "now", "meaning")
    for option in OPTIONS:
        now = getattr(config, option.name)
        row = (option.name, option.kind.name, ", ".join(option.environment), option.default)
        table.add_row(*_cells(*row, _shown(now), option.meaning))
    _console().print(table)


@cache_app.command("info")
def cache_info() -> None:
    """Show where the cache is and what it holds."""
    info = Cache.open(Config.from_env()).info()
    _print_cache(_cache_line(info), info)


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every entry."""
    removed = Cache.open(Config.from_env()).clear()
    _print_cache(Text(f"removed from {removed.folder}"), removed)


@cache_app.command("gc")
def cache_gc(
    max_mb: Annotated[
        int | None, typer.Option(min=0, help="Size to reach in MiB; else cache_size_mb.")
    ] = None,
) -> None:
    """Remove the least recently used entries until the cache is within its size."""
    removed = Cache.open(Config.from_env()).gc(None if max_mb is None else max_mb * 2**20)
    _print_cache(Text(f"removed from {removed.folder}"), removed)


def main() -> None:
    """Run the command line; a DicpError is its message on stderr and exit status 1."""
    try:
        app(prog_name="python -m dicp")
    except DicpError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
        sys.exit(1)


def _console() -> Console:
    """A console that writes wide lines if stdout is not a terminal, so that grep finds all text."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def _target_name(backend: str) -> str:
    """The installed target that a backend name stands for. Raises TargetNotFoundError."""
    known = sorted(discover())
    for name in (backend, backend.removesuffix(_SUFFIX)):
        if name in known:
            return name
    raise TargetNotFoundError(backend, known)


def _examined(name: str, config: Config) -> list[Check]:
    try:
        return find_target(name).doctor(config)
    except Exception as error:  # a broken third-party target must not hide the others
        fix = "reinstall the package that brings this target, or report this to its authors"
        return [Check("target", False, f"{type(error).__name__}: {error}", fix)]


def _state(checks: Sequence[Check]) -> str:
    """A target is missing if a check fails, and runs on the simulator if it checks one."""
    if not all(check.ok for check in checks):
        return "missing"
    return "simulator" if any(check.name == "simulator" for check in checks) else "device"


def _checks_table(name: str, checks: Sequence[Check]) -> Table:
    table = _table("check", "", "found", "fix", title=f"{name}: {_state(checks)}")
    for check in checks:
        table.add_row(*_cells(check.name, "ok" if check.ok else "missing", check.detail, check.fix))
    return table


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


def _cache_line(info: CacheInfo) -> Text:
    trouble = f" ({info.trouble})" if info.trouble else ""
    return Text(f"cache: {info.folder}, {info.entries} entries, {_size(info.bytes)}{trouble}")


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
    return "" if value is None else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
