"""What every record of a tool carries: an id, the user's line, and the logger that prints it."""

from __future__ import annotations

import itertools
import linecache
import logging
import sys
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from dicp.config import tool_variable

_NUMBERS = itertools.count(1)
"""One counter per process; taking the next number is atomic."""

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
TIME_FORMAT = "%Y-%m-%d-%H-%M-%S"


class _Printed(logging.Handler):
    """Writes lines as `print` does, to what stdout is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(f"{record.getMessage()}\n")


@cache
def logger() -> logging.Logger:
    """The logger `dicp.op_tools`, which prints at level INFO unless the program has set it up."""
    log = logging.getLogger("dicp.op_tools")
    if not log.handlers:
        log.addHandler(_Printed())
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    return log


def timestamp() -> str:
    return time.strftime(TIME_FORMAT)


@dataclass(frozen=True)
class CallId:
    """The id of a call: a number, unique in the process, and the time."""

    number: int
    time: str

    @classmethod
    def new(cls) -> CallId:
        return cls(next(_NUMBERS), timestamp())

    def __str__(self) -> str:
        return f"{self.number}/{self.time}"


@dataclass(frozen=True)
class CallSite:
    """A line of the user's program, with the stack above it where OP_TOOLS_PRINT_STACK is 1."""

    file: str = ""
    line: int = 0
    function: str = ""
    stack: str = ""

    @property
    def short(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.short} {self.function}: {source}" if self.file else ""


def current_call_site() -> CallSite:
    """The innermost frame outside PyTorch and the tools."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return CallSite()
    stack = ""
    if tool_variable("OP_TOOLS_PRINT_STACK") == "1":
        stack = "".join(traceback.format_stack(frame))
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, stack)


def _is_own(file: str) -> bool:
    return file.startswith(_OWN) or file.startswith("<") or file == __file__


def heading(name: str, number: CallId, call_site: CallSite, *more: str) -> str:
    """The first line of a record."""
    parts = [name, f"forward_id:{number}", str(call_site), *more]
    line = "    ".join(part for part in parts if part)
    return f"{line}\n{call_site.stack}" if call_site.stack else line
