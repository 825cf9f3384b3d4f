"""Each group of operators and each file in a process of its own: one that dies costs one test."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Protocol

from dicp.config import environment_with
from dicp.conformance.rows import Row

START_SECONDS = 300.0
"""A process has to tell its tests within this time, in which it imports and builds a device."""
STDERR_CHARACTERS = 2000


class Unit(Protocol):
    """What one process runs: a dataclass, which it reads as JSON, with the tests that are done."""

    @property
    def file(self) -> str:
        """What the rows of its results are filed under."""

    @property
    def worker(self) -> str:
        """The module that the process runs."""

    @property
    def device(self) -> str: ...


def run(
    units: Sequence[Unit],
    report: Callable[[Row], object],
    jobs: int,
    test_seconds: float,
    file_seconds: float,
) -> None:
    """Run all processes, `jobs` at a time; `report` is told of each result as it is made."""
    rows: queue.Queue[Row] = queue.Queue()

    def work(unit: Unit) -> None:
        deadline = time.monotonic() + file_seconds
        _UnitRun(unit, rows.put, test_seconds, deadline).run()

    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(work, unit) for unit in units]
        while not all(one.done() for one in pending) or not rows.empty():
            try:
                report(rows.get(timeout=0.2))
            except queue.Empty:
                continue
        for one in pending:
            one.result()


@dataclass
class _UnitRun:
    """One unit, in as many processes as it takes: after a crash the next goes on."""

    unit: Unit
    report: Callable[[Row], object]
    test_seconds: float
    deadline: float
    tests: list[list[str]] = field(default_factory=list)
    done: list[list[str]] = field(default_factory=list)

    def run(self) -> None:
        how, before = "", -1
        while len(self.done) > before and time.monotonic() < self.deadline:
            before = len(self.done)
            how = self._process()
            if not how or (self.tests and not self._left()):
                break
        for test in self._left():
            self._row(test, "crashed", how or "the process ended before it ran this test")
        if how and not self.tests:
            self._row(["", ""], "crashed", how)

    def _left(self) -> list[list[str]]:
        return [test for test in self.tests if test not in self.done]

    def _row(
        self, test: list[str], result: str, reason: str, seconds: float = 0.0,
        details: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.done.append(test)
        cls, name = test
        self.report(Row(self.unit.file, cls, name, result, reason, seconds, details or {}))

    def _process(self) -> str:
        """Run what is left in a new process; how it died, or nothing if it came to its end."""
        with tempfile.TemporaryFile("w+") as errors:
            process = _started(self.unit, self.done, errors)
            try:
                running, complete, how = self._follow(process)
            finally:
                process.kill()
                status = process.wait()
            if complete:
                return ""
            how = how or f"the process ended {exit_text(status)}"
            errors.seek(0)
            said = fatal_error_text(errors.read())
            how = f"{how}\n{said}" if said else how
            if running is not None:
                seconds = self.test_seconds if "hangs" in how else 0.0
                self._row(running["began"], *(running.get("fatal") or ("crashed", how, seconds)))
            return how

    def _follow(self, process: subprocess.Popen[str]) -> tuple[dict[str, Any] | None, bool, str]:
        """Report results as they come. What the process told of the test that still ran as that
        began (`fatal`: its row in place of a crash), whether all ended, and why not."""
        told: queue.Queue[Any] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_listen, args=(process.stdout, told), daemon=True).start()
        running, limit = None, START_SECONDS
        while True:
            left = self.deadline - time.monotonic()
            try:
                event = told.get(timeout=max(0.0, min(limit, left)))
            except queue.Empty:
                if left <= limit:
                    return running, False, "the time of the file is over"
                return running, False, f"it hangs: no end within {limit:g} s"
            limit = self.test_seconds
            if event is None:
                return running, False, ""
            if "tests" in event:
                self.tests = self.tests or event["tests"]
            elif "began" in event:
                running = event
            elif "row" in event:
                running = None
                self._row(*event["row"])
            elif "end" in event:
                return running, True, ""


def started(module: str, errors: IO[str], **variables: str) -> subprocess.Popen[str]:
    """A new process of `python -m module`, with environment variables of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment_with(**variables),
    )


def _started(unit: Unit, done: list[list[str]], errors: IO[str]) -> subprocess.Popen[str]:
    variables = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": unit.device, "DIPU_MOCK_CUDA": "false"}
    process = started(unit.worker, errors, **variables)
    assert process.stdin is not None
    job: dict[str, Any] = asdict(unit)  # type: ignore[call-overload]
    process.stdin.write(json.dumps({**job, "done": done}))
    process.stdin.close()
    return process


def _listen(stdout: IO[str], told: queue.Queue[Any]) -> None:
    for line in stdout:
        told.put(json.loads(line))
    told.put(None)


def fatal_error_text(stderr: str) -> str:
    """What Python says of a fatal error, the stack first; else the end."""
    _, fatal, stack = stderr.rpartition("Fatal Python error")
    return (fatal + stack[:STDERR_CHARACTERS] if fatal else stderr[-STDERR_CHARACTERS:]).strip()


def exit_text(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    return f"by signal {signal.Signals(-status).name}"
