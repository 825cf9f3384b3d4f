"""`python -m dicp report FOLDER|SCRIPT`: one HTML page that shows a compilation.

The page carries its data, styles and scripts, and loads nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from dicp.errors import ReportOutputError, ReportSourceError
from dicp.report.dump import read_dump
from dicp.report.page import render
from dicp.report.roofline import Roofline
from dicp.report.script import run_script
from dicp.report.tool_results import FOLDER, read_results


def write_report(
    source: Path, out: Path, arguments: Sequence[str] = (), tools: Path | None = None
) -> Path:
    """Write the report of a dump folder, or of a script that is run for it with `arguments`.

    tools: a folder with results of the operator tools; by default the one in the dump, or what the
    script writes. Returns `out`. Raises ReportSourceError, ReportScriptError, ReportOutputError.
    """
    _check_writable(out)
    if source.is_dir():
        inside = source / FOLDER
        results = read_results(tools or inside)
        dump, command = read_dump(source), str(source)
    elif source.is_file():
        with tempfile.TemporaryDirectory(prefix="dicp-report-") as folder:
            run = run_script(source, arguments, Path(folder))
            dump = read_dump(Path(folder), source)
        results = read_results(tools or Path(FOLDER), 0.0 if tools else run.started, run.findings)
        command = " ".join([str(source), *arguments])
    else:
        raise ReportSourceError(source, "there is no such file or folder")
    page = render(dump, Roofline.measure(dump.measured), results, command)
    try:
        out.write_text(page, "utf-8")
    except OSError as error:
        raise ReportOutputError(out, error.strerror or str(error)) from error
    return out


def _check_writable(out: Path) -> None:
    """Raises ReportOutputError now rather than after the script has run."""
    try:
        existed = out.exists()
        with out.open("a", encoding="utf-8"):
            pass
        if not existed:
            out.unlink()
    except OSError as error:
        raise ReportOutputError(out, error.strerror or str(error)) from error
