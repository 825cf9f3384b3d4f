"""Running a script with observation on: its graphs are dumped, its kernels timed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dicp.config import environment_with
from dicp.errors import ReportScriptError

_SHOWN_LINES = 12
_FINDINGS = ("overflow_check:", "diverging kernel:", "autocompare:", "first failure:")
"""How the lines begin in which operator tools sum up what they found."""


@dataclass(frozen=True)
class ScriptRun:
    """When a script was started, in seconds since the epoch, and what tools in it printed."""

    started: float
    findings: list[str] = field(default_factory=list)


def run_script(script: Path, arguments: Sequence[str], dump: Path) -> ScriptRun:
    """Run a script in a process of its own that dumps into the folder `dump`.

    The disk cache is off, so that all is compiled and every stage takes its own time. What the
    script prints goes where this process prints. Raises ReportScriptError.
    """
    run = ScriptRun(time.time())
    environment = environment_with(DICP_DUMP=str(dump), DICP_DUMP_TIMES="1", DICP_CACHE="0")
    last: deque[str] = deque(maxlen=_SHOWN_LINES)

    def find(line: str) -> None:
        if line.startswith(_FINDINGS):
            run.findings.append(line.rstrip())

    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    with process:
        errors = threading.Thread(target=_passed_on, args=(process.stderr, sys.stderr, last.append))
        errors.start()
        _passed_on(process.stdout, sys.stdout, find)
        errors.join()
    if process.returncode:
        raise ReportScriptError(script, process.returncode, "".join(last))
    return run


def _passed_on(lines: Iterable[str], out: IO[str], look: Callable[[str], object]) -> None:
    for line in lines:
        look(line)
        out.write(line)
        out.flush()
