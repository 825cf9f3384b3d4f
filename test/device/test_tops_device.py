"""topsgraph on tensors of the eager device: accepted with DICP_TOPS_DIPU, and they stay there."""

from __future__ import annotations

from typing import Any

PROGRAM = """
import torch, torch_dipu
from dicp import Backend

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
model, x = model.to("dipu"), torch.randn(3, 4).to("dipu")

def step(run):
    model.zero_grad()
    result = run(x * 2)
    result.sum().backward()
    return [result, *(p.grad.clone() for p in model.parameters())]

backend = Backend("tops", cache=False)
mine, theirs = step(torch.compile(model, backend=backend)), step(model)
torch.testing.assert_close(mine, theirs)
assert {t.device.type for t in mine} == {"dipu"}
assert all(n.decision != "eager" for report in backend.reports for n in report.nodes)

drop = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend=backend)
x = torch.ones(64, device="dipu")
host, state = torch.get_rng_state(), torch_dipu.dipu.get_rng_state()
drawn = [drop(x), drop(x)]
assert not torch.equal(*drawn) and torch.equal(torch.get_rng_state(), host)
torch_dipu.dipu.set_rng_state(state)
assert all(torch.equal(drop(x), one) for one in drawn), "seeds are of the device's generator"
print("SAME")
"""


def test_tensors_of_the_eager_device_stay_there(run: Any) -> None:
    given = {"DIPU_MOCK_CUDA": "false"}
    assert "SAME" in run(PROGRAM, DICP_TOPS_DIPU="True", **given).stdout
    refused = run(PROGRAM, ok=False, **given)
    assert refused.returncode != 0 and "tensors on dipu:0" in refused.stderr
