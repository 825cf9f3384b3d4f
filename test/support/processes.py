"""Programs that tests write, and processes that they have started."""

from __future__ import annotations

import time
from pathlib import Path


def script(path: Path, body: str) -> str:
    """Writes a shell script that may be executed; returns its path."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def alive(path: Path) -> list[int]:
    """The processes listed in a file that run."""
    pids = [int(line) for line in path.read_text().split()]
    return [p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in _state(p)]


def gone(path: Path) -> bool:
    """Whether the processes listed in a file have ended, or do within half a minute: killed ones
    take a while, on a busy machine seconds."""
    return any(not alive(path) or time.sleep(0.05) for _ in range(600))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
