"""A module that runs in a process of its own, and what it has told when it ends in any way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dicp.config import environment_with
from dicp.conformance.processes import exit_text, fatal_error_text


class Tell(Protocol):
    def __call__(self, told: Any) -> None:
        """Hand a value that JSON holds to the process that waits."""


@dataclass(frozen=True)
class Ended:
    """What a process told, in order, and how it died; `how` is empty if it came to its end."""

    told: list[Any]
    how: str


def run_module(module: str, job: Mapping[str, Any], seconds: float, **variables: str) -> Ended:
    """Run `python -m module`, which calls `task`, with `job` and environment variables.

    A process that does not end within `seconds` is killed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment_with(**variables),
        )
        how = ""
        try:
            out, _ = process.communicate(json.dumps(job), seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            how = f"it hangs: no end within {seconds:g} s"
        lines = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        if lines and "end" in lines[-1]:
            return Ended(lines[:-1], "")
        errors.seek(0)
        said = fatal_error_text(errors.read())
        how = how or f"the process ended {exit_text(process.returncode)}"
        return Ended(lines, f"{how}\n{said}" if said else how)


def task() -> tuple[Any, Tell, Tell]:
    """In the process: the job, the function that tells a mapping, and the one that ends it all.

    What else is printed goes to stderr.
    """
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(told: Any) -> None:
        answers.write(json.dumps(told) + "\n")

    def end(told: Any) -> None:
        tell({"end": told})
        os._exit(0)  # past what libraries do at exit

    return job, tell, end
