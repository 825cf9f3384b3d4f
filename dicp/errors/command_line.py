"""Errors of command lines."""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dicp.errors.base import DicpError
from dicp.errors.text import sentence

_ADVICE = {
    errno.EACCES: "Give a path that this user may use, or change its permissions.",
    errno.EPERM: "Give a path that this user may use, or change its permissions.",
    errno.EROFS: "Give a path on a disk that can be written.",
    errno.ENOSPC: "Make room on the disk, or give a path on another one.",
    errno.EDQUOT: "Make room on the disk, or give a path on another one.",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or give a path on another disk.",
    errno.ENOENT: "Check the path: the file or its folder is not there.",
    errno.EISDIR: "Give the path of a file.",
    errno.ENOTDIR: "Give a path whose folders are no files.",
    errno.EEXIST: "Give the path of a folder.",
}
"""What to do about a path that cannot be read or written, by the system's error number."""


def run_command_line(app: Callable[..., Any], name: str) -> None:
    """Run a typer application; a DicpError, or a file that cannot be read or written, is a message
    on stderr and exit status 1."""
    try:
        app(prog_name=name)
    except DicpError as error:
        _exit(str(error))
    except OSError as error:
        _exit(described(error))


def above_zero(value: float) -> float:
    """The callback of an option that is a finite number above 0. Raises BadParameter."""
    return _above_zero(value, "no number")


def seconds_above_zero(value: float) -> float:
    """The callback of an option that is a time limit. Raises BadParameter."""
    return _above_zero(value, "not a number of seconds")


def _above_zero(value: float, otherwise: str) -> float:
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is {otherwise} above 0")
    return value


def existing_folder(path: Path | None) -> Path | None:
    """The callback of an option that is a folder to read. Raises BadParameter."""
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path)!r}")
    return path


def described(error: OSError) -> str:
    """What the system says of a path, and what to do."""
    path = "" if error.filename is None else f"{str(error.filename)!r}: "
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{path}{sentence(error.strerror or str(error))} {advice}".rstrip()


def _exit(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    sys.exit(1)
