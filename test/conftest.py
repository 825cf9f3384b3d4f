"""The fixtures and options of dicp.testing for the tests of this repository.

pytest test                                             everything, on cpugraph
pytest test/op --backend inductor --dynamic false       any backend Dynamo knows
pytest -c test/cpu_scripts/ops/static.ini --backend cpugraph --dynamic false
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TEST_ROOT = Path(__file__).resolve().parent
if str(TEST_ROOT) not in sys.path:
    sys.path.insert(0, str(TEST_ROOT))  # `from support.graphs import ...` in every test file

BUILT = pytest.StashKey[dict[Any, bytes]]()
"""What compilers made in this session, for tests that share it."""
PLUGIN, FIXTURES = "dicp.pytest_plugin", "dicp.testing.fixtures"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds the options where dicp is on the path and not installed."""
    if pluginmanager.has_plugin(PLUGIN):
        return
    pluginmanager.import_plugin(PLUGIN)
    pluginmanager.get_plugin(PLUGIN).add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.inipath and TEST_ROOT in config.inipath.parents:
        config._rootpath = TEST_ROOT.parent  # node ids name the test's file, not the ini's folder
    if config.getoption("--device", "cpu") == "dipu":
        import dicp.device.active  # noqa: F401  registers the device; DIPU_MOCK_CUDA=0 for its own name
    config.pluginmanager.import_plugin(FIXTURES)


@pytest.fixture
def own_objects() -> Iterator[None]:
    """Collections of garbage visit the objects of this test alone.

    Those of the modules and tests before it are millions, which take seconds each time.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def shared_builds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command made of files in an earlier test is not compiled again.

    For tests with caches of their own that are not about compilers: each would build the driver,
    the precompiled headers and the graphs that others have.
    """
    from dicp import toolchain
    from dicp.graphop import simulator

    built = request.config.stash.setdefault(BUILT, {})
    compile_file = toolchain.compile_file

    def known_or_compiled(
        target: str, command: Sequence[str], files: Mapping[str, str | bytes], **options: Any
    ) -> bytes:
        key = (target, tuple(command), tuple(sorted(files.items())))
        if key not in built:
            built[key] = compile_file(target, command, files, **options)
        return built[key]

    for module in (toolchain, simulator):
        monkeypatch.setattr(module, "compile_file", known_or_compiled)
