"""The fixtures and options of dicp.testing for the tests of this repository.

pytest test                                             everything, on cpugraph
pytest test/op --backend inductor --dynamic false       any backend Dynamo knows
pytest -c test/cpu_scripts/ops/static.ini --backend cpugraph --dynamic false
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TEST_ROOT = Path(__file__).resolve().parent
if str(TEST_ROOT) not in sys.path:
    sys.path.insert(0, str(TEST_ROOT))  # `from support.graphs import ...` in every test file

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
