"""A process of a run: `python -m dicp.conformance.torch_tests.worker`.

It reads its unit as JSON from stdin and tells of its tests on stdout, a line of JSON for each: all
of them first, then one as it begins and its result.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.conformance.answers import Tell, open_answers, register
from dicp.conformance.configuration import Configuration
from dicp.conformance.names import OPERATOR_DATABASE, OperatorNames, TestName
from dicp.conformance.torch_tests.op_tests import OperatorCase, dtypes_of, full_name
from dicp.testing.backends import BackendUnderTest


def main() -> None:
    """Run the unit on stdin."""
    faulthandler.enable()
    torch.set_num_threads(1)
    unit: dict[str, Any] = json.load(sys.stdin)
    tell = open_answers()
    register(unit["device"])
    path = Path(unit["path"])
    plugin = Plugin(unit, tell)
    if unit["file"] != OPERATOR_DATABASE:
        sys.path.insert(0, str(path.parent))  # where PyTorch's tests import from each other
    else:
        from dicp.torch_private import leave_seeds_to_the_caller  # takes seconds

        leave_seeds_to_the_caller()
    pytest.main(
        [str(path), "-c", os.devnull, "--rootdir", str(path.parent), "--noconftest", "-q",
         "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-p", "no:warnings"],
        plugins=[plugin],
    )  # fmt: skip
    tell(end=True)


@dataclass
class Plugin:
    """The hooks of pytest that choose the tests, hand out operators and report."""

    unit: dict[str, Any]
    tell: Tell
    result: str = "passed"
    reason: str = ""
    seconds: float = 0.0

    @functools.cached_property
    def settings(self) -> Configuration:
        return Configuration.read(Path(self.unit["config"]) if self.unit["config"] else None)

    @functools.cached_property
    def names(self) -> OperatorNames:
        return OperatorNames(self.unit["names"])

    @functools.cached_property
    def backend(self) -> BackendUnderTest | None:
        name = self.unit["backend"]
        return BackendUnderTest(name, self.unit["device"]) if name else None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every operator of the unit, with the dtypes that a test is for."""
        if "case" not in metafunc.fixturenames or self.unit["file"] != OPERATOR_DATABASE:
            return
        from dicp.torch_private import op_db  # takes seconds

        dtypes = [getattr(torch, name) for name in self.settings.dtypes]
        operators = [op for op in op_db if full_name(op) in self.unit["operators"]]
        kind = metafunc.function.__name__.removeprefix("test_")
        cases = [
            OperatorCase(op, dtype, self.unit["device"], self.backend, self.settings.samples)
            for op in operators
            for dtype in dtypes_of(kind, op, dtypes)
        ]
        metafunc.parametrize("case", cases, ids=str)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what the configuration does, and what earlier processes have done."""
        items[:] = [one for one in items if self._is_wanted(one)]
        self.tell(tests=[_place(one) for one in items])
        done = self.unit["done"]
        items[:] = [one for one in items if _place(one) not in done]
        for item in items:
            name = self._name(item)
            reason = self.settings.skip_reason(self.names, name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            callspec: Any = getattr(item, "callspec", None)
            if callspec is not None and isinstance(callspec.params.get("case"), OperatorCase):
                callspec.params["case"].rule = self.settings.rule(self.names, name)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(tests=[["", "import"]])
            self.tell(row=[["", "import"], "failed", str(report.longrepr), 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.result, self.reason, self.seconds = "passed", "", 0.0
        self.tell(began=_place(item))
        outcome = yield
        self.tell(row=[_place(item), self.result, self.reason, round(self.seconds, 3)])
        return outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """PyTorch's own tests run compiled, with the tolerance of the configuration."""
        if self.unit["file"] == OPERATOR_DATABASE:
            yield
            return
        case = item.instance
        before = case.precision, case.rel_tol  # which all tests share
        tolerance = self.settings.tolerance(self.names, self._name(item))
        if tolerance is not None:
            case.precision, case.rel_tol = tolerance.atol, tolerance.rtol
        if self.backend is not None:
            self.backend.start_over()
            item.obj = torch.compile(item.obj, backend=self.backend, dynamic=False)
        try:
            yield
        finally:
            case.precision, case.rel_tol = before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            text = getattr(report.longrepr, "reprcrash", None)
            self.result, self.reason = "failed", text.message if text else str(report.longrepr)
        elif report.skipped and self.result == "passed":
            expected = getattr(report, "wasxfail", "")
            where = report.longrepr if isinstance(report.longrepr, tuple) else ("", "", expected)
            self.result, self.reason = "skipped", str(where[2]).removeprefix("Skipped: ")

    def _is_wanted(self, item: pytest.Item) -> bool:
        """Whether a test of a file is for devices, and the configuration does not leave it out."""
        for_devices = hasattr(getattr(item, "cls", None), "device_type")
        ours = self.unit["file"] == OPERATOR_DATABASE
        return (ours or for_devices) and self.settings.runs(self.names, self._name(item))

    def _name(self, item: pytest.Item) -> TestName:
        return TestName(self.unit["file"], *_place(item))


def _place(item: pytest.Item) -> list[str]:
    cls = getattr(item, "cls", None)
    return [cls.__name__ if cls is not None else "", item.name]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what libraries do at exit
