"""Errors of command lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from dicp.errors.base import DicpError


def run_command_line(app: Callable[..., Any], name: str) -> None:
    """Run a typer application; a DicpError is its message on stderr and exit status 1."""
    try:
        app(prog_name=name)
    except DicpError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
        sys.exit(1)
