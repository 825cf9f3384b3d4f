"""macagraph on two devices: where kernels are loaded and launched, and where memory lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("maca_devices.py")
CHECKS = re.findall(r"^def (\w+)\(runtime: Runtime", PROGRAM.read_text(), re.MULTILINE)
assert CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_two_devices(run: Any, check: str) -> None:
    tests = str(Path(__file__).parents[1])
    run(PROGRAM, check, DIPU_SIMULATED_DEVICES="2", DIPU_MOCK_CUDA="0", PYTHONPATH=tests)
