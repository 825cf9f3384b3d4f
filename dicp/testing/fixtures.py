"""Fixtures and hooks of dicp's tests; `dicp.pytest_plugin` loads them when an option is used."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dicp.config import is_set
from dicp.pytest_plugin import option
from dicp.testing import counts, sample

TRACE_LOG = "torch.__trace"
"""PyTorch's log of what it compiles."""
LISTED = pytest.StashKey[list[str]]()
"""Operators that stand for files of the list in use, as regular expressions."""
TURN = pytest.StashKey[tuple[int, int]]()
"""Which part of the variants, of how many, operator cases take with --sweeps."""
WHOLE = pytest.StashKey[set[str]]()
"""The test files that changes concern, whose cases take all variants."""
SAMPLES = ("sample", "sweeps")
"""Options that leave tests out, another part every few hours."""
SHARED_MEMORY = "/dev/shm"
"""Where Linux keeps files in memory. Tens of thousands of small files take minutes to remove from
a disk."""
CACHE_BYTES = 4 * 2**30
"""Free bytes that the cache of a session needs at most."""
DYNAMIC_CHOICES: dict[str, list[bool]] = {"true": [True], "false": [False], "both": [False, True]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --op, keep the cases of some operators; with --sample or --sweeps, a part of them."""
    _keep_operators(config, items)
    for name in SAMPLES:
        if option(config, name):
            _keep_part(config, items, name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Garbage is collected seldom: it would take a fifth of the time of tests that compile, and of
    collecting the tests."""
    gc.set_threshold(200_000, 20, 50)


def pytest_collection_finish(session: pytest.Session) -> None:
    from dicp.torch_private import shorten_compilations

    shorten_compilations()
    _leave_traces_out()
    gc.collect()


def pytest_runtest_logstart() -> None:
    _leave_traces_out()


def _leave_traces_out() -> None:
    """Let PyTorch trace its compilations only where a trace was asked for.

    It prints every graph for the handlers of its log, and pytest adds its own to all loggers that
    do not propagate, which `torch._logging` makes this one anew when it is set.
    """
    trace = logging.getLogger(TRACE_LOG)
    trace.propagate = True
    for handler in [*trace.handlers]:
        if getattr(handler, "root_dir", "") is None:  # PyTorch's, which removes itself once used
            trace.removeHandler(handler)


def _keep_part(config: pytest.Config, items: list[pytest.Item], name: str) -> None:
    number, parts = sample.part(option(config, name))
    changed = sample.changed_files(config.rootpath)
    tests = [item.nodeid for item in items]
    if name == "sample":
        kept = sample.sample(tests, number, parts, changed)
    else:
        marked = {item.nodeid for item in items if item.get_closest_marker("sweep")}
        kept = sample.sweeps(tests, marked, number, parts, changed)
        config.stash[TURN] = sample.variants(number, parts)
        config.stash[WHOLE] = sample.test_files(changed, {sample.file_of(test) for test in tests})
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _set_module_options(config: pytest.Config) -> None:
    """Tests in the form of an earlier suite read the options when they are imported."""
    from dicp.testing.common.arguments import Arguments, set_args

    dynamic = option(config, "dynamic") == "true"
    set_args(Arguments(option(config, "backend"), dynamic, option(config, "device")))


def _keep_operators(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases that --op names, and those of files that an old list has per operator."""
    listed = config.stash.get(LISTED, [])
    patterns = [*(option(config, "op") or ()), *listed]
    if not patterns:
        return
    from dicp.testing.selection import by_operator

    files = config.getini("python_files") if listed else ()
    kept = set(by_operator(items, patterns, files))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _find_operators_of_the_list(config: pytest.Config) -> None:
    """Lists of earlier suites name one file per operator, as `python_files`."""
    patterns = config.getini("python_files")
    if not any(str(pattern).endswith(".py") and "*" not in str(pattern) for pattern in patterns):
        return
    from dicp.testing.selection import operators_of_files

    config.stash[LISTED] = operators_of_files(patterns)
    if config.stash[LISTED]:
        patterns.append("test_*.py")  # pytest keeps this list; the cases are in files by family


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "static_only: the test has no dynamic-shape form")
    config.addinivalue_line("markers", "dynamic_only: the test has no static-shape form")
    config.addinivalue_line("markers", "slow: takes more than a minute; run with -m slow")
    config.addinivalue_line("markers", "sweep: one of many arguments, or slow; see --sweeps")
    for name in SAMPLES:  # workers of a parallel run are handed the options as they are
        if wanted := option(config, name):
            setattr(config.option, f"dicp_{name}", "{1}:{0}".format(*sample.part(wanted)))
    counts.start(config)
    _set_module_options(config)
    _find_operators_of_the_list(config)
    _use_testpaths_of_the_ini_file(config)
    _session_cache(config)


def _session_cache(config: pytest.Config) -> None:
    """A session starts from an empty cache that its workers share, unless DICP_CACHE_DIR is set."""
    if is_set("DICP_CACHE_DIR") or hasattr(config, "workerinput"):
        return
    memory = SHARED_MEMORY if _takes_programs(SHARED_MEMORY) else None
    folder = tempfile.mkdtemp(prefix="dicp-test-cache-", dir=memory)
    environment = pytest.MonkeyPatch()
    environment.setenv("DICP_CACHE_DIR", folder)

    def remove() -> None:
        environment.undo()
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


def _takes_programs(folder: str) -> bool:
    """Whether there is room for the cache of a session in a folder, and its libraries can run."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    runs = not found.f_flag & os.ST_NOEXEC
    return runs and os.access(folder, os.W_OK) and found.f_bavail * found.f_frsize > CACHE_BYTES


def _use_testpaths_of_the_ini_file(config: pytest.Config) -> None:
    """`pytest -c some/list.ini` runs the list wherever it is started from.

    pytest itself reads `testpaths` only when it is started in the folder of the ini file.
    """
    if config.args_source is not pytest.Config.ArgsSource.INVOCATION_DIR or not config.inipath:
        return
    listed = [config.inipath.parent / path for path in config.getini("testpaths")]
    missing = [str(path) for path in listed if not path.exists()]
    if missing:
        raise pytest.UsageError(f"{config.inipath} lists what does not exist: {missing}")
    if listed:
        config.args = [str(path.resolve()) for path in listed]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `dynamic` once per wanted value, one that takes `case` per CASES."""
    if "case" in metafunc.fixturenames and hasattr(metafunc.module, "CASES"):
        metafunc.parametrize("case", metafunc.module.CASES, ids=lambda case: case.name)
    if "dynamic" in metafunc.fixturenames:
        values = DYNAMIC_CHOICES[option(metafunc.config, "dynamic")]
        if any(metafunc.definition.iter_markers("static_only")):
            values = [value for value in values if not value]
        if any(metafunc.definition.iter_markers("dynamic_only")):
            values = [value for value in values if value]
        metafunc.parametrize("dynamic", values, ids=["dynamic" if v else "static" for v in values])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts raise KeyboardInterrupt, which a process started in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    from dicp.testing.backends import name_of

    return name_of(option(request.config, "backend"), option(request.config, "device"))


@pytest.fixture
def backend(request: pytest.FixtureRequest, backend_name: str) -> Any:
    """The backend under test: pass it to `torch.compile(..., backend=backend)`."""
    from dicp.testing import BackendUnderTest

    eager = option(request.config, "allow-eager")
    return BackendUnderTest(backend_name, option(request.config, "device"), allow_eager=eager)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`golden(path, text)`: the text stands in `path`; --update-golden writes it there."""

    def check(path: Path, text: str) -> None:
        if option(request.config, "update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), "no golden text: run with --update-golden and look at what it writes"
        assert text == path.read_text(), f"if meant, run with --update-golden: {path.name}"

    return check


@pytest.fixture
def check_op(
    request: pytest.FixtureRequest, backend: Any, dynamic: bool
) -> Iterator[Callable[..., None]]:
    """`check_op(case)` or `check_op(fn, *input_specs, **options)`: see `dicp.testing.op`."""
    from dicp.testing import Op, op

    config = request.config
    without = set(option(config, "without-dtypes").split(","))
    whole = sample.file_of(request.node.nodeid) in config.stash.get(WHOLE, ())
    turn = None if whole else config.stash.get(TURN, None)

    def check(fn: Any, *specs: Any, **options: Any) -> None:
        case = fn if isinstance(fn, Op) else op(fn, *specs, **options)
        kept = tuple(d for d in case.dtypes if str(d).removeprefix("torch.") not in without)
        if kept:
            replace(case, dtypes=kept, turn=turn).check(backend, dynamic)

    yield check
    counts.count(config, request.node.nodeid, backend)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of a parallel run hands what it counted to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output.update(counts.hand_over(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    counts.take_over(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if option(config, "results"):
        counts.write(config, terminalreporter.stats, Path(option(config, "results")))
    if not option(config, "eager-nodes"):
        return
    terminalreporter.section("operators left to eager")
    for line in counts.lines(config):
        terminalreporter.line(line)


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """No compiled code, default dtype or random state leaks from one test into the next."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(default_dtype)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
