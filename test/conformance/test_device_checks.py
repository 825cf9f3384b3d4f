"""`python -m dicp.conformance utest`: a device that works, and one with faults put in."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dicp.conformance.__main__ import app
from dicp.conformance.device_checks.checks import CHECKS
from dicp.conformance.device_checks.commands import checked

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).resolve().parents[2]

FAULTS = """
import os

from dicp.device.module import DipuModule, Stream

DipuModule.set_per_process_memory_fraction = lambda *_: os.abort()
Stream.wait_event = lambda *_: None
"""
"""Imported by each process as it starts: events are not waited for, a limit ends the process."""


def test_the_device_passes() -> None:
    done = CliRunner().invoke(app, ["utest", "--device", "dipu"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line[8:].partition(":")[0] for line in lines] == list(CHECKS)
    assert "ms between the events" in lines[2] and "requested" in lines[3]


def test_faults_are_found_and_a_crash_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    found = {one.name: one for one in checked("dipu", 600.0, PYTHONPATH=f"{tmp_path}:{ROOT}")}
    wrong = [name for name, one in found.items() if not one.ok]
    assert wrong == ["two streams with an event between", "memory exhaustion message"], found
    assert "read [0.0], expected [1.0]" in found[wrong[0]].detail
    assert "by signal SIGABRT" in found[wrong[1]].detail


def test_a_device_that_is_not_there_is_refused() -> None:
    for device in ("nowhere", "cpu"):
        assert CliRunner().invoke(app, ["utest", "--device", device]).exit_code == 2
