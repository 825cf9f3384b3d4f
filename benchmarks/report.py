"""One table on the screen, and the same numbers as JSON, text and a chart in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from benchmarks.backends import BASELINE, EAGER
from benchmarks.options import Options

Item = TypeVar("Item")
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Row:
    """One thing measured on every backend; a smaller value is better."""

    name: str
    facts: dict[str, str]
    values: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    """Bases of comparison, by the report's names for them."""
    wrong: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    detail: Any = None

    def take_samples(self, samples: dict[str, dict[str, float]], scale: float) -> None:
        """Medians and quartile distances of `measure.Sample`s, in seconds, times `scale`."""
        for backend, sample in samples.items():
            self.values[backend] = sample["median"] * scale
            self.spreads[backend] = (sample["high"] - sample["low"]) * scale

    def ratio(self, backend: str, base: str) -> float | None:
        """How many times better than `base`; None where either is missing."""
        if not self.values.get(backend) or not self.values.get(base):
            return None
        return self.values[base] / self.values[backend]

    def share(self, backend: str, floor: str) -> float | None:
        """A floor as a share of the value."""
        value, least = self.values.get(backend), self.floors.get(floor)
        return least / value if least and value else None


@dataclass
class Report:
    """The rows of one command, with the machine they were measured on."""

    options: Options
    unit: str
    machine: dict[str, str]
    floors: tuple[str, ...] = ()
    group_by: str = "mode"
    note: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def backends(self) -> list[str]:
        """Every backend with a value or a failure, in the order of the command line."""
        asked = dict.fromkeys([*self.options.backends])
        met = [b for row in self.rows for b in (*row.values, *row.failures)]
        return [b for b in dict.fromkeys([*asked, *met]) if b in set(met)]

    @property
    def bases(self) -> list[str]:
        return [base for base in (EAGER, BASELINE) if any(base in r.values for r in self.rows)]

    @property
    def groups(self) -> dict[str, list[Row]]:
        """The rows that share a mode (and dtype), which is what means are taken over."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            by = dict.fromkeys((self.group_by, "mode", "dtype"))
            key = ", ".join(row.facts[name] for name in by if name in row.facts)
            groups.setdefault(key, []).append(row)
        return groups

    def summary(self) -> dict[str, dict[str, float]]:
        """Geometric means by group: of the ratios to each base, and of the shares of the floors."""
        return {name: self._means(rows) for name, rows in self.groups.items()}

    def _means(self, rows: Sequence[Row]) -> dict[str, float]:
        wanted = {
            f"{backend} against {base}": [row.ratio(backend, base) for row in rows]
            for base in self.bases
            for backend in self.backends
            if backend != base
        }
        for backend, floor in product(self.backends, self.floors):
            wanted[f"{backend} of {floor}"] = [row.share(backend, floor) for row in rows]
        means = {name: geometric_mean(values) for name, values in wanted.items()}
        return {name: value for name, value in means.items() if value is not None}

    @property
    def _fact_names(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row.facts))

    def table(self) -> Table:
        """All rows, then the geometric means of every group."""
        facts = {key: {row.facts.get(key, "") for row in self.rows} for key in self._fact_names}
        same = [next(iter(values)) for values in facts.values() if len(values) == 1]
        shown = [key for key, values in facts.items() if len(values) > 1]
        title = ", ".join([self.options.command, *same, self.unit, "median ± quartile distance"])
        table = Table(title=title, caption=" ".join(self.note.split()))
        table.add_column(self.options.command.rstrip("s"))
        for name in shown:
            table.add_column(name, style="dim")
        for backend in self.backends:
            table.add_column(backend, justify="right")
        pairs = [(b, base) for base in self.bases for b in self.backends if b != base]
        for backend, base in pairs:
            table.add_column(f"{backend}\n× {base}", justify="right")
        partitions = [(b, floor) for floor in self.floors for b in self.backends]
        for backend, floor in partitions:
            table.add_column(f"{backend}\n% {floor}", justify="right")
        table.add_column("remarks")
        for name, rows in self.groups.items():
            for row in rows:
                cells = [_value(row, backend) for backend in self.backends]
                table.add_row(
                    row.name,
                    *(row.facts.get(key, "") for key in shown),
                    *cells,
                    *(_ratio(row.ratio(*pair)) for pair in pairs),
                    *(_percent(row.share(*share)) for share in partitions),
                    _remarks(row),
                )
            means = self._means(rows)
            table.add_section()
            table.add_row(
                f"[bold]mean, {name}" if name else "[bold]mean",
                *("" for _ in shown),
                *("" for _ in self.backends),
                *(_ratio(means.get(f"{b} against {base}")) for b, base in pairs),
                *(_percent(means.get(f"{b} of {floor}")) for b, floor in partitions),
                "geometric",
            )
            table.add_section()
        return table

    def as_json(self) -> dict[str, Any]:
        return {
            "command": {k: v for k, v in asdict(self.options).items() if k != "out"},
            "unit": self.unit,
            "note": self.note,
            "machine": self.machine,
            "geometric means": self.summary(),
            "rows": [asdict(row) for row in self.rows],
        }

    def write_data(self, folder: Path) -> Path:
        """Write the results so far as JSON; return the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.options.file_name}.json"
        fresh = path.with_suffix(".part")  # a kill while it is written leaves the previous file
        fresh.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n")
        fresh.replace(path)
        return path

    def write(self, folder: Path) -> list[Path]:
        """JSON and text under the command's name; the paths written."""
        data = self.write_data(folder)
        text = data.with_suffix(".txt")
        with text.open("w") as file:
            console = Console(file=file, width=240)
            console.print(self.table())
            console.print(", ".join(f"{key}: {value}" for key, value in self.machine.items()))
        return [data, text]


class Progress:
    """A progress bar over the things to measure."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def over(self, items: Iterable[Item], label: Callable[[Item], str]) -> Iterator[Item]:
        items = list(items)
        columns = (
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=self.console) as bar:
            task = bar.add_task("", total=len(items))
            for item in items:
                bar.update(task, description=label(item))
                yield item
                bar.advance(task)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values there are."""
    logs = [math.log(value) for value in values if value]
    return math.exp(fmean(logs)) if logs else None


def _value(row: Row, backend: str) -> str:
    if backend not in row.values:
        return "[red]failed" if backend in row.failures else ""
    spread = f" ±{row.spreads[backend]:.2g}" if backend in row.spreads else ""
    return f"{row.values[backend]:.4g}{spread}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    style = "green" if value >= 1.02 else "red" if value < 0.98 else "default"
    return f"[{style}]{value:.2f}[/]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}"


def _remarks(row: Row) -> str:
    wrong = [f"{backend} wrong: {what}" for backend, what in row.wrong.items()]
    failed = [f"{b}: {what.partition(chr(10))[0][:80]}" for b, what in row.failures.items()]
    return "\n".join(f"[red]{escape(text)}[/]" for text in wrong + failed)
