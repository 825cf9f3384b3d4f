"""A module that runs in a process of its own, and what it has told when it ends in any way."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dicp.conformance.processes import exit_text, fatal_error_text, started


@dataclass(frozen=True)
class Ended:
    """What a process told, in order, and how it died; `how` is empty if it came to its end."""

    told: list[Any]
    how: str


def run_module(module: str, job: Mapping[str, Any], seconds: float, **variables: str) -> Ended:
    """Run `python -m module`, which tells events, with `job` and environment variables.

    A process that does not end within `seconds` is killed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = started(module, errors, **variables)
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
