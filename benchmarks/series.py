"""A series of measurements in one process; items that are slow, hang or crash are named.

The parent calls `run`; the process is `python -m benchmarks.series OUTPUT`, which reads its items
from its input. It writes a line when it begins an item and one with the item's result. An item that
outlasts its limit ends the process, and so does a crash: the next process continues with the next
item.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT

POLL = 0.1
TAIL = 1500


def run(
    function: str,
    items: Sequence[str],
    arguments: Mapping[str, Any],
    *,
    deadline: float,
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Any, str]]:
    """(item, result, trouble) of `function` ("module:name") for each item as it comes.

    limit: seconds for one item, the process's own start included. deadline: of `time.monotonic`;
    items that are not begun by then are not yielded.
    """
    waiting = list(items)
    while waiting and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as folder:
            child = _Child(Path(folder), function, waiting, arguments, environment or {})
            try:
                yield from child.results(waiting, deadline, limit)
            finally:
                child.kill()


class _Child:
    def __init__(
        self,
        folder: Path,
        function: str,
        items: Sequence[str],
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.lines = folder / "lines"
        self.lines.touch()
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.series", str(self.lines)],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that its own children end with it
            )
        assert self.process.stdin is not None
        task = {"function": function, "items": list(items), "arguments": dict(arguments)}
        self.process.stdin.write(json.dumps(task))
        self.process.stdin.close()

    def results(
        self, waiting: list[str], deadline: float, limit: float
    ) -> Iterator[tuple[str, Any, str]]:
        """The next lines; items are removed from `waiting` when they are done or given up."""
        began, seen = time.monotonic(), 0
        while waiting:
            ended = self.process.poll() is not None
            lines = self.lines.read_text().splitlines()
            for line in lines[seen:]:
                found = json.loads(line)
                waiting.remove(found["item"])
                began = time.monotonic()
                yield found["item"], found["result"], found["trouble"]
            seen = len(lines)
            now = time.monotonic()
            if not waiting or (ended and not lines[seen:]):
                break
            if now > min(deadline, began + limit):
                item = waiting.pop(0)
                yield item, None, f"not done after {now - began:.0f} s"
                return
            time.sleep(POLL)
        if waiting and self.process.poll() is not None:
            tail = self.log.read_text()[-TAIL:].strip()
            yield waiting.pop(0), None, f"ended with {self.process.returncode}: {tail}"

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    output = Path(sys.argv[1])
    task = json.loads(sys.stdin.read())
    module, _, name = task["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for item in task["items"]:
        result, trouble = None, ""
        try:
            result = function(item, **task["arguments"])
        except Exception as error:  # one failure does not stop the other items
            place = traceback.extract_tb(error.__traceback__)[-1]
            trouble = (
                f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            )
        with output.open("a") as file:
            line = {"item": item, "result": result, "trouble": trouble[-TAIL:]}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
