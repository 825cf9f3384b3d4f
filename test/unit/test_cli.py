"""The command line, on targets that the tests register; messages as a user reads them."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import TORCH, server
from typer.testing import CliRunner, Result

from dicp import cli, discovery
from dicp import target as target_module
from dicp.cache import Cache, key_of
from dicp.config import (
    DEVICE_VARIABLES,
    OPTIONS,
    PATH,
    SWITCH_VARIABLES,
    Config,
    Option,
    vendor_option,
)
from dicp.discovery import discover
from dicp.errors import TargetNotFoundError
from dicp.errors.command_line import run_command_line
from dicp.target import Check


@dataclass(frozen=True)
class FakeTarget:
    name: str
    checks: tuple[Check, ...]
    on_simulator: bool = False
    options: tuple[Option, ...] = ()

    def doctor(self, config: Config) -> list[Check]:
        return list(self.checks)

    def simulated(self, config: Config) -> bool:
        return self.on_simulator


@dataclass(frozen=True)
class OperatorRow:
    op: str
    decision: str
    reason: str


READY = FakeTarget("ready", (Check("compiler", True, "cc 13.2, -O3"), Check("threads", True, "2")))
SIMULATED = FakeTarget("simulated", (Check("sdk", True, "clean-room [bold]x[/bold]"),), True)
MISSING = FakeTarget("missing", (Check("sdk", False, "no SDK in /opt", "install the SDK"),))
ROWS = [
    OperatorRow("aten.sort.default", "eager", "no rule: sorting is a library's work"),
    OperatorRow("aten.add.Tensor", "compiled", "pointwise"),
    OperatorRow("aten.mm.default", "library", "matrix product"),
    OperatorRow("aten.abs.default", "compiled", "pointwise"),
]


@pytest.mark.parametrize(
    ("name", "simulated"),
    [("cpu", False), *((name, True) for name in ("ascend", "tops", "triton", "maca", "dipu"))],
)
def test_targets_tell_whether_they_run_on_a_simulator(name: str, simulated: bool) -> None:
    if torch.cuda.is_available() and name in ("triton", "maca"):
        simulated = False
    assert target_module.find_target(name).simulated(Config(cache=False)) == simulated


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path / "cache"))
    return Cache.open(Config.from_env())


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*targets: FakeTarget, broken: tuple[str, ...] = ()) -> None:
        known = {target.name: target for target in targets}

        def find(name: str) -> FakeTarget:
            if name in broken:
                raise ImportError("libsdk.so.1: cannot open shared object file")
            return known[name]

        for module in (cli, discovery):
            monkeypatch.setattr(module, "discover", lambda: dict.fromkeys([*known, *broken]))
        monkeypatch.setattr(target_module, "find_target", find)

    return install


def run(*arguments: str, status: int = 0) -> str:
    result: Result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def test_doctor_shows_every_target_and_the_fix(install: Any, tmp_path: Path) -> None:
    install(READY, SIMULATED, MISSING)
    output = run("doctor")
    assert "ready: device" in output and "cc 13.2, -O3" in output
    assert "simulated: simulator" in output and "clean-room [bold]x[/bold]" in output
    assert "missing: missing" in output
    assert "no SDK in /opt" in output and "install the SDK" in output
    assert "torch 2." in output and "python 3." in output
    assert str(tmp_path) in output


def test_doctor_reads_the_options_of_a_target(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class WithToolkit(FakeTarget):
        options: tuple[Option, ...] = (
            vendor_option("ready_sdk", PATH, "DICP_READY_SDK", "the SDK", default=Path("/opt")),
        )

        def doctor(self, config: Config) -> list[Check]:
            return [Check("sdk", True, f"found in {config.vendor['ready_sdk']}")]

    install(WithToolkit("ready", ()))
    assert "found in /opt" in run("doctor")
    monkeypatch.setenv("DICP_READY_SDK", "/srv/sdk")
    assert "found in /srv/sdk" in run("doctor")


@pytest.mark.parametrize("name", sorted(discover()))
def test_doctor_of_each_target(name: str) -> None:
    output = CliRunner().invoke(cli.app, ["doctor", "--backend", name]).output
    assert "Error:" not in output and f"{name}: " in output


def test_doctor_survives_a_broken_target(install: Any) -> None:
    install(READY, broken=("other",))
    output = run("doctor")
    assert "ready: device" in output and "other: missing" in output
    assert "ImportError: libsdk.so.1" in output


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("{}['sdk']", "raises KeyError: 'sdk'"),
        ("None", "returns None, no Sequence"),
        ("['all right']", "returns str, no Check"),
    ],
)
def test_a_doctor_that_fails_is_named_with_its_line(
    result: str, problem: str, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_chip.py").write_text(
        "from test_cli import FakeTarget\n\nclass Chip(FakeTarget):\n"
        f"    def doctor(self, config):\n        return {result}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_chip", raising=False)
    monkeypatch.setitem(sys.modules, "test_cli", sys.modules[__name__])
    install(READY, importlib.import_module("acme_chip").Chip("chip", ()))
    assert "chip: missing" in (output := run("doctor")) and "ready: device" in output
    (check,) = cli._examined("chip").checks
    line = 5 if "raises" in problem else 4
    place = tmp_path / "acme_chip.py"
    assert f"target 'chip': doctor {problem}, at {place}:{line}. Fix" in check.detail


@pytest.mark.parametrize("name", ["missing", "missinggraph"])
def test_doctor_fails_for_a_missing_target_that_was_asked_for(install: Any, name: str) -> None:
    install(READY, MISSING)
    output = run("doctor", "--backend", name, status=1)
    assert "missing: missing" in output and "ready" not in output


def test_doctor_of_an_unknown_target(install: Any) -> None:
    install(READY)
    result = CliRunner().invoke(cli.app, ["doctor", "--backend", "raedy"])
    assert isinstance(result.exception, TargetNotFoundError)
    assert "Did you mean 'ready'?" in str(result.exception)


def test_ops_lists_every_operator_and_counts(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(READY)
    conversion: Any = types.ModuleType("dicp.dynamo_bridge.conversion")
    conversion.operator_table = lambda target, choice: ROWS if target is READY else []
    monkeypatch.setitem(sys.modules, conversion.__name__, conversion)
    output = run("ops", "--backend", "readygraph")
    assert all(row.op in output and row.reason in output for row in ROWS)
    assert output.index("aten.abs.default") < output.index("aten.sort.default")
    assert output.endswith("4 operators: 2 compiled, 1 eager, 1 library\n")


def test_ops_needs_a_backend() -> None:
    assert "--backend" in run("ops", status=2)


def test_config_describes_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_CXX_FLAGS", "-O1 -g")
    monkeypatch.setenv("DIPU_FORCE_FALLBACK_OPS_LIST", "conv2d,add.out")
    monkeypatch.setenv("DIPU_TORCH_ALLOCATOR_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("DITORCH_DEVICE", "acme")
    output = run("config")
    for option in (*OPTIONS, *DEVICE_VARIABLES, *SWITCH_VARIABLES):
        assert option.name in output and all(name in output for name in option.environment)
    assert "-O1 -g" in output and "conv2d add.out" in output
    assert "acme" in output and "max_split_size_mb:64" in output and "{" not in output


def test_config_names_a_wrong_variable_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITORCH_COMPILE", "perhaps")
    result = CliRunner().invoke(cli.app, ["config"])
    assert "environment variable DITORCH_COMPILE is 'perhaps'" in str(result.exception)


def test_cache_info(cache: Cache, tmp_path: Path) -> None:
    cache.put("art", key_of("a"), {"x": bytes(2048)})
    output = run("cache", "info")
    assert str(tmp_path / "cache") in output
    assert "art" in output and "2.3 KiB" in output


def test_cache_clear(cache: Cache) -> None:
    cache.put("art", key_of("a"), {"x": b"1"})
    assert "removed from" in run("cache", "clear")
    assert cache.info().entries == 0


@pytest.mark.parametrize("command", [("clear",), ("gc", "--max-mb", "0")])
def test_entries_that_cannot_be_removed_are_told_without_a_warning(
    command: tuple[str, ...], cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is mounted read-only; nothing that is compiled is lost by it."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cache.put("art", key_of("a"), {"x": b"1"})
    monkeypatch.setattr(os, "mkdir", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(cli.app, ["cache", *command])
    assert done.exit_code == 1 and cache.info().entries == 1 and not cache.trouble
    assert "(entries cannot be removed: Read-only file system)" in done.stdout


def test_cache_gc(cache: Cache) -> None:
    cache.put("art", key_of("a"), {"x": b"1"})
    run("cache", "gc")
    assert cache.info().entries == 1
    run("cache", "gc", "--max-mb", "0")
    assert cache.info().entries == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("config",), ("cache", "info"), ("cache", "clear"), ("cache", "gc"),
        ("new-vendor", "made", "--family", "loop", "--package", "made"),
        ("new-vendor", "made", "--family", "graph", "--package", "made"),
    ],
)  # fmt: skip
def test_command_imports_no_pytorch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ending = (
        "import sys; from dicp.cli import app; app(standalone_mode=False); "
        "print([m for m in ('torch', 'sympy', 'dicp.target') if m in sys.modules])"
    )
    done = server().run(["-c", ending, *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_prints_an_error_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_FUSE", "maybe")
    done = server(*TORCH).run(["-m", "dicp", "cache", "info"])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "error: environment variable DICP_FUSE is 'maybe'; expected one of 1, true, on, yes, 0, "
        "false, off, no. Use 1 to switch it on and 0 to switch it off.\n"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"),
         "No space left on device. Make room on the disk, or give a path on another one."),
        (PermissionError(errno.EACCES, "Permission denied", "out/a"),
         "'out/a': Permission denied. Give a path that this user may use, or change its "
         "permissions."),
        (OSError("/tmp/a.so: file too short"), "/tmp/a.so: file too short."),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_used_is_an_error_that_says_what_to_do(
    error: OSError, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(prog_name: str) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command_line(app, "python -m dicp")
    assert (ended.value.code, capsys.readouterr().err) == (1, f"error: {message}\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**40, "1024.0 GiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert cli._size(count) == text


def test_the_next_step_of_a_new_vendor_can_be_typed(tmp_path: Path) -> None:
    folder = str(tmp_path / "a folder")
    made = CliRunner().invoke(
        cli.app, ["new-vendor", "chip", "--family", "loop", "--package", folder]
    )
    assert f"pip install -e '{folder}'; then" in made.stdout.replace("\n", "")
