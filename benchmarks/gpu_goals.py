"""The goals on a GPU, checked against the rows of the table: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.backends import BASELINE, EAGER
from benchmarks.report import Row, geometric_mean

Measure = Callable[[Sequence[Row], str], float | None]


@dataclass(frozen=True)
class Goal:
    """`value` of the rows whose section begins with `section`, which must be at least `wanted`."""

    name: str
    section: str
    value: Measure
    wanted: float


def _mean_against(base: str) -> Measure:
    return lambda rows, backend: geometric_mean([row.ratio(backend, base) for row in rows])


def _worst_against(base: str) -> Measure:
    def worst(rows: Sequence[Row], backend: str) -> float | None:
        found = [r for row in rows if (r := row.ratio(backend, base)) is not None]
        return min(found, default=None)

    return worst


def _mean_share(rows: Sequence[Row], backend: str) -> float | None:
    return geometric_mean([row.share(backend, "copy") for row in rows])


GOALS = (
    Goal("kernels: mean share of the copy's rate", "kernels", _mean_share, 0.9),
    Goal("kernels: mean speed to Inductor's", "kernels", _mean_against(BASELINE), 1.0),
    Goal("models: mean speed to Inductor's", "models", _mean_against(BASELINE), 1.0),
    Goal("models: worst speed to Inductor's", "models", _worst_against(BASELINE), 0.95),
    Goal("models: mean speed to eager's", "models", _mean_against(EAGER), 1.3),
    Goal("cold compile: Inductor's time to ours", "cold compile", _mean_against(BASELINE), 1 / 0.5),
    Goal("warm start: Inductor's time to ours", "warm compile", _mean_against(BASELINE), 1 / 0.7),
    Goal("memory: Inductor's peak to ours", "peak memory", _mean_against(BASELINE), 1.0),
    Goal("memory: worst of these", "peak memory", _worst_against(BASELINE), 1.0),
)
"""Lower bounds of larger-is-better ratios in one run."""


def goal_rows(rows: Sequence[Row], backends: Sequence[str]) -> list[Row]:
    """A row for each goal and backend; goals that could not be measured are marked."""
    found = []
    for goal in GOALS:
        measured = [r for r in rows if r.facts.get("section", "").startswith(goal.section)]
        for backend in backends:
            value = goal.value(measured, backend)
            failed = sum(backend in (*row.wrong, *row.failures) for row in measured)
            text = f"wanted {goal.wanted:.3g}: "
            if value is None:
                text += "not measured"
            else:
                text += f"{'reached' if value >= goal.wanted else 'missed'} with {value:.3g}"
            text += f"; {failed} wrong or failed" if failed else ""
            found.append(Row(goal.name, {"section": "goals", "result": text}))
    return found
