"""`gen_case`: stored cases as files of pytest, an operator each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from dicp.conformance.answers import register
from dicp.conformance.rows import FAILURES
from dicp.conformance.suite.reference import OperatorData, Reference
from dicp.conformance.suite.runs import CaseUnit, Runner
from dicp.template import render_template

_PAGE = Path(__file__).with_name("pytest_cases.py.jinja")


@dataclass(frozen=True)
class StoredCases:
    """The stored cases of one operator on a device, compiled by a backend or in eager."""

    operator: str
    data: str
    backend: str
    device: str
    config: str = ""

    @cached_property
    def runner(self) -> Runner:
        register(self.device)
        return Runner(CaseUnit(
            "", "run_test", self.device, self.data, (self.operator,), self.backend,
            config=self.config,
        ))  # fmt: skip

    @cached_property
    def _references(self) -> dict[str, Reference]:
        read = OperatorData.read(Path(self.data), self.operator)
        return {one.case.key: one for one in read.references()}

    @property
    def keys(self) -> list[str]:
        """The keys of the cases."""
        return OperatorData.read(Path(self.data), self.operator).keys

    def check(self, key: str) -> None:
        """Run a case: pytest's failure or skip says why it does not pass."""
        outcome = self.runner.outcome(self._references[key])
        if outcome.result in FAILURES:
            pytest.fail(outcome.reason, pytrace=False)
        if outcome.result == "skipped":
            pytest.skip(outcome.reason)


def write_test_files(operators: Sequence[str], unit: CaseUnit, folder: Path) -> list[Path]:
    """Write a file of tests for each operator; `unit` says what of and on what they run."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for operator in operators:
        name = re.sub(r"\W", "_", operator)
        cases = StoredCases(operator, str(Path(unit.data).resolve()), unit.backend, unit.device,
                            unit.config)  # fmt: skip
        written.append(folder / f"test_{name}.py")
        written[-1].write_text(render_template(_PAGE, name=name, cases=cases), "utf-8")
    return written
