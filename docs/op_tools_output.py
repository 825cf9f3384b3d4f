"""Runs the Python blocks of docs/op_tools.md and writes what each prints under it.

python docs/op_tools_output.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the package

from dicp.testing import torchvision_operators  # noqa: E402

torchvision_operators.define()

PAGE = Path(__file__).with_name("op_tools.md")
BLOCK = re.compile(r"```python\n(.*?)```\n\n<!-- output -->\n(?:```text\n.*?```\n)?", re.S)
MAX_LINES = 16
MAX_COLUMNS = 150


def page() -> str:
    """The page with the output of its blocks, which share their names."""
    names: dict[str, object] = {"__name__": "op_tools"}

    def run(block: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            above = "\n" * (block.string.count("\n", 0, block.start()) + 1)
            exec(compile(above + block[1], str(PAGE), "exec"), names)
        shown = out.getvalue()
        for folder_of_code in (f"{ROOT}/", f"{sysconfig.get_path('purelib')}/"):
            shown = shown.replace(folder_of_code, "")
        lines = [line[:MAX_COLUMNS].rstrip() for line in shown.splitlines()]
        if len(lines) > MAX_LINES:
            half = MAX_LINES // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
        shown = "\n".join(lines)
        return f"```python\n{block[1]}```\n\n<!-- output -->\n```text\n{shown}\n```\n"

    text = PAGE.read_text()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return BLOCK.sub(run, text)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    PAGE.write_text(page())
