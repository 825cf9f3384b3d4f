"""What can go wrong around a compilation: compilers, cache folders, other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from dicp import Backend
from dicp.config import Config
from dicp.errors import (
    CacheWarning,
    CompilerError,
    ConfigValueError,
    DeviceMovedError,
    FallbackWarning,
    InputMismatchError,
    ToolchainError,
    UnknownOptionError,
    UnsupportedOperatorError,
)
from dicp.loop.runtime.plan import Bound
from dicp.target import find_target
from dicp.vendor.cpu.toolchain import find_toolchain


def fn(x: Tensor) -> Tensor:
    return torch.relu(x * 3) + 1


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def counting_compiler(folder: Path) -> tuple[str, Path]:
    """A compiler that writes a line to a file for every compilation, and that file."""
    real, log = find_toolchain(Config()).compiler, folder / "runs"
    log.touch()
    body = f'[ "$1" = --version ] || echo "$@" >> {log}\nexec {real} "$@"'
    return script(folder / "cxx", body), log


@pytest.fixture(autouse=True)
def fresh_target() -> Iterator[None]:
    """Libraries already loaded by this process would hide what is in the cache."""
    find_target.cache_clear()
    yield
    find_target.cache_clear()


def cause_of(error: BaseException) -> BaseException:
    """The error of the backend, whether Dynamo wraps it or not."""
    return getattr(error, "inner_exception", None) or error.__cause__ or error


def run(compiler: Backend, x: Tensor | None = None) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 5) if x is None else x
    torch.testing.assert_close(torch.compile(fn, backend=compiler)(x), fn(x))


# ---- compilers -----------------------------------------------------------------------------------


def test_missing_compiler(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiler = Backend("cpu", cxx="/nonexistent", cache_dir=tmp_path)
    with pytest.raises((ToolchainError, BackendCompilerFailed)) as caught:
        torch.compile(model, backend=compiler)(torch.ones(2, 4))
    error = cause_of(caught.value)
    assert isinstance(error, ToolchainError)
    assert "/nonexistent" in str(error) and "python -m dicp doctor" in str(error)
    assert model(torch.ones(2, 4)).shape == (2, 4), "the eager model stays usable"


def test_missing_compiler_runs_eagerly_on_request(tmp_path: Path) -> None:
    compiler = Backend(
        "cpu", cxx="/nonexistent", cache_dir=tmp_path, on_compile_error="eager", cache=False
    )
    with pytest.warns(FallbackWarning, match="running eagerly"):
        run(compiler)
    (report,) = compiler.reports
    assert report.counts["eager"] == 3, "what runs eagerly is counted and explained"
    assert all(node.reason for node in report.nodes)


def test_compiler_that_fails(tmp_path: Path) -> None:
    body = 'if [ "$1" = --version ]; then echo bad 1.0; exit 0; fi\n'
    body += "for i in 1 2 3 4 5; do echo unit.cpp:$i: error: no $i >&2; done; exit 1"
    compiler = Backend("cpu", cxx=script(tmp_path / "bad", body), cache_dir=tmp_path / "c")
    with pytest.raises((CompilerError, BackendCompilerFailed)) as caught:
        run(compiler)
    error = cause_of(caught.value)
    assert isinstance(error, CompilerError)
    message = str(error)
    assert "error: no 1" in message and "error: no 5" not in message and "and 2 more" in message
    assert "error: no 5" in error.diagnostics
    assert len(message) < 4000
    run(Backend("cpu", cache_dir=tmp_path / "c"))  # nothing broken was kept


def test_sources_of_a_failed_compilation_are_named(tmp_path: Path) -> None:
    real = find_toolchain(Config()).compiler
    body = f'case "$*" in *unit.cpp*) echo error: no >&2; exit 1;; esac\nexec {real} "$@"'
    compiler = Backend("cpu", cxx=script(tmp_path / "bad", body), cache_dir=tmp_path / "c")
    with pytest.raises((CompilerError, BackendCompilerFailed)) as caught:
        run(compiler)
    assert "aten.relu.default" in str(caught.value) and "test_trust.py:" in str(caught.value)


# ---- damaged, foreign, unwritable cache folders --------------------------------------------------


def entries(folder: Path, name: str) -> list[Path]:
    return [p for p in folder.rglob(name) if p.is_file()]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("unit.so", b""),
        ("unit.so", b"\x7fELF not really"),
        ("artifact.json", b'{"target": "cpu"'),
        ("manifest.json", b"{}"),
        ("result", b"not a pickle"),
    ],
)
def test_damaged_entries_are_rebuilt(tmp_path: Path, name: str, content: bytes) -> None:
    run(Backend("cpu", cache_dir=tmp_path))
    damaged = entries(tmp_path, name)
    assert damaged
    for path in damaged:
        path.unlink()  # a new file: this process has the old one mapped
        path.write_bytes(content)
    find_target.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(Backend("cpu", cache_dir=tmp_path))
    if name == "unit.so":
        assert any(issubclass(w.category, CacheWarning) for w in caught)
    find_target.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        run(Backend("cpu", cache_dir=tmp_path))


@pytest.mark.parametrize("kind", ["unit", "kernel", "graph", "aot"])
def test_entries_may_disappear(tmp_path: Path, kind: str) -> None:
    run(Backend("cpu", cache_dir=tmp_path))
    for folder in [p for p in tmp_path.rglob(kind) if p.is_dir()]:
        shutil.rmtree(folder)
    find_target.cache_clear()
    run(Backend("cpu", cache_dir=tmp_path))


def test_folder_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(CacheWarning):
        run(Backend("cpu", cache_dir=folder))
    assert not entries(folder, "unit.so")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.warns(CacheWarning):
        run(Backend("cpu", cache_dir=tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "rename", full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        run(Backend("cpu", cache_dir=tmp_path / "c"))


def test_no_cache_at_all(tmp_path: Path) -> None:
    run(Backend("cpu", cache=False, cache_dir=tmp_path))
    assert not entries(tmp_path, "unit.so")


# ---- processes -----------------------------------------------------------------------------------

PROGRAM = """
import torch
def fn(x):
    return torch.softmax(x * 2, -1).sum(0) + 1
x = torch.arange(12.0).reshape(3, 4).requires_grad_()
y = torch.compile(fn, backend="cpugraph")(x)
torch.testing.assert_close(y, fn(x))
y.sum().backward()
"""


def start(environment: dict[str, str], program: str = PROGRAM) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error::dicp.errors.CacheWarning", "-c", program],
        env={**os.environ, **environment}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-3000:]


def test_two_processes_compile_once_and_a_third_not_at_all(tmp_path: Path) -> None:
    cxx, log = counting_compiler(tmp_path)
    environment = {"DICP_CXX": cxx, "DICP_CACHE_DIR": str(tmp_path / "c"), "OMP_NUM_THREADS": "1"}
    both = [start(environment) for _ in range(2)]
    for process in both:
        finish(process)
    commands = [line.split() for line in log.read_text().splitlines()]
    mains = [word for command in commands for word in command if word.endswith(".cpp")]
    assert mains.count("driver.cpp") == 1
    # Forward and backward; each process may split the kernels that are missing in its own way.
    assert mains.count("unit.cpp") <= 4
    log.write_text("")
    finish(start(environment))
    assert log.read_text() == "", "the second start compiles nothing"


# ---- options -------------------------------------------------------------------------------------


def test_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises((UnknownOptionError, BackendCompilerFailed)) as caught:
        torch.compile(fn, backend="cpugraph", options={"fallbck": "error"})(torch.ones(3))
    assert "Did you mean 'fallback'?" in str(caught.value)
    assert "cache_dir" in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"fallback": "never"}, {"cache": "maybe"}, {"compile_jobs": -1}]
)
def test_bad_value_says_what_is_expected(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigValueError, BackendCompilerFailed)) as caught:
        torch.compile(fn, backend="cpugraph", options=options)(torch.ones(3))
    (name, value) = next(iter(options.items()))
    assert f"option {name!r} is {value!r}; expected" in str(caught.value)


def test_forbidden_fallback_names_operator_shapes_target_and_line(tmp_path: Path) -> None:
    def uses_eigenvalues(x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x + 1)

    compiler = Backend("cpu", fallback="error", cache_dir=tmp_path)
    with pytest.raises((UnsupportedOperatorError, BackendCompilerFailed)) as caught:
        torch.compile(uses_eigenvalues, backend=compiler)(torch.ones(3, 3))
    error = cause_of(caught.value)
    assert isinstance(error, UnsupportedOperatorError)
    assert "linalg_eigh" in error.op
    assert error.target == "cpu"
    assert "float32[3, 3]" in str(error)
    assert "test_trust.py:" in error.user_line


# ---- inputs --------------------------------------------------------------------------------------


def test_inputs_on_another_device() -> None:
    compiler = Backend("cpu")

    def moved(x: Tensor) -> Tensor:
        return x + 1

    def call(gm: Any, inputs: Any) -> Any:
        return compiler(gm, [torch.empty(3, device="meta"), _Elsewhere()])

    class _Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("xpu", 0)

    with pytest.raises((DeviceMovedError, BackendCompilerFailed)) as caught:
        torch.compile(moved, backend=call)(torch.ones(3))
    assert "xpu" in str(caught.value) and "Move the model" in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [torch.ones(4, 6), torch.ones(4, 5, dtype=torch.float64), torch.ones(5, 4).t()],
    ids=["shape", "dtype", "strides"],
)
def test_compiled_graph_refuses_other_inputs(other: Tensor) -> None:
    target, made = find_target("cpu"), []
    load = target.load
    target.load = lambda *a: made.append(load(*a)) or made[-1]  # type: ignore[method-assign]
    run(Backend("cpu", cache=False))
    with pytest.raises(InputMismatchError, match="input 0 of the compiled graph is"):
        Bound(made[0].loaded, {}, [other])
