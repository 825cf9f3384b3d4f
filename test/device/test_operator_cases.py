"""The operator cases of test/op, eager on the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sweep

PARTS = 8
LAST_LINE = re.compile(
    r"CASES (\d+) failed (\d+) on the device alone (\d+) operators with a rule on the CPU in (\d+)"
)


@pytest.mark.parametrize("part", range(PARTS))
def test_operator_cases(run: Any, part: int) -> None:
    """Values and gradients are the CPU's; what the target has a rule for stays on the device.

    In two cases of all, an index is a mask: its sizes are known only at run time.
    """
    program = Path(__file__).with_name("eager_cases.py")
    done = run(program, str(part), str(PARTS), DIPU_MOCK_CUDA="false")
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    cases, failed, alone, ruled_on_cpu = map(int, found.groups())
    assert cases > 50 and failed == 0 and ruled_on_cpu <= 2, done.stdout
    assert alone >= 0.85 * cases, done.stdout
