"""Options and fixtures that every test shares: which backend, static or dynamic shapes.

pytest test                                             everything, on cpugraph
pytest test/op --backend inductor --dynamic false       any backend Dynamo knows
pytest -c test/cpu_scripts/ops/static.ini --backend cpugraph --dynamic false
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

TEST_ROOT = Path(__file__).resolve().parent
if str(TEST_ROOT) not in sys.path:
    sys.path.insert(0, str(TEST_ROOT))  # `from support import ...` in every test file

import counts  # noqa: E402
import sample  # noqa: E402

if TYPE_CHECKING:
    from support import BackendUnderTest

DYNAMIC_CHOICES: dict[str, list[bool]] = {"true": [True], "false": [False], "both": [False, True]}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dicp")
    group.addoption(
        "--backend",
        default="cpugraph",
        help="a backend registered with torch._dynamo, or the name of a dicp target",
    )
    group.addoption(
        "--dynamic",
        default="both",
        type=str.lower,
        choices=tuple(DYNAMIC_CHOICES),
        help="shapes of the operator and model tests: true, false or both (default)",
    )
    group.addoption(
        "--device", default="cpu", help="where the tensors of the operator tests lie (cpu)"
    )
    group.addoption(
        "--update-golden", action="store_true", help="write the golden texts of test/unit anew"
    )
    group.addoption(
        "--eager-nodes",
        action="store_true",
        help="at the end, list what the tests left to eager and why",
    )
    group.addoption(
        "--without-dtypes",
        default="",
        help="dtypes that the operator cases leave out: float64,complex64 (a device may have none)",
    )
    group.addoption(
        "--sample",
        default="",
        metavar="PARTS[:NUMBER]",
        help="one of so many parts of the tests, another one every few hours, and what changed",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --sample, keep a part of the tests."""
    if not config.getoption("--sample"):
        return
    number, parts = sample.part(config.getoption("--sample"))
    changed = sample.changed_files(TEST_ROOT.parent)
    kept = sample.sample([item.nodeid for item in items], number, parts, changed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "static_only: the test has no dynamic-shape form")
    config.addinivalue_line("markers", "dynamic_only: the test has no static-shape form")
    config.addinivalue_line("markers", "slow: takes more than a minute; run with -m slow")
    if config.getoption("--sample"):  # workers of a parallel run are handed the options as they are
        config.option.sample = "{1}:{0}".format(*sample.part(config.getoption("--sample")))
    logging.getLogger("torch.__trace").propagate = False  # else each failure prints its log
    counts.start(config)
    if config.getoption("--device") == "dipu":
        os.environ.setdefault("DIPU_MOCK_CUDA", "0")
        import dicp.device  # noqa: F401  registers the device
    if config.inipath and TEST_ROOT in config.inipath.parents:
        config._rootpath = TEST_ROOT.parent  # node ids name the test's file, not the ini's folder
    _use_testpaths_of_the_ini_file(config)
    _use_a_cache_of_our_own(config)


def _use_a_cache_of_our_own(config: pytest.Config) -> None:
    """A session starts from an empty cache that its workers share, unless DICP_CACHE_DIR is set."""
    if "DICP_CACHE_DIR" in os.environ or hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="dicp-test-cache-")
    os.environ["DICP_CACHE_DIR"] = folder

    def remove() -> None:
        os.environ.pop("DICP_CACHE_DIR", None)
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


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
        values = DYNAMIC_CHOICES[metafunc.config.getoption("--dynamic")]
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
    return str(request.config.getoption("--backend"))


@pytest.fixture
def backend(request: pytest.FixtureRequest, backend_name: str) -> BackendUnderTest:
    """The backend under test: pass it to `torch.compile(..., backend=backend)`."""
    from support import BackendUnderTest

    return BackendUnderTest(backend_name, request.config.getoption("--device"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`golden(path, text)`: the text stands in `path`; --update-golden writes it there."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), "no golden text: run with --update-golden and look at what it writes"
        assert text == path.read_text(), f"if meant, run with --update-golden: {path.name}"

    return check


@pytest.fixture
def check_op(
    request: pytest.FixtureRequest, backend: BackendUnderTest, dynamic: bool
) -> Iterator[Callable[..., None]]:
    """`check_op(case)` or `check_op(fn, *input_specs, **options)`: see `support.cases.op`."""
    from support import Op, op

    without = set(request.config.getoption("--without-dtypes").split(","))

    def check(fn: Any, *specs: Any, **options: Any) -> None:
        case = fn if isinstance(fn, Op) else op(fn, *specs, **options)
        kept = tuple(d for d in case.dtypes if str(d).removeprefix("torch.") not in without)
        if kept:
            replace(case, dtypes=kept).check(backend, dynamic)

    yield check
    counts.count(request.config, request.node.nodeid, backend)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of a parallel run hands what it counted to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output.update(counts.hand_over(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    counts.take_over(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--eager-nodes"):
        return
    terminalreporter.section("operators left to eager")
    for line in counts.lines(config):
        terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
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
        torch._dynamo.reset()
