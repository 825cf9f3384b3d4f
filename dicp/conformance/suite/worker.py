"""A process of `gen_data` or `run_test`: `python -m dicp.conformance.suite.worker`.

It reads its unit as JSON from stdin and tells of its tests as the worker of `torch_tests` does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dicp.conformance.answers import open_answers, register
from dicp.conformance.suite.reference import OperatorData, write
from dicp.conformance.suite.runs import CaseUnit, Outcome, Runner
from dicp.conformance.suite.sources import cases_of, made_from
from dicp.errors import ReferenceDataError

Test = tuple[list[str], Callable[[], Outcome], Outcome | None]
"""Its name, what runs it, and its outcome if it ends the process; None: it has crashed."""


def main() -> None:
    """Run the unit on stdin."""
    faulthandler.enable()
    torch.set_num_threads(1)
    given: dict[str, Any] = json.load(sys.stdin)
    done = given.pop("done")
    unit = CaseUnit(**given)
    tell = open_answers()
    register(unit.device)
    kinds = {"gen_data": _generated, "run_test": _compared}
    names, tests = kinds[unit.task](unit)
    tell(tests=names)
    for name, test, fatal in tests:
        if name in done:
            continue
        tell(began=name, fatal=fatal and [fatal.result, fatal.reason, 0.0, fatal.details])
        start = time.perf_counter()
        try:
            outcome = test()
        except Exception as error:
            text = "".join(traceback.format_exception_only(error))
            outcome = Outcome("failed", text.strip()[:2000])
        seconds = round(time.perf_counter() - start, 3)
        tell(row=[name, outcome.result, outcome.reason, seconds, outcome.details])
    tell(end=True)


def _generated(unit: CaseUnit) -> tuple[list[list[str]], Iterator[Test]]:
    """A test for each operator: it passes when its data are stored."""

    def one(operator: str) -> Outcome:
        cases = cases_of(operator, unit.samples, unit.cases, unit.model)
        made = made_from(operator, unit.samples, unit.device, unit.cases, unit.model)
        written = write(Path(unit.data), operator, cases, unit.device, made)
        details = {
            "cases": written.cases, "bytes": written.bytes, "left_out": dict(written.left_out),
        }  # fmt: skip
        return Outcome("passed", "", details)

    names = [["", operator] for operator in unit.operators]
    return names, (([*name], partial(one, name[1]), None) for name in names)


def _compared(unit: CaseUnit) -> tuple[list[list[str]], Iterator[Test]]:
    """A test for each stored case; of an operator whose data are damaged, one that fails."""
    data = {operator: _data(Path(unit.data), operator) for operator in unit.operators}
    runner = Runner(unit)
    runner.start()

    def tests() -> Iterator[Test]:
        for operator, one in data.items():
            if isinstance(one, ReferenceDataError):
                yield [operator, ""], partial(Outcome, "failed", str(one)), None
                continue
            for reference in one.references():
                name = [operator, reference.case.key]
                yield name, partial(runner.outcome, reference), runner.skipped(reference.case)

    names = [
        [operator, key]
        for operator, one in data.items()
        for key in ([""] if isinstance(one, ReferenceDataError) else one.keys)
    ]
    return names, tests()


def _data(folder: Path, operator: str) -> OperatorData | ReferenceDataError:
    try:
        return OperatorData.read(folder, operator)
    except ReferenceDataError as error:
        return error


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what libraries do at exit
