"""A few recorded cases on every target, others every eight hours; `make conformance` runs all.

A tenth of all cases on each target would take hours: a case is compiled by itself. Of a push,
CASES cases of one model run on each target, those of up to ELEMENTS elements. After TURNS of eight
hours the first ones come again: those that were run before a push decide over none by surprise.
"""

from __future__ import annotations

import math
import zlib

import pytest

from dicp.conformance.per_operator.platforms import platforms
from dicp.conformance.rows import FAILURES
from dicp.conformance.suite.case import Case
from dicp.conformance.suite.reference import computed
from dicp.conformance.suite.runs import CaseUnit, Runner
from dicp.conformance.suite.sources import model_entries, model_file, model_names
from dicp.testing.sample import part

CASES = 3
TURNS = 8
ELEMENTS = 20_000
BACKENDS = sorted(platforms().values())


def sampled(turn: int, backend: int) -> list[Case]:
    """Cases of a model: of another one each turn, and of others of it for each backend."""
    names = model_names()
    name = names[turn % TURNS * len(names) // TURNS]
    entries = model_entries(model_file(name)).values()
    small = [
        case for of_operator in entries for entry in of_operator for case in entry.cases
        if sum(math.prod(operand.shape) for operand in case.operands) <= ELEMENTS
    ]  # fmt: skip
    small.sort(key=lambda case: zlib.crc32(f"{case.name} {case.key} {case}".encode()))
    return [small[(backend * CASES + k) % len(small)] for k in range(CASES)]


@pytest.mark.parametrize("target", BACKENDS)
def test_some_recorded_cases(target: str) -> None:
    runner = Runner(CaseUnit("", "run_test", "cpu", "", (), target))
    for case in sampled(part(str(10**9))[0], BACKENDS.index(target)):
        outcome = runner.outcome(computed(case))
        assert outcome.result not in FAILURES, f"{case}: {outcome.reason}"


def test_each_target_has_cases_of_its_own() -> None:
    for turn in range(TURNS):
        cases = [case for k in range(len(BACKENDS)) for case in sampled(turn, k)]
        texts = {f"{case.name} {case.key} {case}" for case in cases}
        assert len(texts) == len(BACKENDS) * CASES
    assert str(sampled(0, 0)) != str(sampled(1, 0))
    assert str(sampled(TURNS, 0)) == str(sampled(0, 0))
