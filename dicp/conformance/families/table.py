"""The adaptation table: family by backend or by chip, as text, Markdown, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dicp.conformance.families.adaptation import Verdict, runs_on
from dicp.conformance.rows import escaped
from dicp.template import render_html
from dicp.testing.backends import BackendUnderTest
from dicp.vendor import CHIPS_WITHOUT_TARGET

NO_TARGET = "no target"
_PAGE = Path(__file__).with_name("adaptation.html.jinja")


@dataclass(frozen=True)
class Column:
    """A backend, or a chip; `backend` is empty for a chip without a target.

    runs_on: device, simulator, or no target; empty for a backend of others.
    """

    name: str
    backend: str
    runs_on: str

    @property
    def heading(self) -> str:
        of = self.backend if self.backend not in (self.name, "") else ""
        more = ", ".join(filter(None, [of, self.runs_on]))
        return f"{self.name} ({more})" if more else self.name


@dataclass(frozen=True)
class Table:
    """The verdicts by family and backend, and the columns that show them."""

    title: str
    columns: Sequence[Column]
    families: Sequence[str]
    verdicts: Mapping[tuple[str, str], Verdict]

    def cell(self, family: str, column: Column) -> Verdict:
        if not column.backend:
            return Verdict(family, "", NO_TARGET)
        return self.verdicts[family, column.backend]

    def text(self, family: str, column: Column) -> str:
        return self.cell(family, column).text if column.backend else NO_TARGET

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        for family in self.families:
            yield family, [self.text(family, column) for column in self.columns]

    def markdown(self) -> str:
        headings = [column.heading for column in self.columns]
        lines = [_line(["family", *headings]), f"|{' --- |' * (len(headings) + 1)}"]
        lines += [_line([family, *cells]) for family, cells in self.rows()]
        return "\n".join([f"# {self.title}", "", *lines, ""])

    def json(self) -> str:
        """Columns with what they run on, and every verdict with its whole text."""
        columns = [{**asdict(column), "heading": column.heading} for column in self.columns]
        verdicts = [{**asdict(v), "text": v.text} for v in self.verdicts.values()]
        whole = {"title": self.title, "columns": columns, "verdicts": verdicts}
        return json.dumps(whole, indent=1) + "\n"

    def html(self) -> str:
        return render_html(_PAGE, table=self)

    def write(self, folder: Path) -> list[Path]:
        """The three files, in a folder that is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"adaptation.md": self.markdown(), "adaptation.json": self.json(),
                 "adaptation.html": self.html()}  # fmt: skip
        for name, text in texts.items():
            (folder / name).write_text(text)
        return [folder / name for name in texts]


def columns_of(backends: Sequence[str], by_chip: bool) -> list[Column]:
    """A column per backend, or per chip of each, with the chips that no target compiles for."""
    found: list[Column] = []
    for name in backends:
        backend = BackendUnderTest(name)
        chips = backend.target.chips if by_chip and backend.target is not None else ()
        found += [Column(chip, name, runs_on(backend)) for chip in chips or (name,)]
    if by_chip:
        found += [Column(chip, "", NO_TARGET) for chip in CHIPS_WITHOUT_TARGET]
    return found


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"
