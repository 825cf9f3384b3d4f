"""Runs blocks of docs/op_tools.md and docs/profiler.md and writes what each prints under it.

python docs/op_tools_output.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `benchmarks` is no part of the package

from dicp.testing import torchvision_operators  # noqa: E402

torchvision_operators.define()

PAGES = [Path(__file__).with_name(f"{name}.md") for name in ("op_tools", "profiler")]
BLOCK = re.compile(
    r"```(python|sh)\n((?:(?!```).)*?)```\n\n<!-- output -->\n(?:```text\n.*?```\n)?", re.S
)
MAX_LINES = 16
MAX_COLUMNS = 150


def page(path: Path) -> str:
    """The page with the output of its blocks: of Python, which share their names, or a command."""
    names: dict[str, object] = {"__name__": path.stem}

    def run(block: re.Match[str]) -> str:
        shown = printed(block) if block[1] == "python" else output_of(block[2])
        for folder_of_code in (f"{sysconfig.get_path('purelib')}/", f"{ROOT}/"):
            shown = shown.replace(folder_of_code, "")
        lines = [line[:MAX_COLUMNS].rstrip() for line in shown.splitlines()]
        if len(lines) > MAX_LINES:
            half = MAX_LINES // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
        shown = "\n".join(lines)
        return f"```{block[1]}\n{block[2]}```\n\n<!-- output -->\n```text\n{shown}\n```\n"

    def printed(block: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            above = "\n" * (block.string.count("\n", 0, block.start()) + 1)
            exec(compile(above + block[2], str(path), "exec"), names)
        return out.getvalue()

    text = path.read_text()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return BLOCK.sub(run, text)
        finally:
            os.chdir(before)


def output_of(command: str) -> str:
    """What a command `python SCRIPT` prints."""
    program, *arguments = command.split()
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return done.stdout.decode()


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
