"""Programs written for CUDA, unchanged on the device."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sweep

HERE = Path(__file__).parent


def _losses(text: str) -> tuple[list[float], str]:
    line = next(line for line in text.splitlines() if line.startswith("LOSSES"))
    *losses, same = line.split()[1:]
    return [float(loss) for loss in losses], same


def test_training_of_a_transformer(run: Any) -> None:
    """Loader with pinned memory, autocast, GradScaler, clipping, checkpoint; ditorch's one line."""
    program = HERE / "cuda_training.py"
    expected, _ = _losses(run(program, "cpu").stdout)
    done = run(program, "ditorch")
    found, same = _losses(done.stdout)
    assert found == pytest.approx(expected, rel=2e-2) and same == "True"
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert "ditorch: simulated torch_dipu:" in done.stdout


def test_two_processes(run: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    said = run(HERE / "ddp_training.py", str(port)).stdout
    assert "DDP agrees" in said and "a dead peer is named" in said


def _runs(text: str) -> list[list[float]]:
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("LOSSES")]
    return [[float(loss) for loss in line] for line in lines]


def _agree(on_cpu: str, on_device: str) -> None:
    """Errors against float64 are at most twice those of the CPU's float32, and a small floor."""
    exact, host = _runs(on_cpu)
    (found,) = _runs(on_device)
    assert len(exact) == len(host) == len(found) > 3
    floor = 2e-6 * max(abs(loss) for loss in exact)
    allowed = 2 * max(abs(a - b) for a, b in zip(exact, host, strict=True)) + floor
    errors = [abs(a - b) for a, b in zip(exact, found, strict=True)]
    assert max(errors) <= allowed, (errors, allowed)


@pytest.mark.parametrize("program", ["resnet", "accelerate", "trainer"])
def test_training_by_libraries(run: Any, program: str) -> None:
    """ResNet-50 of torchvision, accelerate, Hugging Face's Trainer with `generate`."""
    path = HERE / "library_training.py"
    _agree(run(path, program, "cpu").stdout, run(path, program, "ditorch").stdout)


TORCHRUN = """
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node=2", *sys.argv[1:]])
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun(run: Any, parallel: str) -> None:
    """Two processes with a device each train with DistributedDataParallel and fully_shard."""
    program = str(HERE / "torchrun_training.py")
    on_cpu = run(TORCHRUN, program, parallel, "cpu").stdout
    found = run(TORCHRUN, program, parallel, "ditorch", DIPU_SIMULATED_DEVICES="2").stdout
    _agree(on_cpu, found)


def test_profile_of_mobilenet_in_two_processes(run: Any) -> None:
    """The switch of CUDA's convolution library changes no operator that a training step calls."""
    said = run(TORCHRUN, str(HERE / "mobilenet_profile.py"), DIPU_SIMULATED_DEVICES="2").stdout
    (step,) = (line.split() for line in said.splitlines() if line.startswith("STEP"))
    assert int(step[-1]) % (52 * 4) == 0, "the convolutions of four steps"
    assert "DIFFERENT" in said.splitlines()


UNDO = """
import torch
before = {n: torch.Tensor.__dict__.get(n) for n in ("to", "cuda", "is_cuda", "device")}
functions = {n: getattr(torch.cuda, n) for n in ("is_available", "Stream", "memory_allocated")}
start = torch.amp.autocast_mode.autocast.__init__
import ditorch
assert ditorch.framework == "torch_dipu" and ditorch.arch == "simulated"
x = torch.ones(2, device="cuda")
assert x.is_cuda and x.to("cuda") is x and str(x.device) == "cuda:0"
assert torch.cuda.is_available() and torch.cuda.get_device_name(0) == "simulated chip"
assert torch.zeros_like(x, device="cuda:0").device == x.device == torch.device("cuda:0")
assert torch.tensor([1.0], device="cuda").is_cuda and torch.randperm(4, device="cuda").is_cuda
indices = torch.tril_indices(3, 3, device="cuda"), torch.triu_indices(3, 3, device="cuda:0")
assert all(t.is_cuda for t in indices)
assert torch.equal(indices[0].cpu(), torch.tril_indices(3, 3))
assert torch._efficientzerotensor([2], device="cuda").is_cuda
from torch.utils.checkpoint import checkpoint
given = torch.ones(64, device="cuda", requires_grad=True)
dropped = checkpoint(torch.nn.functional.dropout, given, use_reentrant=False)
torch.rand(5, device="cuda")
dropped.sum().backward()
assert torch.equal(dropped, given.grad)
window = torch.kaiser_window(8, device="cuda")
assert window.is_cuda and torch.equal(window.cpu(), torch.kaiser_window(8))
assert torch.ones(2).pin_memory("cuda").is_pinned("cuda") and not torch.ones(2).is_pinned("cuda")
assert torch.cpu.is_available() and torch.ones(2).device.type == "cpu"
assert isinstance(torch.Generator(device="cuda"), torch.Generator)
with torch.cuda.stream(torch.cuda.Stream()):
    event = torch.cuda.Event(enable_timing=True)
    event.record()
torch.cuda.synchronize()
with torch.autocast("cuda", dtype=torch.float16):
    assert (x[None] @ x[:, None]).dtype == torch.float16
with torch.device("cuda"):
    assert torch.ones(1).is_cuda
kinds = torch.profiler.ProfilerActivity
with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
    for _ in range(3):  # the first call of a form compiles it
        x + x
assert any(row.self_device_time_total for row in profile.key_averages()), "the device's rows"
def product(a, b):
    if a.device.type != "cuda" or not a.is_cuda or str(a.device) != "cuda:0":
        return a
    return torch.relu(a * b) + torch.ones(2, device=a.device)


compiled = torch.compile(product, backend="dicp")
y = torch.randn(2, device="cuda")
out = compiled(y, x)
assert out.is_cuda and torch.allclose(out.cpu(), torch.relu(y.cpu()) + 1)
ditorch.undo()
after = {n: torch.Tensor.__dict__.get(n) for n in before}
assert after == before, (after, before)
assert {n: getattr(torch.cuda, n) for n in functions} == functions
assert torch.amp.autocast_mode.autocast.__init__ is start and not torch.cuda.is_available()
assert str(x.device) == "dipu:0"
try:
    torch.ones(1, device="cuda")
except (RuntimeError, AssertionError, NotImplementedError):
    print("all well")
"""


def test_names_and_undo(run: Any) -> None:
    """The names of CUDA that a program uses, a compiled function, and everything put back."""
    assert run(UNDO).stdout.splitlines()[-1] == "all well"


WRITTEN_BACK = """
import torch, torch.nn.functional as F, torch_dipu
from dicp import op_tools

def run(device):
    statistics = torch.zeros(2, 4, device=device)
    table = torch.full((4, 3), 2.0, device=device).requires_grad_()
    x = torch.arange(32.0).reshape(8, 4).sin().to(device)
    F.batch_norm(x, statistics[0], statistics[1], training=True)
    F.embedding(torch.tensor([1, 2], device=device), table, max_norm=1.0)
    sums = torch.add(x, 1, out=torch.empty(0, device=device))
    doubled = (x * 1).requires_grad_() * 1
    doubled.mul_(2)
    return [value.detach().cpu() for value in (statistics, table, sums, doubled)]

want = run("cpu")
rules = "torch.float32->torch.float64"
for tool in (op_tools.OpFallback(quiet=True), op_tools.OpDtypeCast(quiet=True, rules=rules)):
    with tool:
        got = run("dipu")
    for name, a, b in zip(("statistics", "table", "out", "in place"), got, want):
        assert torch.allclose(a, b), (type(tool).__name__, name, a, b)
"""


def test_tools_write_back_what_an_operator_overwrites(run: Any) -> None:
    """Also what its name does not show: running statistics, weights that embedding scales down."""
    run(WRITTEN_BACK)


COMPILED = """
import copy
import torch, ditorch

def trained(device, wrap):
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    model = torch.nn.Sequential(*layers).to(device)
    step, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        torch.cuda.nvtx.range_push("step")
        loss = step(torch.randn(5, 4).to(device)).square().mean()
        assert loss.device.type == device
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.nvtx.range_pop()
        losses.append(loss.item())
    return losses

from torch._dynamo.utils import counters
broken = torch.compile(lambda x: (x > 0).nonzero().sum() * 2, backend="dicp")
assert broken(torch.ones(3, device="cuda")).item() == 6
assert counters["frames"]["ok"] <= 2, counters["frames"]  # none of what runs an operator

for kind in (torch.nn.LSTMCell, torch.nn.GRUCell):
    for bias in (True, False):
        host, x = kind(4, 6, bias=bias), torch.randn(3, 4)
        cell = copy.deepcopy(host).cuda()
        results = [run(given)[0] for run, given in (
            (host, x), (torch.compile(cell, backend="dicp", fullgraph=True), x.cuda())
        )]  # fmt: skip
        for result in results:
            result.square().sum().backward()
        grads = [[p.grad.cpu() for p in module.parameters()] for module in (host, cell)]
        torch.testing.assert_close([results[1].cpu(), *grads[1]], [results[0], *grads[0]])

got = trained("cuda", lambda model: torch.compile(model, backend="dicp"))
assert torch.allclose(torch.tensor(got), torch.tensor(trained("cpu", lambda m: m)), atol=1e-5), got
"""


def test_compiled_training_under_the_other_name(run: Any) -> None:
    """The trace of backward needs the real device of tensors; Dynamo leaves operators alone."""
    run(COMPILED)
