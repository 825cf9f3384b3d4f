"""What test_series has measured in processes of its own, which import nothing for it."""

from __future__ import annotations

import os
import time
from typing import Any


def task(item: str, extra: int = 0) -> Any:
    """What a process is asked to measure."""
    if item == "crash":
        os.abort()
    if item == "hang":
        time.sleep(600)
    if item == "fail":
        raise ValueError("no such number")
    return len(item) + extra
