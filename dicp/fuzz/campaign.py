"""Batches by seed in worker processes: one that dies names its batch, and memory is given back."""

from __future__ import annotations

import gc
import json
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from dicp.cache import Cache
from dicp.config import Config
from dicp.fuzz.batch import Batch, Find, Outcome, draw_batch, examine, fails
from dicp.fuzz.check import Mode
from dicp.fuzz.program import Program, merged
from dicp.fuzz.shrink import shrunk

WORKER_BYTES = 3 * 2**30
"""A worker that is larger ends after its batch, and another goes on."""
MUTED_AFTER = 2
"""A template alone that fails so often is not drawn any more: its class is known."""


@dataclass(frozen=True)
class Plan:
    """What to run. `seconds` or `programs`: whichever ends first; 0 is without end."""

    backend: str
    seed: str = "0"
    seconds: float = 0.0
    programs: int = 0
    jobs: int = 1
    batch: int = 64
    without: tuple[str, ...] = ()
    group: str = ""
    """A group of the table that half of the statements come from; one by chance for each batch."""
    pytorch: bool = False
    """Report what fails in PyTorch's own front end, too."""
    shrink_seconds: float = 15.0
    batch_seconds: float = 3600.0
    """A batch that takes longer hangs."""


@dataclass
class Tally:
    """What a campaign has come to."""

    plan: Plan
    programs: int = 0
    seconds: float = 0.0
    finds: list[tuple[str, Find]] = field(default_factory=list)
    pytorch: int = 0
    unstable: int = 0
    muted: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        rate = self.programs / self.seconds if self.seconds else 0.0
        return (
            f"{self.programs} programs in {self.seconds:.0f} s ({rate:.1f} per second): "
            f"{len(self.finds)} finds, {self.pytorch} that fail in PyTorch's own front end, "
            f"{self.unstable} explained by rounding"
        )


Write = Callable[[str], object]


def work(plan: Plan, numbers: Iterable[int], write: Write, muted: set[str]) -> None:
    """What a worker does: examine batches, and tell the process that started it about each."""
    alone: Counter[str] = Counter()
    for k, number in enumerate(numbers):
        write(json.dumps({"began": number}))
        outcome = examined(plan, number, muted)
        for find in outcome.finds:
            if len(find.program.statements) == 1:
                alone[find.program.statements[0].template] += 1
        muted |= {template for template, count in alone.items() if count >= MUTED_AFTER}
        if k == 0:  # what the first batch imported stays: full collections need not look at it
            gc.collect()
            gc.freeze()
        write(json.dumps({"done": number, "muted": sorted(muted), **_plain(outcome)}))
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > WORKER_BYTES:
            return


def examined(plan: Plan, number: int, muted: set[str]) -> Outcome:
    """A batch examined, each find shrunk."""
    # Routines and drivers, which are the same for all programs, stay.
    Cache.open(Config.from_env()).clear("aot", "graph", "kernel")
    drawn = drawn_batch(plan, number, muted)
    outcome = examine(drawn)
    outcome.finds = [shrunk(find, plan.shrink_seconds) for find in outcome.finds]
    return outcome


def drawn_batch(plan: Plan, number: int, muted: Collection[str]) -> Batch:
    return draw_batch(f"{plan.seed}/{number}", plan.backend, plan.batch, muted, plan.group)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "programs": outcome.programs,
        "pytorch": [plain_find(find) for find in outcome.pytorch],
        "unstable": len(outcome.unstable),
        "finds": [plain_find(find) for find in outcome.finds],
    }


def plain_find(find: Find) -> dict[str, Any]:
    return {"program": find.program.plain(), "mode": find.mode.plain(), "text": find.text}


def find_from(plain: dict[str, Any]) -> Find:
    return Find(Program.from_plain(plain["program"]), Mode(**plain["mode"]), plain["text"])


class Worker:
    """A process that examines batches, and the thread that listens to it."""

    def __init__(self, plan: Plan, first: int, muted: set[str], told: queue.Queue[Any]) -> None:
        self.number = first
        self.since = time.monotonic()
        self.process = _started("work", {"plan": asdict(plan), "first": first, "step": plan.jobs,
                                         "muted": sorted(muted)})  # fmt: skip
        assert self.process.stdout is not None
        self.listener = threading.Thread(target=self._listen, args=(self.process.stdout, told))
        self.listener.start()

    def _listen(self, stdout: IO[str], told: queue.Queue[Any]) -> None:
        for line in stdout:
            if line.startswith("{"):
                told.put((self, json.loads(line)))
        self.process.wait()
        told.put((self, None))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _started(what: str, given: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dicp.fuzz.worker", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given))
    process.stdin.close()
    return process


def run(plan: Plan, report: Callable[[str, Find], object], progress: Write) -> Tally:
    """Run the campaign; `report` is told of each find as it is made."""
    tally = Tally(plan, muted=set(plan.without))
    told: queue.Queue[Any] = queue.Queue()
    began = time.monotonic()
    workers = [Worker(plan, k, tally.muted, told) for k in range(plan.jobs)]
    try:
        while workers:
            tally.seconds = time.monotonic() - began
            if _is_over(plan, tally):
                break
            try:
                worker, line = told.get(timeout=5)
            except queue.Empty:
                for worker in workers:
                    if time.monotonic() - worker.since > plan.batch_seconds:
                        worker.process.send_signal(signal.SIGKILL)
                continue
            if line is None:
                workers.remove(worker)
                following = _after_end(plan, worker, tally, report)
                workers.append(Worker(plan, following, tally.muted, told))
            else:
                _take(worker, line, tally, report, progress)
    finally:
        for worker in workers:
            worker.stop()
    return tally


def _is_over(plan: Plan, tally: Tally) -> bool:
    too_long = plan.seconds and tally.seconds > plan.seconds
    return bool(too_long or (plan.programs and tally.programs >= plan.programs))


def _take(
    worker: Worker,
    line: dict[str, Any],
    tally: Tally,
    report: Callable[[str, Find], object],
    progress: Write,
) -> None:
    worker.since = time.monotonic()
    if "began" in line:
        worker.number = line["began"]
        return
    worker.number = line["done"] + tally.plan.jobs
    tally.programs += line["programs"]
    tally.pytorch += len(line["pytorch"])
    if tally.plan.pytorch:
        for plain in line["pytorch"]:
            report(f"{tally.plan.seed}/{line['done']}, in PyTorch's own", find_from(plain))
    tally.unstable += line["unstable"]
    tally.muted |= set(line["muted"])
    for plain in line["finds"]:
        found = (f"{tally.plan.seed}/{line['done']}", find_from(plain))
        tally.finds.append(found)
        report(*found)
    progress(str(tally))


def _after_end(
    plan: Plan, worker: Worker, tally: Tally, report: Callable[[str, Find], object]
) -> int:
    """The batch to go on with after a worker ended, by itself or by a signal."""
    status = worker.process.returncode
    if status == 0:
        return worker.number
    seed = f"{plan.seed}/{worker.number}"
    text = f"Ended: the process ended with status {status} in batch {seed}"
    if not draws(plan, worker.number, tally.muted):
        tally.pytorch += 1
        return worker.number + plan.jobs
    find = replace(_crashed(plan, worker.number, tally.muted), text=text)
    tally.finds.append((seed, find))
    report(seed, find)
    return worker.number + plan.jobs


def draws(plan: Plan, number: int, muted: set[str]) -> bool:
    """Whether a batch can be drawn: eager, which is asked for gradients, may end the process."""
    given = {"plan": asdict(plan), "number": number, "muted": sorted(muted)}
    return _started("draw", given).wait(1200) == 0


def draw_once(given: dict[str, Any]) -> None:
    """Draw one batch, whatever comes of it but the end of the process."""
    plan = plan_from(given["plan"])
    drawn_batch(plan, given["number"], given["muted"])


def plan_from(plain: dict[str, Any]) -> Plan:
    return Plan(**{**plain, "without": tuple(plain["without"])})


def _crashed(plan: Plan, number: int, muted: set[str]) -> Find:
    """The smallest part of a batch that ends a process of its own."""
    drawn = drawn_batch(plan, number, muted)
    programs = drawn.programs
    while len(programs) > 1:
        half = len(programs) // 2
        ended = [part for part in (programs[:half], programs[half:])
                 if fails_apart(merged(part), drawn.mode)]  # fmt: skip
        if not ended:
            break
        programs = ended[0]
    whole = Find(merged(programs), drawn.mode, "Ended")
    return shrunk(whole, 6 * plan.shrink_seconds, fails_apart)


def fails_apart(program: Program, mode: Mode) -> str:
    """How the program ends a process of its own; empty where it does not."""
    process = _started("check", {"program": program.plain(), "mode": mode.plain()})
    try:
        status = process.wait(1200)
    except subprocess.TimeoutExpired:
        process.kill()
        return "Ended: hangs"
    return f"Ended: status {status}" if status else ""


def check_once(given: dict[str, Any]) -> None:
    """Check one program, whatever comes of it but the end of the process."""
    fails(Program.from_plain(given["program"]), Mode(**given["mode"]))
