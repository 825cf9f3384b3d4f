"""Processes that tests have started."""

from __future__ import annotations

import time
from pathlib import Path


def alive(path: Path, seconds: float = 5) -> list[int]:
    """The processes listed in a file that run, and go on for some seconds: killed ones take a while
    to end."""
    pids, until = [int(line) for line in path.read_text().split()], time.monotonic() + seconds
    while (found := [p for p in pids if "Z" not in _state(p)]) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
