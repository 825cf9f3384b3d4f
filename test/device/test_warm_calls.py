"""Warm calls that the native part runs alone: inputs with gaps, numbers, no tensor, two devices."""

from __future__ import annotations

from typing import Any

import pytest
from entries import LIST_ENTRIES

pytestmark = pytest.mark.sweep

GAPS = (
    LIST_ENTRIES
    + """
def inputs(place):
    torch.manual_seed(0)
    a, b, whole = torch.rand(4, 6), torch.rand(4, 6), torch.arange(12).reshape(3, 4) - 5
    return [t.to(place) for t in (a, b, whole)]

ALONE = {
    "gaps": lambda a, b, whole: a[:, ::2] * 2 + b[:, 1::2],
    "expanded": lambda a, b, whole: F.normalize(a) + b[0].expand(4, 6),
    "in place": lambda a, b, whole: a.add_(b[:, :1].expand(4, 6)),
    "rows": lambda a, b, whole: torch.softmax(a[:, 1:4], -1),
    "parts": lambda a, b, whole: F.silu(a.chunk(2, 1)[0]) * a.chunk(2, 1)[1],
    "list": lambda a, b, whole: torch.cat([a[:, ::2], b[:, ::3]], 1),
    "product": lambda a, b, whole: a[:, :4] @ b[:, 1:5],
    "integers": lambda a, b, whole: whole // 2,
    "fractions": lambda a, b, whole: a // 0.25,
    "no tensor": lambda a, b, whole: torch.tril_indices(4, 3, device=a.device),
}
PROMOTED = {
    "integers by a fraction": lambda a, b, whole: whole // 2.5,
    "fractions by an integer": lambda a, b, whole: a // 2,
    "one element": lambda a, b, whole: a[0, 0].double() // 0.3,
    "booleans": lambda a, b, whole: (whole > 0) // 2,
}
for name, call in {**ALONE, **PROMOTED}.items():
    expected = call(*inputs("cpu"))
    for attempt in range(3):
        given = inputs("dipu")
        entered.clear()
        found = call(*given)
        torch.testing.assert_close(found.cpu(), expected, msg=f"{name}, call {attempt + 1}")
    assert name in PROMOTED or not entered, (name, entered)
entered.clear()
for divisor in (2, 3, 5):  # the divisor is data: one program for all
    assert torch.equal((inputs("dipu")[2] // divisor).cpu(), inputs("cpu")[2] // divisor)
assert not entered, entered
print("all well")
"""
)

TWO_DEVICES = """
import torch, torch_dipu
import torch.nn.functional as F
from torch_dipu import dipu

CALLS = (
    torch.relu, torch.exp, torch.sum, F.softplus, torch.ones_like,
    lambda t: t // 2, lambda t: t.sort().values, lambda t: t.expand(2, 3) * 2,
    lambda t: torch.stack([t, t]), lambda t: torch.where(t > 0, t, t), lambda t: t[t > 0],
    lambda t: torch.tril_indices(3, 3, device=t.device), lambda t: F.batch_norm(
        torch.stack([t, 2 * t]), t * 0, t * 0 + 1, training=True),
)
def addresses(index):
    segments = [s for s in dipu.memory_snapshot() if s["device"] == index]
    return [(b["address"], b["address"] + b["size"]) for s in segments for b in s["blocks"]]

x = torch.arange(3.0) + 1
for number, call in enumerate(CALLS):
    y = x.to("dipu:1")
    for _ in range(3):
        found = call(y)
    assert dipu.current_device() == 0 and found.device.index == 1, (number, found.device)
    assert any(a <= found.data_ptr() < b for a, b in addresses(1)), number
    torch.testing.assert_close(found.cpu(), call(x), atol=1e-4, rtol=1e-4)
print("all well")
"""


@pytest.mark.parametrize("program", [GAPS, TWO_DEVICES], ids=["gaps", "two_devices"])
def test_warm_calls(run: Any, program: str) -> None:
    """Inputs with gaps are copied without Python; memory is that of the inputs' device."""
    done = run(program, DIPU_MOCK_CUDA="false", DIPU_SIMULATED_DEVICES="2")
    assert done.stdout.splitlines()[-1] == "all well"
