"""Watches a process: host memory, processor and device use, one CSV row per interval.

python -m dicp.op_tools.process_monitor --pid 1234 [--interval 1] [--label NAME] [--rows N]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dicp.errors import ToolVariableError
from dicp.op_tools.records import timestamp
from dicp.op_tools.results import FOLDER, append_csv, cache_size

RESULTS = "process_monitor_result"
COLUMNS = (
    "runningtime(Seconds)",
    "time_str",
    "time(Seconds)",
    "host_memory(MiB)",
    "processor(%)",
    "device_memory_used(MiB)",
    "device_utilisation(%)",
)


def host_memory(pid: int) -> float:
    """Resident memory of a process in MiB. Raises OSError for one that does not run."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far. Raises OSError for one that does not run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def device_use() -> tuple[str, float | str, float | str]:
    """The device's name, its memory in use in MiB and its utilisation; empty where unknown."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", "", ""
    module = torch.get_device_module(accelerator)
    try:
        free, total = module.mem_get_info()
        memory: float | str = (total - free) / 2**20
    except Exception:  # a plugin without it
        memory = ""
    try:
        busy: float | str = float(module.utilization())
    except Exception:  # the driver's library is not installed
        busy = ""
    return accelerator.type, memory, busy


def monitor(pid: int, interval: float, label: str = "", rows: int | None = None) -> Path:
    """Write rows until the process ends, or Ctrl-C, or so many; returns the CSV file.

    Raises OSError if the process does not run or the file cannot be written.
    """
    device = device_use()[0]
    name = f"process_monitor_result_{device}_pid{pid}_{label}_{timestamp()}.csv"
    path = FOLDER / RESULTS / name
    start = time.monotonic()
    last, spent = start, processor_seconds(pid)
    waiting: list[tuple[object, ...]] = []
    written = 0
    try:
        while rows is None or written < rows:
            time.sleep(interval)
            try:
                memory, total = host_memory(pid), processor_seconds(pid)
            except OSError:  # the process has ended
                break
            now = time.monotonic()
            busy = 100 * (total - spent) / (now - last)
            _, device_memory, utilisation = device_use()
            row = (f"{now - start:.3f}", timestamp(), f"{time.time():.3f}", f"{memory:.1f}",
                   f"{busy:.1f}", device_memory, utilisation)  # fmt: skip
            waiting.append(row)
            if len(waiting) >= cache_size(1):
                append_csv(path, COLUMNS, waiting)
                waiting.clear()
            last, spent, written = now, total, written + 1
    except KeyboardInterrupt:
        pass
    finally:  # a row that waits is written however the watching ends
        if waiting:
            append_csv(path, COLUMNS, waiting)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0, or 2 for a process that does not run and for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m dicp.op_tools.process_monitor")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, help="seconds between rows (1), above 0"
    )
    parser.add_argument("--label", default="", help="part of the file's name")
    parser.add_argument("--rows", type=_count, help="stop after so many rows")
    options = parser.parse_args(arguments)
    try:
        path = monitor(options.pid, options.interval, options.label, options.rows)
    except OSError as error:
        sys.stderr.write(f"process {options.pid} cannot be watched: {error}\n")
        return 2
    except ToolVariableError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{path} saved\n")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


if __name__ == "__main__":
    sys.exit(main())
