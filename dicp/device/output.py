"""Lines for readers of logs: on standard output, at once."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write `text` as lines of the program's output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
