"""What can go wrong around a compilation: compilers, cache folders, other processes."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import COMPILER, server
from support.processes import script
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from dicp import Backend, store
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.observe import GraphReport, Observer
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
from dicp.loop.runtime.plan import ExecutionPlan
from dicp.target import find_target
from dicp.toolchain import OUTPUT
from dicp.vendor.cpu.toolchain import compile_shared, find_toolchain


def fn(x: Tensor) -> Tensor:
    return torch.relu(x * 3) + 1


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


BAD = {
    "half a library": f'{{real}} "$@" && truncate -s 5000 {OUTPUT}',
    "without kernels": f"echo 'int f;' > g.cpp; {{real}} -shared g.cpp -o {OUTPUT}",
    "no text": "head -c 999 /dev/urandom; exit 1",
    "a folder": f"mkdir {OUTPUT}",
    "an undefined symbol": "echo 'void gone(); static int x = (gone(), 1);' > g.cpp; "
    '{real} "$@" g.cpp',
}


@pytest.mark.parametrize("name", BAD)
def test_bad_compilers_are_told_or_left_for_eager(tmp_path: Path, name: str) -> None:
    version = '[ "$1" = --version ] && echo bad 1.0 && exit 0\n'
    body = BAD[name].format(real=find_toolchain(Config()).compiler)
    options = {"cxx": script(tmp_path / "bad", version + body), "cache_dir": tmp_path / "c"}
    with pytest.raises((CompilerError, BackendCompilerFailed)) as caught:
        run(Backend("cpu", **options))
    assert isinstance(cause_of(caught.value), (CompilerError, ToolchainError))
    with pytest.warns(FallbackWarning, match="running eagerly"):
        run(Backend("cpu", **options, on_compile_error="eager"))
    assert not entries(tmp_path, "unit.so"), "nothing bad is kept"


# ---- damaged, external, unwritable cache folders -------------------------------------------------


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


class Hostile:
    """Pickled: makes a folder wherever it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_entries_that_somebody_else_signed_are_never_read(tmp_path: Path) -> None:
    """A pickle that acts, and a library with a constructor, under manifests of another secret."""
    run(Backend("cpu", cache_dir=tmp_path / "c"))
    sign = "__attribute__((constructor)) static void f() { mkdir(PATH, 0700); }"
    text = f'#include <sys/stat.h>\n#define PATH "{tmp_path / "loaded"}"\n{sign}\n'
    content = {
        "result": pickle.dumps(Hostile(tmp_path / "read")),
        "unit.so": compile_shared(find_toolchain(Config()), {"a.cpp": text}, "a.cpp"),
    }
    for name, planted in content.items():
        for path in entries(tmp_path, name):
            files = {p.name: p.read_bytes() for p in path.parent.iterdir()} | {name: planted}
            del files["manifest.json"]
            kind, key = path.parts[-4], path.parts[-2]
            for other, data in files.items():
                (path.parent / other).unlink()
                (path.parent / other).write_bytes(data)
            manifest = store._signed_manifest(files, kind, key, b"x" * store.SECRET_BYTES)
            (path.parent / "manifest.json").write_bytes(manifest)
    find_target.cache_clear()
    with pytest.warns(CacheWarning, match="its manifest was not written by this user"):
        run(Backend("cpu", cache_dir=tmp_path / "c"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


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


def start(environment: dict[str, str], program: str = PROGRAM) -> Future[Any]:
    command = ["-W", "error::dicp.errors.CacheWarning", "-c", program]
    pool, run = ThreadPoolExecutor(1), server(*COMPILER).run
    running = pool.submit(run, command, env={**os.environ, **environment}, check=True)
    pool.shutdown(wait=False)
    return running


def test_two_processes_compile_once_and_a_third_not_at_all(tmp_path: Path) -> None:
    cxx, log = counting_compiler(tmp_path)
    environment = {"DICP_CXX": cxx, "DICP_CACHE_DIR": str(tmp_path / "c"), "OMP_NUM_THREADS": "1"}
    both = [start(environment) for _ in range(2)]
    for process in both:
        process.result()
    commands = [line.split() for line in log.read_text().splitlines()]
    mains = [word for command in commands for word in command if word.endswith(".cpp")]
    assert mains.count("driver.cpp") == 1
    # Forward and backward; each process may split the kernels that are missing in its own way.
    assert mains.count("unit.cpp") <= 4
    log.write_text("")
    start(environment).result()
    assert log.read_text() == "", "the second start compiles nothing"


THREADS = """
import threading, torch
barrier, failures = threading.Barrier(8), []
def work(k):
    def fn(x):
        return torch.relu(x * 3) + k % 2
    try:
        barrier.wait()
        x = torch.randn(4, 5)
        run = torch.compile(fn, backend="cpugraph" if k % 4 else "dicp")
        torch.testing.assert_close(run(x), fn(x))
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
assert not failures, failures
from dicp.dynamo_bridge import backend
assert torch._dynamo.lookup_backend("cpugraph") is backend.cpugraph
"""
FORK = """
import os, signal
signal.alarm(100)
x, known = torch.randn(4, 5), torch.compile(lambda t: torch.relu(t) * 2, backend="cpugraph")
known(x)
child = os.fork()
torch.testing.assert_close(known(x), torch.relu(x) * 2)
z = torch.compile(lambda t: torch.relu(t + 2), backend="cpugraph")(x)
torch.testing.assert_close(z, torch.relu(x + 2))
assert child == 0 or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
os._exit(0)
"""


def test_threads_that_use_the_backend_first_and_then_a_fork(tmp_path: Path) -> None:
    """The fork runs what its parent has compiled, and compiles what it has not."""
    start({"DICP_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}, THREADS + FORK).result()


EIGHT = """
import os, signal, torch, dicp
signal.alarm(900)
children = []
while len(children) < 7 and (not children or children[-1]):
    children.append(os.fork())
child = bool(children) and not children[-1]
failed = 1
try:
    exec(PROGRAM)
    failed = 0
finally:
    if child:
        os._exit(failed)
ended = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
assert ended == [0] * 7, ended
"""


@pytest.mark.sweep
def test_eight_processes_beside_one_that_clears_the_cache(tmp_path: Path) -> None:
    """What disappears is built again, without a warning, and never an error."""
    program = f"PROGRAM = {PROGRAM!r}\n{EIGHT}"
    all_eight = start({"DICP_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}, program)
    cache = Cache.open(Config(cache_dir=tmp_path))
    removed = 0
    while not all_eight.done():
        removed += cache.clear().entries + cache.gc(0).entries
        time.sleep(0.001)
    all_eight.result()
    assert removed > 0 and not cache.trouble


@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_a_cache_that_keeps_nothing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another process cleared it after every write: what is loaded is what was built."""
    put = Cache.put

    def put_and_clear(self: Cache, *args: Any) -> Any:
        entry = put(self, *args)
        self.clear()
        return entry

    monkeypatch.setattr(Cache, "put", put_and_clear)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        run(Backend(target, cache_dir=tmp_path, runs_on="simulator"))


def test_dumps_of_many_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    config, ready = Config(dump=tmp_path), threading.Barrier(8)

    def observe(_: int) -> None:
        ready.wait()
        for _ in range(20):
            Observer(config, GraphReport("forward", "graph1"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(observe, range(8)))
    assert len(list(tmp_path.iterdir())) == 160


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
def test_compiled_graph_refuses_other_inputs(
    other: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, made = find_target("cpu"), []
    load = target.load
    monkeypatch.setattr(target, "load", lambda *a: made.append(load(*a)) or made[-1])
    run(Backend("cpu", cache=False))
    with pytest.raises(InputMismatchError, match="input 0 of the compiled graph is"):
        ExecutionPlan(made[0].loaded, {}, [other])
