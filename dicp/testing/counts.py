"""What runs left to eager, counted per operator and per test: `--eager-nodes` prints it, and
`--results` writes it to a file with the outcomes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

EAGER_NODES = pytest.StashKey[Counter[tuple[str, str]]]()
"""How often an operator was left to eager for a reason."""

SHARES = pytest.StashKey[dict[str, tuple[int, int]]]()
"""By test: how many nodes its graphs have, and how many of them ran eagerly."""


def start(config: pytest.Config) -> None:
    config.stash[EAGER_NODES] = Counter()
    config.stash[SHARES] = {}


def count(config: pytest.Config, test: str, backend: Any) -> None:
    """Add what the backend reports of one test."""
    nodes = [node for report in backend.reports() for node in report.nodes]
    eager = [(str(n.op), str(n.reason)) for n in nodes if n.decision == "eager"]
    config.stash[EAGER_NODES].update(eager)
    config.stash[SHARES][test] = (len(nodes), len(eager))


def hand_over(config: pytest.Config) -> dict[str, Any]:
    """What a worker of a parallel run has counted, serialized."""
    nodes = [(*key, number) for key, number in config.stash[EAGER_NODES].items()]
    return {"eager_nodes": nodes, "shares": config.stash[SHARES]}


def take_over(config: pytest.Config, counted: dict[str, Any]) -> None:
    for operator, reason, number in counted.get("eager_nodes", ()):
        config.stash[EAGER_NODES][operator, reason] += number
    shares = counted.get("shares", {})
    config.stash[SHARES].update({test: (all_, eager) for test, (all_, eager) in shares.items()})


def lines(config: pytest.Config) -> Iterator[str]:
    """Operators with reasons, tests that left something to eager, and how many did not."""
    for (operator, reason), number in sorted(config.stash[EAGER_NODES].items()):
        yield f"{number:>5}  {operator}: {reason}"
    shares = config.stash[SHARES]
    for test, (nodes, eager) in sorted(shares.items()):
        if eager:
            yield f"       {1 - eager / nodes:.1%} of {nodes} nodes compiled: {test}"
    whole = sum(not eager for _, eager in shares.values())
    yield f"{whole} of {len(shares)} tests left nothing to eager"


def write(config: pytest.Config, stats: Mapping[str, Sequence[Any]], file: Path) -> None:
    """Add this run's outcomes and eager operators to those in `file`: {"tests": {id: outcome},
    "eager": {operator: {reason: number}}}. A test that ran again has its last outcome."""
    known = read(file)
    for outcome in ("passed", "failed", "error", "skipped"):
        reports = [r for r in stats.get(outcome, ()) if hasattr(r, "nodeid")]
        known["tests"].update((r.nodeid, outcome) for r in reports)
    for (operator, reason), number in config.stash[EAGER_NODES].items():
        reasons = known["eager"].setdefault(operator, {})
        reasons[reason] = reasons.get(reason, 0) + number
    file.write_text(json.dumps(known, indent=1, sort_keys=True))


def read(file: Path) -> dict[str, Any]:
    """What `write` wrote; nothing where there is no file."""
    return json.loads(file.read_text()) if file.exists() else {"tests": {}, "eager": {}}
