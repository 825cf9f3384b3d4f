"""What registering the device, and commands that compile nothing, leave unimported."""

from __future__ import annotations

from typing import Any

import pytest
from support.forked import TORCH

SLOW = ("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor", "yaml")

REGISTERED = f"""
import sys, torch
import torch_dipu
slow = [name for name in {SLOW} if name in sys.modules]
assert not slow, slow
x = torch.ones(2, 3).cuda()
assert x[1:].cpu().tolist() == [[1.0] * 3] and not [n for n in {SLOW} if n in sys.modules]
with torch.inference_mode(), torch.device("cuda"):
    y = x + 1  # this imports Dynamo
assert y.cpu().tolist() == [[2.0] * 3] * 2 and "torch._dynamo" in sys.modules

def doubled(a):
    return a * 2 if a.is_cuda and a.device.type == "cuda" else a
assert torch.compile(doubled, backend="eager", fullgraph=True)(x).cpu().tolist() == [[2.0] * 3] * 2

def moved(a):
    return a.cuda() + a.to("cuda", torch.float64)
for place in (torch.device("cpu"), torch.device("cuda")):  # a mode, in which methods are traced
    with place:
        found = torch.compile(moved, backend="eager", fullgraph=True)(x)
    assert found.dtype == torch.float64 and found.cpu().tolist() == [[2.0] * 3] * 2
print("all well")
"""

UNDONE = """
import sys, torch, torch_dipu
assert "torch._dynamo" not in sys.modules
torch_dipu.mock.undo()
x = torch.ones(2, device="dipu")
def doubled(a):
    return a * 2 if a.is_cuda or a.device.type == "cuda" else a
assert torch.compile(doubled, backend="eager", fullgraph=True)(x).cpu().tolist() == [1.0, 1.0]
print("all well")
"""

COMMANDS = """
import sys
from typer.testing import CliRunner
from dicp.cli import app
done = CliRunner().invoke(app, sys.argv[1:])
assert done.output, done
slow = [name for name in {slow} if name in sys.modules]
assert not slow, slow
print("all well")
"""


@pytest.mark.parametrize("program", [REGISTERED, UNDONE], ids=["registered", "undone"])
def test_dynamo_is_imported_by_the_first_operator_that_is_compiled(run: Any, program: str) -> None:
    """The names of the device that is stood in for are answered in traces from then on."""
    assert run(program, imported=TORCH).stdout.splitlines()[-1] == "all well"


@pytest.mark.parametrize("command", ["doctor", "cache info"])
def test_commands_that_compile_nothing(run: Any, command: str) -> None:
    slow = SLOW[1:] if command == "doctor" else SLOW  # targets' rules need sympy
    done = run(COMMANDS.format(slow=slow), *command.split(), imported=TORCH)
    assert done.stdout.splitlines()[-1] == "all well"
