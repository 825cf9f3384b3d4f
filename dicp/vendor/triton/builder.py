"""Builds kernels in parallel worker processes; results are kept in dicp's cache.

A kernel is compiled for a variant: the chip, the width of indices, and which pointers are known to
be aligned. The cache key covers all of the compiler's input.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import queue
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dicp.cache import Cache, key_of
from dicp.config import environment_with
from dicp.errors import CompilerError, FallbackWarning, ToolchainError
from dicp.gpu import build
from dicp.gpu.build import Binary
from dicp.gpu.launch import LaunchPlan
from dicp.private_files import remove_with
from dicp.toolchain import COMPILE_SECONDS
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.thresholds import STARTED_AHEAD

FOLDER = Path(__file__).parent
SHARED_BYTES = {
    80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448,
    120: 101376, 121: 101376,
}  # fmt: skip
"""Most bytes of shared memory per block, by compute capability (CUDA programming guide, table of
technical specifications); 48 KiB for a chip that is not listed."""
MIN_SHARED = 49152
LONGEST_ERROR = 4000


@dataclass(frozen=True)
class Job(build.Job):
    """A kernel that Triton is to build."""

    @property
    def key(self) -> str:
        return key_of("triton", triton_version(), device_functions(), self.request(self.blocks()))

    def request(self, blocks: Mapping[str, int]) -> dict[str, Any]:
        """The job as a JSON object for the worker."""
        elements, wide = self.launch["elements"], self.variant.wide
        flags = (*self.variant.aligned, *[self.variant.even] * self.sizes)
        names = [f"a{k}" for k in range(len(elements))]
        signature = dict(zip(names, [f"*{e}" for e in elements], strict=True))
        signature |= {f"n{k}": "i64" if wide else "i32" for k in range(self.sizes)}
        constants: dict[str, Any] = {"INDEX": "int64" if wide else "int32"}
        constants |= {f"{name.upper()}BLOCK": block for name, block in blocks.items()}
        constants |= self.launch.get("constants", {})
        signature |= dict.fromkeys(constants, "constexpr")
        options = {
            "num_warps": self.launch["warps"],
            **({"num_stages": self.launch["stages"]} if "stages" in self.launch else {}),
            "debug": self.launch["checks"],
            "sanitize_overflow": False,
            "enable_fp_fusion": False,  # x * x - y * y is 0 for equal ones, and has a square root
            "enable_reflect_ftz": False,
        }
        return {
            "name": self.name,
            "body": self.body,
            "signature": signature,
            "constants": constants,
            "aligned": [k for k, on in enumerate(flags) if on],
            "target": ["cuda", self.variant.arch, GPU.lanes],
            "options": options,
        }


class Plan(LaunchPlan[Job]):
    """The launch plan of a program whose kernels Triton compiles."""

    job_type = Job


@lru_cache(maxsize=1)
def triton_version() -> str:
    """The installed Triton's version.

    Raises ToolchainError.
    """
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainError(
            "triton", "the package triton", "it is not installed", "pip install 'dicp[triton]'."
        ) from error


@lru_cache(maxsize=1)
def device_functions() -> str:
    return (FOLDER / "device.py").read_text()


class _Process:
    """One worker process."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dicp-triton-"))
        remove_with(self, self.folder)
        worker = FOLDER / "worker.py"
        # Its own environment: workers start in several threads, and one that changed this process's
        # would free the memory from which another one's child reads it.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(worker), str(self.folder)],  # -P: not on sys.path
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment_with(TRITON_INTERPRET="0"),  # even if the user's are interpreted
        )  # fmt: skip
        self.messages: list[str] = []
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        """Reads what the compiler prints at once, so that a full pipe never blocks it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.messages.append(line)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer; it has an "error" if the worker died, or takes too long."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            with selectors.DefaultSelector() as ready:
                ready.register(self.process.stdout, selectors.EVENT_READ)
                answered = ready.select(COMPILE_SECONDS)
            if not answered:
                late = f"the compiler did not end in time ({COMPILE_SECONDS:g} seconds)"
                return {"error": f"error: {late}, and was killed", "died": True}
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return {"error": f"the compile worker died\n{''.join(self.messages[-20:])}", "died": True}

    def waits(self) -> bool:
        """Whether the process is alive: a keyboard interrupt ends idle workers, too."""
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # flushing what the dead worker did not read
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """A bounded pool of compile processes, started when needed and reused."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._running = 0
        self._counting = threading.Lock()

    def warm_up(self, jobs: int) -> None:
        """Starts workers ahead: their imports run while the front end works."""
        with self._counting:
            missing = min(jobs, STARTED_AHEAD) - self._running
        with contextlib.suppress(OSError):  # `compile` says so if none can be started then, either
            for _ in range(missing):
                self._idle.put(self._start())

    def _start(self) -> _Process:
        """A new worker. Raises OSError where the system starts no process."""
        with self._counting:
            self._running += 1
        try:
            return _Process()
        except OSError:
            with self._counting:
                self._running -= 1
            raise

    def _end(self, process: _Process) -> None:
        with self._counting:
            self._running -= 1
        process.kill()

    def _next(self) -> _Process:
        """An idle worker, or a new one; drops workers that have died while idle."""
        while True:
            try:
                process = self._idle.get_nowait()
            except queue.Empty:
                return self._start()
            if process.waits():
                return process
            self._end(process)

    def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one request to one worker, and ends the worker if it does not answer."""
        try:
            process = self._next()
        except OSError as error:
            return {"error": f"error: the compiler's process cannot be started: {error}"}
        answer: dict[str, Any] = {"died": True}
        try:
            answer = process.ask(request)
        finally:
            if answer.get("died"):
                self._end(process)
            else:
                self._idle.put(process)
        return answer

    def close(self) -> None:
        while not self._idle.empty():
            self._end(self._idle.get())


class Builder:
    """Compiled kernels by job: from memory, from the cache, or from the workers."""

    def __init__(self, cache: Cache, workers: Workers, jobs: int) -> None:
        self.cache = cache
        self.workers = workers
        self.jobs = jobs

    def build(self, jobs: Sequence[Job]) -> list[Binary]:
        """Every job's binary; missing ones are compiled in parallel.

        Raises CompilerError; warns of kernels whose blocks had to be smaller than planned.
        """
        with ThreadPoolExecutor(max(1, min(self.jobs, len(jobs)))) as pool:
            found = list(pool.map(self.build_one, jobs))
        for job, binary in zip(jobs, found, strict=True):
            if dict(binary.blocks) != job.blocks():
                warnings.warn(_shrunk(job, binary), stacklevel=2)
        return found

    def attempt(self, jobs: Sequence[Job]) -> list[Binary | CompilerError]:
        """As `build`, but with the error in the place of each binary that fails to compile."""

        def one(job: Job) -> Binary | CompilerError:
            try:
                return self.build_one(job)
            except CompilerError as error:
                return error

        with ThreadPoolExecutor(max(1, min(self.jobs, len(jobs)))) as pool:
            return list(pool.map(one, jobs))

    def build_one(self, job: Job) -> Binary:
        entry = self.cache.get_or_build("cubin", job.key, lambda: _files(self._compile(job)))
        return _binary(entry.read("kernel.cubin"), json.loads(entry.read("launch.json")))

    def _compile(self, job: Job) -> Binary:
        """The kernel, with smaller blocks where it does not fit into shared memory."""
        blocks: dict[str, int] | None = job.blocks()
        limit = SHARED_BYTES.get(job.variant.arch, MIN_SHARED)
        tried = []
        while blocks is not None:
            answer = self.workers.compile(job.request(blocks))
            if "error" in answer and "shared memory" not in answer["error"]:
                raise _refused(job, answer["error"])
            if answer.get("scratch"):  # a launch passes no scratch memory
                raise _refused(job, "error: it wants memory of its own beside its arguments")
            if "error" not in answer and answer["shared"] <= limit:
                code = base64.b64decode(answer["binary"])
                return Binary(code, answer["entry"], answer["shared"], answer["warps"], blocks)
            tried.append(str(blocks))
            blocks = job.smaller(blocks)
        text = f"error: out of shared memory ({limit} bytes) with every block tried: "
        raise _refused(job, text + "; ".join(tried))


def _shrunk(job: Job, binary: Binary) -> FallbackWarning:
    limit = SHARED_BYTES.get(job.variant.arch, MIN_SHARED)
    return FallbackWarning(
        f"kernel {job.name} has blocks of {dict(binary.blocks)} in the place of {job.blocks()}: "
        f"sm_{job.variant.arch} has {limit} bytes of shared memory for one. Compiled from: "
        f"{'; '.join(job.origins)}"
    )


def _refused(job: Job, text: str) -> CompilerError:
    command = ["triton", job.name, str(job.variant)]
    return CompilerError("triton", command, text[:LONGEST_ERROR], job.origins)


def _files(binary: Binary) -> dict[str, bytes]:
    launch = {"entry": binary.entry, "shared": binary.shared, "warps": binary.warps,
              "blocks": dict(binary.blocks)}  # fmt: skip
    return {"kernel.cubin": binary.code, "launch.json": json.dumps(launch).encode()}


def _binary(code: bytes, launch: Mapping[str, Any]) -> Binary:
    return Binary(code, launch["entry"], launch["shared"], launch["warps"], launch["blocks"])
