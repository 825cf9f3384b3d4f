"""The results of a run: CSV, the summary in Markdown, and what changed since the last run."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dicp.conformance.configuration import Skip
from dicp.conformance.names import OperatorNames, TestName
from dicp.errors import ResultsFileError

RESULTS = ("passed", "failed", "skipped", "crashed")
FAILURES = ("failed", "crashed")


@dataclass(frozen=True)
class Row:
    """The result of one test: passed, failed, skipped or crashed, and why."""

    file: str
    cls: str
    test: str
    result: str
    reason: str = ""
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else the test says of itself, of JSON values."""

    @property
    def name(self) -> TestName:
        return TestName(self.file, self.cls, self.test)

    @property
    def first_line(self) -> str:
        return next((line for line in self.reason.splitlines() if line.strip()), "")


_COLUMNS = ("file", "class", "test", "result", "reason", "seconds")


@contextmanager
def table(path: Path) -> Iterator[Callable[[Row], None]]:
    """A new table of file, class, test, result, reason, seconds; the function adds a row to it."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)

        def add(row: Row) -> None:
            writer.writerow((row.file, row.cls, row.test, row.result, row.reason, row.seconds))
            file.flush()

        yield add


def read_rows(path: Path) -> list[Row]:
    """The table of an earlier run; empty if there is none. Raises ResultsFileError."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            return [
                Row(one["file"], one["class"], one["test"], one["result"], one["reason"],
                    float(one["seconds"]))
                for one in csv.DictReader(file)
            ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ResultsFileError(path, problem, "python -m dicp.conformance torch-tests") from error


def totals(rows: Sequence[Row]) -> str:
    counts = Counter(row.result for row in rows)
    return ", ".join(f"{counts[result]} {result}" for result in RESULTS)


def summary(
    title: str,
    names: OperatorNames,
    rows: Sequence[Row],
    before: Sequence[Row],
    unused: Sequence[Skip],
) -> str:
    """The run as a page of Markdown."""
    operators = [row for row in rows if names.operator(row.name)]
    parts = [f"# {title}", f"{totals(rows)}.", "## Files"]
    parts.append(_counted("file", rows, lambda row: row.file))
    if operators:
        by_operator = _counted("operator", operators, lambda row: names.operator(row.name))
        parts += ["## Operators", by_operator]
    failures = [row for row in rows if row.result in FAILURES]
    if failures:
        parts += ["## Failures", "\n".join(
            f"- {row.result}: `{row.file}` `{row.cls}` `{row.test}`: {escaped(row.first_line)}"
            for row in failures
        )]  # fmt: skip
    if before:
        changes = "\n".join(differences(rows, before)) or "None."
        parts += ["## Differences to the last run", changes]
    if unused:
        parts += ["## Skips that match no test", "\n".join(f"- {skip}" for skip in unused)]
    return "\n\n".join(parts) + "\n"


def differences(rows: Sequence[Row], before: Sequence[Row]) -> Iterator[str]:
    """A line for each test whose result is another, that is new, or that is gone."""
    old = {row.name: row for row in before}
    new = {row.name: row for row in rows}
    for name, row in new.items():
        was = old[name].result if name in old else "absent"
        if was != row.result:
            yield f"- `{row.file}` `{row.cls}` `{row.test}`: {was} -> {row.result}"
    for name, row in old.items():
        if name not in new:
            yield f"- `{row.file}` `{row.cls}` `{row.test}`: {row.result} -> absent"


def _counted(heading: str, rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    """A table of the results by `key`, what fails first, with the share of tests run that pass."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(key(row), Counter())[row.result] += 1
    lines = [f"| {heading} | {' | '.join(RESULTS)} | rate |", f"|{'---|' * (len(RESULTS) + 2)}"]
    for name, count in sorted(counts.items(), key=lambda item: (_rate(item[1]), item[0])):
        cells = " | ".join(str(count[result]) for result in RESULTS)
        rate = _rate(count)
        lines.append(f"| {name} | {cells} | {'-' if rate > 1 else f'{100 * rate:.1f}%'} |")
    return "\n".join(lines)


def _rate(count: Counter[str]) -> float:
    """The share of the tests run that passed; 2 where none ran."""
    ran = sum(count[result] for result in RESULTS if result != "skipped")
    return count["passed"] / ran if ran else 2.0


def escaped(text: str) -> str:
    """A text in Markdown, which may be a table's cell."""
    return text.replace("|", "\\|").replace("<", "\\<")
