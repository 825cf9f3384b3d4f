"""`python -m dicp vendor-report`: how far a vendor is, and what to do next.

Operators are counted by decision. Outcomes of tests, and the operators that ran eagerly in them,
come from files that `pytest --results FILE` wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dicp.dynamo_bridge.conversion import OperatorRow, core_overloads, operator_table
from dicp.errors import ResultsFileError
from dicp.graphop.rules import RULES as GRAPH_RULES
from dicp.graphop.target import GraphTarget
from dicp.loop.lowering import RULES as LOOP_RULES
from dicp.target import Target

MODELS = "/model/"
"""The folder of model tests in the ids of tests."""


@dataclass(frozen=True)
class NextStep:
    """An operator to write a rule for: how often it ran eagerly, and what helps."""

    op: str
    times: int
    reason: str
    hint: str


@dataclass(frozen=True)
class VendorReport:
    """What `vendor_report` found. Counts are by decision, or by outcome."""

    target: str
    core: Mapping[str, int]
    """Operators of core ATen."""
    listed: Mapping[str, int]
    """Overloads that dicp has rules for, in the family of the target."""
    tests: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[str] = ()
    steps: Sequence[NextStep] = ()
    """By gain: what ran eagerly most often first."""


def vendor_report(target: Target, files: Iterable[Path]) -> VendorReport:
    """How far a target is. Raises ResultsFileError for a file that pytest did not write."""
    tests: dict[str, str] = {}
    eager: Counter[tuple[str, str]] = Counter()
    for file in files:
        found = _results(file)
        tests |= found["tests"]
        for op, reasons in found["eager"].items():
            eager.update({(op, reason): number for reason, number in reasons.items()})
    shared = (GRAPH_RULES if isinstance(target, GraphTarget) else LOOP_RULES).ops()
    names = {str(op) for op in shared}
    rows = {row.op: row for row in operator_table(target)}
    core = set(map(str, core_overloads()))
    ruled: Counter[str] = Counter(target.rule_kind(op) or "no rule" for op in shared)
    models = {test: outcome for test, outcome in tests.items() if _is_model(test)}
    return VendorReport(
        target.name,
        Counter(row.decision for name, row in rows.items() if name in core),
        ruled,
        Counter(outcome for test, outcome in tests.items() if test not in models),
        Counter(models.values()),
        [test for test, outcome in tests.items() if outcome in ("failed", "error")],
        _steps(eager, rows, names),
    )


def _steps(
    eager: Mapping[tuple[str, str], int], rows: Mapping[str, OperatorRow], shared: set[str]
) -> list[NextStep]:
    """What ran eagerly in tests, most often first; without tests, what has no rule."""
    counted = dict(eager) or {
        (row.op, row.reason): 0 for row in rows.values() if row.decision == "eager"
    }
    return [
        NextStep(op, times, reason, "dicp has a rule for it" if op in shared else "")
        for (op, reason), times in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    ]


def _is_model(test: str) -> bool:
    return MODELS in f"/{test}"


def _results(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if isinstance(found["tests"], dict) and isinstance(found["eager"], dict):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsFileError(file, str(error) or type(error).__name__) from error
    raise ResultsFileError(file, "it has other contents")
