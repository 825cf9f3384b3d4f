"""The results of `run_test` as files: CSV, JSON, JUnit XML, and on request HTML and a workbook."""

from __future__ import annotations

import csv
import importlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from dicp.conformance.rows import FAILURES, RESULTS, Row
from dicp.template import render_html

TIMES: Final = ("ms", "eager_ms", "copy_share")
"""What `--profile` adds to the details of a case."""
COLUMNS: Final = (
    "operator", "case", "dtype", "shapes", "result", "needed_atol", "needed_rtol", "max_error",
    "index", "seconds", *TIMES, "reason",
)  # fmt: skip
CSV: Final = "error_report.csv"
JSON: Final = "report.json"
JUNIT: Final = "junit.xml"
HTML: Final = "report.html"
_PAGE: Final = Path(__file__).with_name("report.html.jinja")


def write_reports(rows: Sequence[Row], workbook: Path, html: bool, title: str) -> list[Path]:
    """Write the files into the workbook's folder; the workbook itself where openpyxl is there.

    Returns the files.
    """
    folder = workbook.parent
    folder.mkdir(parents=True, exist_ok=True)
    table = [cells(row) for row in rows]
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(table)
    records = [record(row) for row in rows]
    counts = Counter(row.result for row in rows)
    totals = {result: counts[result] for result in RESULTS}
    report = {"title": title, "counts": totals, "cases": records}
    (folder / JSON).write_text(json.dumps(report, indent=1))
    junit(rows, title).write(folder / JUNIT, encoding="utf-8", xml_declaration=True)
    written = [folder / CSV, folder / JSON, folder / JUNIT]
    if html:
        page = table_page(title, COLUMNS, table, COLUMNS.index("result"), totals)
        (folder / HTML).write_text(page, "utf-8")
        written.append(folder / HTML)
    if find_spec("openpyxl") is not None:
        _write_workbook(workbook, table)
        written.append(workbook)
    return written


def table_page(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: int,
    counts: Mapping[str, int],
) -> str:  # fmt: skip
    """A page with a table that can be filtered by text, and by column number `kind`."""
    return render_html(_PAGE, title=title, columns=columns, rows=rows, kind=kind, counts=counts)


def cells(row: Row) -> list[Any]:
    """The values of COLUMNS; empty where a case did not run."""
    details = row.details
    index = details.get("index", "")
    return [
        row.cls, row.test, details.get("dtype", ""), str(details.get("shapes", "")), row.result,
        *_numbers(details, "needed_atol", "needed_rtol", "max_error"),
        str(tuple(index)) if index else "", f"{row.seconds:.3f}", *_numbers(details, *TIMES),
        row.reason,
    ]  # fmt: skip


def _numbers(details: Mapping[str, Any], *names: str) -> list[Any]:
    found = (details.get(name, "") for name in names)
    return [f"{number:.3g}" if isinstance(number, float) else number for number in found]


def record(row: Row) -> dict[str, Any]:
    """A case's result as JSON."""
    return {"operator": row.cls, "case": row.test, "result": row.result, "reason": row.reason,
            "seconds": row.seconds, "details": dict(row.details)}  # fmt: skip


def junit(rows: Sequence[Row], title: str) -> ElementTree.ElementTree[Any]:
    """The results in JUnit's form: a test case for each row."""
    failed = sum(row.result in FAILURES for row in rows)
    skipped = sum(row.result == "skipped" for row in rows)
    suite = ElementTree.Element(
        "testsuite", name=title, tests=str(len(rows)), failures=str(failed), skipped=str(skipped)
    )
    for row in rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=row.cls, name=row.test, time=f"{row.seconds:.3f}"
        )
        kind = {"passed": "", "skipped": "skipped"}.get(row.result, "failure")
        if kind:
            child = ElementTree.SubElement(case, kind, message=_printable(row.first_line))
            child.text = _printable(row.reason)
    return ElementTree.ElementTree(suite)


def _printable(text: str) -> str:
    """Text without the control characters that XML has no form for."""
    return "".join(c for c in text if c >= " " or c in "\n\t")


def _write_workbook(path: Path, table: Sequence[Sequence[Any]]) -> None:
    book = importlib.import_module("openpyxl").Workbook()
    sheet = book.active
    for line in (COLUMNS, *table):
        sheet.append([_printable(str(cell)) for cell in line])
    sheet.freeze_panes, sheet.auto_filter.ref = "A2", sheet.dimensions
    book.save(path)
