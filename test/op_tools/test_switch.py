"""`import ditorch`: no device at hand, nothing replaced on request, the outermost call compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys

NOTHING_REPLACED = """
import torch
before = torch.Tensor.cuda, torch.cuda.is_available, torch.nn.Module.__call__
import ditorch
assert before == (torch.Tensor.cuda, torch.cuda.is_available, torch.nn.Module.__call__)
assert ditorch.framework == "torch" and not torch.cuda.is_available()
"""
NO_DEVICE = """
import sys, warnings
import torch
sys.modules["dicp.device"] = None  # importing it fails
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import ditorch
texts = [str(w.message) for w in caught if "ditorch" in str(w.message)]
assert len(texts) == 1 and texts[0].startswith("ditorch found no device, the CPU stays"), texts
assert torch.ones(2).sum() == 2 and ditorch.framework == "torch"
"""
COMPILED = """
import threading
import torch
plain = torch.nn.Module.__call__
import ditorch
from torch._dynamo.utils import counters
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
x = torch.randn(2, 3)
assert torch.allclose(model(x), torch.relu(x @ model[0].weight.T + model[0].bias), atol=1e-6)
assert counters["stats"]["unique_graphs"] == 1, "the outermost module as one graph"
found = []
thread = threading.Thread(target=lambda: found.append(model(x)))
thread.start()
thread.join()
assert torch.equal(found[0], model(x))
ditorch.undo()
assert torch.nn.Module.__call__ is plain
"""


def run(program: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_replaced_on_request() -> None:
    line = run(NOTHING_REPLACED, DITORCH_DISABLE_MOCK="1")
    assert re.fullmatch(r"ditorch: \S+ torch:\S+ pid: \d+\n", line)


def test_no_device_is_one_warning_and_the_cpu_stays() -> None:
    run(NO_DEVICE, DITORCH_DISABLE_MOCK="0")


def test_the_outermost_call_is_compiled_and_undo_restores_it() -> None:
    run(COMPILED, DITORCH_DISABLE_MOCK="1", DITORCH_COMPILE="1")
