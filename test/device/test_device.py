"""The eager device: each test runs one program, as the device is registered once in a process."""

from __future__ import annotations

import ctypes
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import LIST_ENTRIES
from typer.testing import CliRunner

from dicp.device.tools import compare

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]

MODULE = """
import copy, io, os, tempfile, threading, time
import torch, torch_dipu
from dicp.device.active import registered
from torch_dipu import dipu

# names and values
x = torch.randn(3, 4, device="dipu")
assert str(x.device) == "dipu:0" and x.is_dipu and not x.is_cuda
assert dipu.device.__dipu__ == "dipu" and dipu.device.__diputype__ == "dipu"
assert torch.accelerator.current_accelerator().type == "dipu"
assert torch.empty(2, device=dipu.device.__dipu__ + ":0").device.index == 0
assert dipu.device_count() == 2 and dipu.get_device_name() == "simulated chip"
assert torch.equal((x + x).cpu(), x.cpu() * 2)
from torch_dipu.testing._internal.common_utils import TestCase, run_tests
TestCase().assertEqual(x + x, x * 2)
with TestCase().assertRaises(AssertionError):
    TestCase().assertEqual(x, x + 1)

# two devices
y = x.to("dipu:1")
assert y.device.index == 1 and torch.equal(y.cpu(), x.cpu())
with dipu.device(1):
    assert dipu.current_device() == 1 and torch.ones(1, device="dipu").device.index == 1
try:
    dipu.set_device(7)
except RuntimeError as error:
    assert "valid indices are 0 to 1" in str(error), error
else:
    raise AssertionError("device 7")

# operands on several devices: only numbers and indices may lie on the host
host, one = torch.randn(3, 4), torch.tensor(2.0)
for mixed in (lambda: x @ host.t(), lambda: host @ x.t(), lambda: torch.cat([x, host]),
              lambda: x + host, lambda: host + one.to("dipu"), lambda: torch.where(x > 0, y, x),
              lambda: x.gather(0, host.long()),
              lambda: x.clone().index_put_((one.long(),), host[0]),
              lambda: torch.mm(x, x.t(), out=torch.empty(3, 3)),
              lambda: torch.nn.functional.layer_norm(x, (4,), host[0])):
    for _ in range(2):
        try:
            mixed()
        except RuntimeError as error:
            assert "Expected all tensors to be on the same device" in str(error), error
        else:
            raise AssertionError("operands lie on two devices")
assert torch.equal(torch.where(x > 0, one, x).cpu(), torch.where(x.cpu() > 0, one, x.cpu()))
assert torch.equal(x[host > 0].cpu(), x.cpu()[host > 0])
torch._foreach_copy_([x.clone(), host.clone()], [host, x])
packed = torch.nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True)
torch.nn.LSTM(4, 2, device="dipu")(packed)[0].data.sum().item()

# views, strides, storages
t = x.t()
assert torch.equal((t * 2).cpu(), t.cpu() * 2) and t.data_ptr() == x.data_ptr()
assert torch.equal((x[:, ::2] + x[:1, ::2]).cpu(), x.cpu()[:, ::2] + x.cpu()[:1, ::2])
before = x.clone()
x[1:, 1].add_(5)
before[1:, 1] += 5
assert torch.equal(x.cpu(), before.cpu())
assert torch.equal(x.masked_fill(x > 0, 1.5).cpu(), x.cpu().masked_fill(x.cpu() > 0, 1.5))
assert torch.equal(torch.cat([x, x]).cpu(), torch.cat([x.cpu()] * 2))
part = torch.empty(0, device="dipu").set_(x.untyped_storage(), 1, (1, 2))  # row-major
assert part.stride() == (2, 1) and torch.equal(part.cpu()[0], x.cpu().flatten()[1:3])
for source, offset in ((torch.ones(4), 0), (y, 0), (x, -1)):  # the device's own memory alone
    try:
        torch.empty(0, device="dipu").set_(source.untyped_storage(), offset, (1,))
    except RuntimeError as error:
        assert "device" in str(error) or "offset" in str(error), error
    else:
        raise AssertionError("memory of another device, or before the storage")
out = torch.empty(0, device="dipu")
torch.add(x, x, out=out)
assert out.shape == x.shape and torch.equal(out.cpu(), x.cpu() * 2)
def overlapping():
    z = x.clone()
    try:
        z.add_(z[0])
    except RuntimeError as error:
        assert "single memory location" in str(error), error
    else:
        raise AssertionError("eager refuses operands that overlap")
overlapping()
for _ in range(3):  # the plan of the harmless form must not serve the overlapping one
    z, w = x.clone(), x.clone()
    z.add_(w[0])
    assert torch.equal(z.cpu(), x.cpu() + x.cpu()[0])
    overlapping()

# neither a place in a storage nor the strides of single elements make another program
wide = torch.arange(12).reshape(2, 6).to("dipu")
ones = torch.ones(1, 1, dtype=torch.int64, device="dipu")
for k in (0, 3, 5):
    assert (ones + wide[1:, k : k + 1]).item() == 7 + k
found = registered.dispatcher.compiler._found
forms = [v for key, v in found.items() if "add" in str(key[0]) and key[1] == (ones.dtype,)]
assert [len(variants) for variants in forms] == [1], forms

# results of integers have the default dtype of the call
for _ in range(2):
    assert torch.angle(ones).dtype == torch.float32
torch.set_default_dtype(torch.float64)
assert torch.angle(ones).dtype == torch.float64
torch.set_default_dtype(torch.float32)

# a decomposition is given dtypes
pairs = torch.complex(x, x + 1)
for dtype in (torch.complex64, torch.complex128):
    for reduce in (torch.sum, torch.mean, torch.cumsum):
        found = reduce(pairs, 0, dtype=dtype)
        assert found.dtype == dtype
        torch.testing.assert_close(found.cpu(), reduce(pairs.cpu(), 0, dtype=dtype))

# what is overwritten keeps its sizes
for given in (x[0], x[:0, :1]):
    for write in (lambda a, b: a.logical_xor_(b), lambda a, b: a.masked_fill_(b, 1.0),
                  lambda a, b: torch.mul(a, b, out=a)):
        narrow = given.clone()
        try:
            write(narrow, torch.ones(2, *given.shape[:-1], 4, dtype=torch.bool, device="dipu"))
        except RuntimeError as error:
            assert "match the broadcast shape" in str(error), error
        else:
            raise AssertionError("a tensor that is overwritten grew")
        assert narrow.shape == given.shape

# a given result is not narrowed
integers = torch.ones(2, dtype=torch.int64, device="dipu")
for narrowed, given in (
    (torch.add, (integers, 1.5)), (lambda out: out.logit_(0.2), ()),  # compiled
    (torch.ops.aten.lerp, (x[0, :2], x[0, :2], 0.5)),  # decomposed
):
    for _ in range(2):
        try:
            narrowed(*given, out=integers)
        except RuntimeError as error:
            assert "cast" in str(error) or "dtype" in str(error), error
        else:
            raise AssertionError("a result was narrowed")

# parameters stay the objects that an optimizer holds
layer = torch.nn.Linear(2, 2)
weight = layer.weight
layer.to("dipu")
assert layer.weight is weight and weight.is_dipu and weight.is_leaf
weight.data = weight.data.cpu()
assert weight.device.type == "cpu"

# random state
torch.manual_seed(3); a = torch.rand(4, device="dipu")
state = dipu.get_rng_state(); b = torch.rand(4, device="dipu")
dipu.set_rng_state(state); assert torch.equal(b, torch.rand(4, device="dipu"))
torch.manual_seed(3); assert torch.equal(a, torch.rand(4, device="dipu"))
g = torch.Generator(device="dipu").manual_seed(5)
first = torch.randn(3, generator=g, device="dipu")
assert torch.equal(first, torch.randn(3, generator=g.manual_seed(5), device="dipu"))
shape = torch.full((9,), 2.0, device="dipu")
for draw in (torch._standard_gamma, lambda x: torch._sample_dirichlet(x.view(3, 3)),
             lambda x: torch.nn.functional.rrelu(-x, 0.1, 0.9, True)):
    state = dipu.get_rng_state()
    drawn = [draw(shape) for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    dipu.set_rng_state(state)
    assert all(torch.equal(draw(shape), one) for one in drawn)

# compiled programs draw from the device's generator, not from the host's
@torch.compile(backend="dicp")
def dropped(x):
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)
@torch.compile(backend="dicp", options={"fallback_random": True})
def dropped_as_eager(x):
    return torch.nn.functional.dropout(x, 0.5)
given = torch.ones(64, device="dipu")
for draw in (dropped, dropped_as_eager):
    draw(given)
    host, state = torch.get_rng_state(), dipu.get_rng_state()
    drawn = [draw(given) for _ in range(2)]
    assert not torch.equal(*drawn) and torch.equal(torch.get_rng_state(), host)
    dipu.set_rng_state(state); torch.rand(3)
    assert all(torch.equal(draw(given), one) for one in drawn)
    dipu.set_rng_state(state)
assert torch.equal(torch.nn.functional.dropout(given, 0.5), drawn[0])
from torch.utils.checkpoint import checkpoint
given = torch.ones(64, device="dipu", requires_grad=True)
for reentrant in (True, False):  # the recomputation drops what the forward dropped
    dropped = checkpoint(torch.nn.functional.dropout, given, use_reentrant=reentrant)
    torch.rand(5, device="dipu")
    given.grad = None
    dropped.sum().backward()
    assert torch.equal(dropped, given.grad)
same = copy.deepcopy(g)
assert same.device == g.device and torch.equal(torch.rand(3, generator=same, device="dipu"),
                                               torch.rand(3, generator=g, device="dipu"))
kept = torch.nn.functional.dropout(torch.ones(1000, device="dipu"), 0.25)
assert 0.6 < (kept != 0).float().mean().item() < 0.9
assert abs(kept.max().item() - 1 / 0.75) < 1e-6

# streams and events: ordered, asynchronous
side = dipu.Stream()
start, end = dipu.Event(enable_timing=True), dipu.Event(enable_timing=True)
big = torch.zeros(4, device="dipu")
big.add_(0.5); big.add_(0.5)  # the first call of a form compiles it, in step with the host
with dipu.stream(side):
    assert dipu.current_stream() == side
    start.record()
    began = time.perf_counter()
    dipu._sleep(200_000_000)
    big.add_(1.0)
    assert time.perf_counter() - began < 0.15, "the stream blocks its caller"
    assert not side.query()
    end.record()
dipu.current_stream().wait_event(end)
assert (big + 1).cpu().tolist() == [3.0] * 4
end.synchronize()
assert start.elapsed_time(end) >= 190 and side.query()

# a copy from pinned memory is asynchronous, one from other memory is not
pinned = torch.ones(4).pin_memory()
assert pinned.is_pinned() and not torch.ones(4).is_pinned()
dipu._sleep(100_000_000)
target = pinned.to("dipu", non_blocking=True)
pinned.fill_(9)
assert target.cpu().tolist() == [9.0] * 4

# an error inside the queue is raised at the synchronization
index = torch.tensor([0, 1], device="dipu")
table = torch.zeros(3, 2, device="dipu")
torch.index_select(table, 0, index)
bad = torch.tensor([0, 9], device="dipu")
try:
    for _ in range(3):
        torch.index_select(table, 0, bad)
    dipu.synchronize()
except (RuntimeError, IndexError) as error:
    assert "9" in str(error) and "index" in str(error), error
else:
    raise AssertionError("no error for an index out of bounds")
dipu.synchronize()

# save and load, pickles of modules
buffer = io.BytesIO()
torch.save({"x": x, "v": x[1:]}, buffer)
buffer.seek(0)
loaded = torch.load(buffer)
assert loaded["x"].device.type == "dipu" and torch.equal(loaded["v"].cpu(), x[1:].cpu())
buffer.seek(0)
assert torch.load(buffer, map_location="cpu")["x"].device.type == "cpu"

# memory statistics
del loaded
dipu.empty_cache()
held = dipu.memory_allocated()
dipu.reset_peak_memory_stats()
block = torch.empty(1 << 20, dtype=torch.uint8, device="dipu")
assert dipu.memory_allocated() - held == 1 << 20 <= dipu.max_memory_allocated()
assert dipu.memory_reserved() >= dipu.memory_allocated()
assert dipu.memory_stats()["allocation.all.current"] > 0
snapshot = dipu.memory_snapshot()
assert any(b["address"] == block.data_ptr() for s in snapshot for b in s["blocks"])
del block
assert dipu.memory_allocated() == held
dipu.empty_cache()
free, total = dipu.mem_get_info()
large = torch.empty(64 << 20, dtype=torch.uint8, device="dipu")
assert free - dipu.mem_get_info()[0] >= 64 << 20
del large
dipu.empty_cache()
assert dipu.mem_get_info() == (free, total)
for request in (total + 1, (1 << 64) - 1):
    try:
        dipu.caching_allocator_alloc(request)
    except torch.OutOfMemoryError as error:
        assert f"requested {request} bytes" in str(error), error
    else:
        raise AssertionError("more memory than the chip has")
dipu.set_per_process_memory_fraction(0.001)
limit = int(dipu.mem_get_info()[1] * 0.001)
try:
    torch.empty(limit * 2, dtype=torch.uint8, device="dipu")
except torch.OutOfMemoryError as error:
    text = str(error)
    assert f"requested {limit * 2} bytes" in text and "largest live blocks:" in text, text
    assert "bytes at 0x" in text
else:
    raise AssertionError("memory without end")
dipu.set_per_process_memory_fraction(1.0)
x.untyped_storage().resize_(0)
try:
    x + 1
except RuntimeError as error:
    assert "use after free" in str(error), error
else:
    raise AssertionError("a tensor without memory was read")

# memory without a tensor, and what is no such memory
address = dipu.caching_allocator_alloc(1000)
dipu.caching_allocator_delete(address)
for wrong, said in ((address, "double free of"), (4096, "not memory of a device")):
    try:
        dipu.caching_allocator_delete(wrong)
    except RuntimeError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)

# threads, each with its own current device and stream
seen = []
def other():
    dipu.set_device(1)
    with dipu.stream(dipu.Stream()):
        seen.append((torch.ones(8, device="dipu") * 3).sum().item())
threads = [threading.Thread(target=other) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert seen == [24.0] * 4 and dipu.current_device() == 0

# fork
dipu._sleep(100_000_000)  # a child must not wait for it: it has none of the parent's threads
pid = os.fork()
if pid == 0:
    del pinned
    try:
        torch.ones(1, device="dipu")
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("all well")
"""


def test_module(run: Any) -> None:
    done = run(MODULE, DIPU_MOCK_CUDA="false", DIPU_SIMULATED_DEVICES="2")
    assert done.stdout.splitlines()[-1] == "all well"


WARM = (
    LIST_ENTRIES
    + """
def inputs(place):
    torch.manual_seed(0)
    a, b, image = torch.rand(4, 4), torch.rand(4, 4), torch.rand(2, 2, 4, 4)
    index, mean, variance = torch.tensor([2, 1]), torch.zeros(2), torch.ones(2)
    return [t.to(place) for t in (a, b, image, index, mean, variance)]

CALLS = {
    "lists": lambda a, b, image, index, mean, variance: torch.cat([a, b[:2], a[1:]]),
    "a list": lambda a, b, image, index, mean, variance: torch.stack([a, a, b], 1),
    "indices": lambda a, b, image, index, mean, variance: a[:, index] + a[index, index][None],
    "overwritten": lambda a, b, image, index, mean, variance: a.zero_().add_(b).fill_(2.0),
    "updated": lambda a, b, image, index, mean, variance: a.index_add_(0, index, b[:2]),
    "resized": lambda a, b, image, index, mean, variance: (a > 0.5).logical_not(),
    "workspace": lambda a, b, image, index, mean, variance: F.batch_norm(image, mean, variance),
    "statistics": lambda a, b, image, index, mean, variance: (
        torch.cat([F.batch_norm(image, mean, variance, training=True).flatten(), mean, variance])
    ),
    "gradients": lambda a, b, image, index, mean, variance: torch.autograd.grad(
        F.batch_norm(image.requires_grad_(), mean, variance, a[0, :2], b[0, :2], training=True),
        image, image.cos())[0],
    "no rule": lambda a, b, image, index, mean, variance: (a > 0.5).nonzero(),
}
for name, call in CALLS.items():
    expected = call(*inputs("cpu"))
    for attempt in range(3):
        given = inputs("dipu")
        entered.clear()
        found = call(*given)
        torch.testing.assert_close(found.cpu(), expected, msg=f"{name}, call {attempt + 1}")
    assert not entered, (name, entered)

torch.manual_seed(1)
drawn = [torch.rand(3, device="dipu").cpu() for _ in range(3)]
entered.clear()
torch.manual_seed(1)
assert all(torch.equal(torch.rand(3, device="dipu").cpu(), value) for value in drawn)
assert not entered and not torch.equal(drawn[1], drawn[2])
print("all well")
"""
)


def test_warm_calls_stay_out_of_python(run: Any) -> None:
    """Lists of tensors, results that are resized, views, overwritten inputs, workspace."""
    assert run(WARM, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"


ON_THE_DEVICE = """
import torch, torch_dipu
import torch.nn as nn
import torch.nn.functional as F
from torch_dipu import dipu

x, s = torch.randn(4, 5), torch.rand(3, 5) + 0.5
c, i = torch.randn(4, 5, dtype=torch.complex64), torch.randint(0, 4, (3, 5))
statistics = [torch.zeros(5), torch.ones(5)]

def trained(module, *given):
    leaves = [t.clone().requires_grad_() for t in given]
    results = torch.utils._pytree.tree_leaves(module(*leaves))
    sum(r.square().sum() for r in results).backward()
    weights = getattr(module, "parameters", tuple)()
    return [r.detach() for r in results] + [t.grad for t in (*leaves, *weights)]

def cell(kind, width, bias=True):
    torch.manual_seed(0)
    return kind(4, width, bias=bias).to(torch.get_default_device())

def normalized(x, *statistics):
    mine = [t.clone() for t in statistics]
    args = None, None, *mine, True, 0.1, 1e-5
    return *torch.ops.aten._native_batch_norm_legit(x, *args), *mine

def layer_norms(x):
    # Values of float32; dtypes and sizes of bfloat16, whose statistics have the weight's dtype.
    found = []
    for given in (x, x[:0], x.bfloat16(), x[:0].bfloat16()):
        for dtype in (None, torch.float32, given.dtype):
            weight = None if dtype is None else given.new_full(x.shape[-1:], 1.5, dtype=dtype)
            results = torch.native_layer_norm(given, x.shape[-1:], weight, weight, 1e-5)
            rounded = given.dtype == torch.bfloat16
            found += [torch.zeros_like(r) if rounded else r for r in results]
    return found

CALLS = {
    "layer norms": (layer_norms, (x,)),
    "a range": (lambda: torch.arange(3, 17, 2), ()),
    "ranges of any length": (lambda: [torch.arange(-n, 2 * n + 5, 3) for n in range(2, 16)], ()),
    "other ranges": (lambda: [torch.arange(n, k, k - n) for n, k in ((0, 9), (9, 0), (8, 3))], ()),
    "any distance": (lambda x: [x.roll(n, 1) for n in range(-4, 9)], (x,)),
    "angles": (lambda x, c: [x.angle(), c.angle()], (x, c)),
    "two rows of pairs": (lambda c: c[:2] * 2 + c[:2], (c,)),
    "other rows of pairs": (lambda c: c * 2 + c, (c,)),
    "complex numbers": (lambda c: [c * c.conj(), c * 1j + 2, (c.conj() + 1).imag * 2], (c,)),
    "pairs": (lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(5, 2, 2)) * 2), (x,)),
    "zeros": (lambda *given: [t.clone()[:, ::k].zero_() for t in given for k in (1, 2)], (x, x)),
    "indices": (lambda x, i: x.clone().index_put_((i[:, 0],), x[0]), (x, i)),
    "sizes that have to be fixed": (
        lambda x: trained(nn.AdaptiveAvgPool2d((3, 2)), x), (torch.randn(1, 2, 7, 9),)
    ),
    "other sizes": (lambda x: trained(nn.AdaptiveAvgPool2d((3, 2)), x), (torch.randn(1, 2, 8, 5),)),
    "LSTM": (lambda x: trained(cell(nn.LSTMCell, 6), x), (torch.randn(2, 4),)),
    "GRU without bias": (lambda x: trained(cell(nn.GRUCell, 6, False), x), (torch.randn(2, 4),)),
    "largest so far": (lambda x: list(x.cummax(1)) + list(x.cummin(0)), (x,)),
    "shrunk": (lambda x: trained(nn.Hardshrink(), x), (x,)),
    "gradients that are zero tensors": (lambda x: trained(torch.sgn, x), (x,)),
    "statistics": (normalized, (x, *statistics)),
    "attention": (
        lambda q: trained(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), q, q, q),
        (torch.randn(2, 2, 5, 4),),
    ),
}
for how in ("mean", "amin"):
    def reduced(x, i, s, how=how):
        given = {"reduce": how, "include_self": False}
        return [x.scatter_reduce(0, i, s, **given), x.index_reduce(0, i[:, 0], s, **given)]
    CALLS[f"{how} without self"] = (reduced, (x, i, s))
for name, (call, given) in CALLS.items():
    torch.set_default_device("cpu")
    expected = call(*given)
    torch.set_default_device("dipu")
    for attempt in range(2):
        found = call(*(t.to("dipu") for t in given))
        found = torch.utils._pytree.tree_map(lambda t: t.cpu(), found)
        try:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        except AssertionError as error:
            raise AssertionError(name) from error
counts = dipu.path_counts()
fell = {operator for operator, path in counts if path == "cpu"}
assert not fell, fell
attention = "_scaled_dot_product_flash_attention_for_cpu"
assert (attention, "library") in counts and (f"{attention}_backward", "library") in counts
print("all well")
"""


def test_operators_stay_on_the_device(run: Any) -> None:
    """Given results, complex numbers, fixed sizes, cells, operators that write to statistics."""
    assert run(ON_THE_DEVICE, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"


AUTOCAST = """
import torch, torch_dipu
from dicp import op_tools
layer = torch.nn.Linear(16, 8).to("dipu")
x = torch.randn(4, 16, device="dipu")
def step():
    with torch.autocast("dipu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    return y.dtype
with op_tools.OpAutoCompare("torch.nn.functional.linear", quiet=True, rule="fp64") as tool:
    step()
assert tool.results and not tool.failures, tool.failures
with op_tools.OpFallback("torch.nn.functional.linear", quiet=True):
    assert step() == torch.bfloat16
print("all well")
"""


def test_tools_under_autocast(run: Any) -> None:
    """The CPU computes in the precision of the device."""
    assert run(AUTOCAST, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"


FACTORIES = """
import torch, torch_dipu
from dicp import op_tools
with op_tools.OpFallback(quiet=True):
    weights = [torch.ones(3, device="dipu", requires_grad=True),
               torch.tensor([1.0, 2.0], device="dipu", requires_grad=True)]
    weights[0].sum().backward()
assert all(w.is_leaf and w.requires_grad and w.device.type == "dipu" for w in weights)
assert weights[0].grad.tolist() == [1, 1, 1]
for place in (torch.device("dipu"), torch.device("cpu")):
    with place, op_tools.OpAutoCompare(quiet=True) as tool:
        torch.rand(4, 6)
        torch.ones(4)
    random = {r.operator: bool(r.note) for r in tool.results if r.operator.startswith("torch.")}
    assert random == {"torch.rand": True, "torch.ones": False}, random
    assert not tool.failures, tool.failures
print("all well")
"""


DRAWING_TOOLS = """
import contextlib, sys
from pathlib import Path
import torch, torch_dipu
from dicp import op_tools
from dicp.op_tools import one_iter
from dicp.op_tools.recording import Recording
from dicp.op_tools.run_op_from_data import find_captures, read_capture

dipu, folder = torch_dipu.dipu, sys.argv[1]
x = torch.ones(64, device="dipu")

def next_drawn(tool):
    torch.compiler.reset()
    with tool:
        run = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="dicp")
        dipu.manual_seed(1)
        run(x)
    return torch.rand(4, device="dipu")

want, tool = next_drawn(contextlib.nullcontext()), op_tools.OpAutoCompare(quiet=True)
assert torch.equal(next_drawn(tool), want) and not tool.failures

with op_tools.OpCapture(["torch.nn.functional.dropout"], quiet=True, folder=folder):
    want = torch.nn.functional.dropout(x, 0.5)
(found,) = find_captures(next(Path(folder).rglob("torch.nn.functional.dropout")))
capture = read_capture(found)
torch.rand(4, device="dipu")
capture.random_states.restore()
assert torch.equal(torch.nn.functional.dropout(x, 0.5), want)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).to("dipu")
with one_iter.record(model, None, folder=folder + "/recording"):
    model(x)
calls = {call.kind: call.random for call in Recording.read(folder + "/recording").calls}
assert calls == {"Sequential": True, "Linear": False, "Dropout": True}, calls
print("all well")
"""


def test_tools_know_the_generator_of_the_device(run: Any, tmp_path: Path) -> None:
    done = run(DRAWING_TOOLS, str(tmp_path), DIPU_MOCK_CUDA="false")
    assert done.stdout.splitlines()[-1] == "all well"


def test_tools_on_what_a_program_makes(run: Any) -> None:
    """Leaves stay leaves, and what the default device draws is random."""
    assert run(FACTORIES, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"


ALLOCATOR = """
import random, torch, torch_dipu
from torch_dipu import dipu
random.seed(0)
held = []
for step in range(2000):
    if held and random.random() < 0.5:
        tensor, value = held.pop(random.randrange(len(held)))
        assert (tensor.cpu() == value).all()
    else:
        size = random.choice([1, 100, 513, 4096, 70000, 1 << 20, 3 << 20])
        held.append((torch.full((size,), step % 200, dtype=torch.uint8).to("dipu"), step % 200))
    if len(held) > 40:
        held = held[20:]
places = sorted((b["address"], b["size"]) for b in dipu.memory_leaks())
assert all(a + n <= b for (a, n), (b, _) in zip(places, places[1:])), "blocks overlap"
held.clear()
del tensor
assert dipu.memory_allocated() == 0, dipu.memory_allocated()
side = dipu.Stream()
block = torch.zeros(1 << 16, device="dipu")
address = block.data_ptr()
with dipu.stream(side):
    dipu._sleep(50_000_000)
block.record_stream(side)
del block
again = torch.zeros(1 << 16, device="dipu")
assert again.data_ptr() != address, "memory that another stream uses was given away"
del again
dipu.synchronize()
dipu.empty_cache()
assert dipu.memory_reserved() == 0, dipu.memory_reserved()
print("all well")
"""


@pytest.mark.parametrize("algorithm", ["BF", "BS", "RAW", "TORCH"])
def test_allocator(run: Any, algorithm: str) -> None:
    done = run(ALLOCATOR, DIPU_DEVICE_MEMCACHING_ALGORITHM=algorithm, DIPU_MOCK_CUDA="false")
    assert done.stdout.splitlines()[-1] == "all well"


LEAK = """
import torch, torch_dipu
def freed():
    return torch_dipu.dipu.caching_allocator_alloc(512)
address = freed()
torch_dipu.dipu.caching_allocator_delete(address)
try:
    torch_dipu.dipu.caching_allocator_delete(address)
except RuntimeError as error:
    assert "double free" in str(error) and "in freed" in str(error), error
else:
    raise AssertionError("a block was freed twice")
def leak():
    return torch.ones(1 << 18, device="dipu")
lost = leak()
lost.untyped_storage().resize_(0)
try:
    lost + 1
except RuntimeError as error:
    assert "use after free" in str(error) and "its block of 1048576 bytes" in str(error), error
    assert "in leak" in str(error), "the allocation is named"
else:
    raise AssertionError("a tensor without memory was read")
del lost
kept = leak()
others = [torch.ones(8, device="dipu") for _ in range(6)]
others.clear()
"""


def test_memory_checker(run: Any) -> None:
    done = run(
        LEAK,
        DIPU_MEM_CHECK="1", DIPU_MEM_CHECK_ENABLE_BACKTRACE="1", DIPU_MEM_CHECK_LOG_INTERVAL="5",
        DIPU_MEM_CHECK_MAX_BLOCK="4", DIPU_MOCK_CUDA="false",
    )  # fmt: skip
    form = (
        r"dipu memory checker: {}current block num = \d+, total_size = \d+(B|KB|MB), "
        r"insert count = \d+, max block num = 4, log interval = 5"
    )
    lines = done.stdout.splitlines()
    order = ["", "there may be memory leak. ", "going to destruction. "]
    found = [
        k for kind in order for k, line in enumerate(lines) if re.fullmatch(form.format(kind), line)
    ]
    assert len(found) >= 3 and found[-1] == max(found), done.stdout
    leaked = lines[found[-1] + 1 :]
    assert "block of 1048576 bytes" in leaked[0] and "is not freed" in leaked[0], done.stdout
    assert any("in leak" in line for line in leaked), "the backtrace names the function"
    assert any("at::_ops::" in line for line in leaked), "and the functions of C++"


PATH_COUNTS = """
import torch, torch_dipu
from torch_dipu import dipu
x = torch.randn(4, 3, device="dipu", requires_grad=True)
y = (x + x).sum(); y.backward()
assert x.grad.cpu().tolist() == [[2.0] * 3] * 4
torch.add(x.detach(), 1)  # the sum of the gradients of both operands was forced too
torch.nn.functional.conv2d(torch.randn(1, 2, 4, 4, device="dipu"),
                           torch.randn(2, 2, 3, 3, device="dipu"))
torch.rsqrt(x.detach().abs())
counts = dipu.path_counts()
assert counts["add.out", "forced"] == 3 and ("rsqrt.out", "compiled") not in counts, counts
dipu.set_fallback_ops([".*"])
x.grad = None
torch.sgn(x).sum().backward()  # whose gradient is a tensor of zeros without memory
assert not x.grad.any()
dipu.set_fallback_ops(["mul.*"])
torch.add(x.detach(), 1); x.detach() * 2
after = dipu.path_counts()
assert after["add.out", "forced"] == 3 and after["mul.out", "forced"] == 1, after
"""


def test_forced_fallback(run: Any) -> None:
    done = run(
        PATH_COUNTS,
        DIPU_FORCE_FALLBACK_OPS_LIST="add.out,conv2d", DIPU_MOCK_CUDA="false",
        DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS="rsqrt.out",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for name in ("add.out", "conv2d", "mul.out"):
        said = f"force fallback has been set, {name} will be fallback to cpu"
        assert lines.count(said) == 1, done.stdout


COMPARED = """
import torch, torch_dipu, dicp.device.active
from dicp.device.dispatcher import Dispatcher
x = torch.ones(4, 5, 5, device="dipu")
torch.add(x, x)
torch.nn.functional.dropout(x, 0.5)
real = Dispatcher._by_target
def wrong(self, op, name, args, kwargs):
    result = real(self, op, name, args, kwargs)
    return result.add_(1) if name == "mul.out" else result
Dispatcher._by_target = wrong
x * 3
torch.sub(x, x)

def refused(expected, found):
    raise ValueError("no\\nverdict")
dicp.device.tools.verdict = refused
print("REFUSED")
print("GOES ON", torch.add(x, x).sum().item())
"""


def test_autocompare(run: Any) -> None:
    done = run(
        COMPARED, DIPU_AUTOCOMPARE_OPS_LIST="(add|mul|sub|bernoulli_)(..*)?", DIPU_MOCK_CUDA="false"
    )
    text, refused = done.stdout.split("REFUSED\n")
    assert refused.splitlines()[-2:] == ["not_close comparison error: no verdict", "GOES ON 200.0"]
    start = text.index("dipu_add_out_autocompare")
    lines = text[start:].splitlines()
    tensor = (
        r"  numel:100, sizes:\[4, 5, 5\], stride:\[25, 5, 1\], is_view:0, "
        r"TensorOptions\(dtype=float, device={}, layout=Strided, requires_grad=false \(default\), "
        r"pinned_memory=false \(default\), memory_format=\(nullopt\)\), data_ptr:0x[0-9a-f]+"
    )
    assert lines[1] == "autocompare:    add.out out:"
    assert re.fullmatch(tensor.format("cpu"), lines[2]), lines[2]
    assert re.fullmatch(tensor.format("dipu:0"), lines[3]), lines[3]
    assert lines[4] == "  allclose" and "autocompare:    add.out self: allclose" in lines
    assert "bernoulli" not in text, "random operators are not compared"
    bad = [line for line in text.splitlines() if "not_close" in line]
    assert len(bad) == 1 and "max diff: 1, MAE: 1" in bad[0], text  # none of the sum in place
    assert "not_close" not in text[text.index("dipu_sub_out_autocompare") :]


def test_autocompare_of_lists() -> None:
    """Tensors by their number; lists of other lengths differ."""
    one = torch.ones(2)
    found = list(compare("cat.out tensors", [one, one], [one, 2 * one], False))
    label = "autocompare:    cat.out tensors"
    assert found[0] == f"{label} 0-th: allclose" and len(found) == 2
    assert found[1].startswith(f"{label} 1-th: not_close, max diff: 1, MAE: 1, "), found
    assert list(compare("split", [one], [one, one])) == [
        "autocompare:    split: not_allclose, lengths differ"
    ]


DIPU_NAMES = """
from datetime import timedelta
import torch, torch_dipu, dicp.device
from torch_dipu import dipu
from dicp.device import (
    DIPUAllocator, DIPUEvent, DIPUGenerator, DIPUGuard, DIPUStream, ProcessGroupDICL
)
import torch.distributed as dist

assert DIPUGuard is dipu.device and DIPUStream is dipu.Stream and DIPUEvent is dipu.Event
with DIPUGuard(1):
    assert dipu.current_device() == 1 and DIPUAllocator().device.index == 1
    assert DIPUGenerator().device.index == 1

class Counting(DIPUAllocator):
    calls = 0

    def allocate(self, size, stream=None):
        self.calls += 1
        return super().allocate(size, stream)

memory = Counting("dipu:0")
before = memory.allocated
address = memory.allocate(1 << 20, DIPUStream())
assert address and memory.calls == 1 and memory.allocated >= before + (1 << 20)
memory.free(address)
assert memory.allocated == before
memory.empty_cache()
assert memory.reserved >= memory.allocated
try:
    memory.allocate(1 << 60)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("2^60 bytes")

draws = [torch.rand(5, device="dipu", generator=DIPUGenerator().manual_seed(3)) for _ in range(2)]
assert torch.equal(draws[0], draws[1])
assert isinstance(DIPUGenerator(), torch.Generator)

group = ProcessGroupDICL(dist.HashStore(), 0, 1, timedelta(seconds=60))
ones = torch.ones(3)
group.allreduce(ones).wait()
assert group.size() == 1 and group.rank() == 0 and ones.tolist() == [1.0] * 3
try:
    dicp.device.DIPUTensor
except AttributeError as error:
    assert "DIPUTensor" in str(error)
else:
    raise AssertionError("a name that is not there")
print("all well")
"""


def test_names_of_dipu(run: Any) -> None:
    done = run(DIPU_NAMES, DIPU_MOCK_CUDA="false", DIPU_SIMULATED_DEVICES="2")
    assert done.stdout.endswith("all well\n"), done.stderr


DUMPED = """
import torch, torch_dipu
from torch_dipu import dipu
x = torch.ones(3, 4, device="dipu")
with dipu.dump_op_args(2):
    torch.add(x, 3)
    torch.add(x, x)
torch.add(x, 4)
with dipu.dump_op_args(3):
    torch.sub(x, 5)
dipu.dump_op_args(1)
torch.mul(x, 6)
dipu.dump_op_args(0)
torch.mul(x, 7)
library = torch.library.Library("own", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
print("ANOTHER LIBRARY")
with dipu.dump_op_args(2):
    torch.ops.own.twice(x)
"""


def test_dump(run: Any) -> None:
    printed, other = run(DUMPED, DIPU_MOCK_CUDA="false").stdout.split("ANOTHER LIBRARY\n")
    assert other.splitlines()[1].startswith("  twice: x:numel:12"), other
    lines = printed.splitlines()
    number = [
        r"  add.Scalar_out: self:numel:12, sizes:\[3, 4\], .*", "  add.Scalar_out: other:3",
        "  add.Scalar_out: alpha:1", "  add.Scalar_out: out:numel:12, .*",
    ]  # fmt: skip
    assert all(map(re.fullmatch, number, lines[1:5])), lines
    assert lines[7].startswith("  add.out: other:numel:12"), lines
    calls = [line for line in lines if line.startswith("[dipu_")]
    assert calls == [
        "[dipu_add_out:6]:add.out  add.out", "[dipu_add_out:7]:add.out  add.out",
        "[dipu_sub_out:10]:sub.out  sub.out", "[dipu_mul_out:12]:mul.out  mul.out",
    ]  # fmt: skip
    values = lines[lines.index(calls[2]) : lines.index(calls[3])]
    row = "[1., 1., 1., 1.]"
    assert values[2:5] == [f"tensor([{row},", f"        {row},", f"        {row}])"], values
    assert "  sub.Scalar_out: other:5" in values
    assert lines[-1] == calls[3], "level 1 has no arguments, level 0 no line"


SETTINGS = """
import logging, os, torch
logging.basicConfig(level=logging.WARNING)
import torch_dipu
from torch_dipu import dipu

# two of three devices; CUDA's name means them, tensors say their own
x = torch.ones(4, device="cuda")
assert str(x.device) == "dipu:0" and x.is_cuda and dipu.device_count() == 2

# every call is waited for: an error is raised at its operator
table, bad = torch.zeros(3, 2, device="dipu"), torch.tensor([0, 9], device="dipu")
torch.index_select(table, 0, torch.tensor([0, 1], device="dipu"))
for _ in range(3):
    try:
        torch.index_select(table, 0, bad)
    except (RuntimeError, IndexError) as error:
        assert "9" in str(error), error
    else:
        raise AssertionError("the error was not raised at the operator")

# the level of the dump is read at every call
x + 1
os.environ["DIPU_DUMP_OP_ARGS"] = "1"
x + 2
os.environ["DIPU_DUMP_OP_ARGS"] = "0"
x + 3
for _ in range(2):
    x.cpu(); torch.linalg.qr(torch.eye(2, device="dipu"))

# blocks above the split limit serve large requests alone, and go back above the threshold
large = torch.empty(3 << 20, dtype=torch.uint8, device="dipu")
address = large.data_ptr()
del large
small = torch.empty(3 << 19, dtype=torch.uint8, device="dipu")
assert not address <= small.data_ptr() < address + (20 << 20), "a block above the limit was split"
del small
assert dipu.memory_reserved() > 40 << 20
dipu.set_per_process_memory_fraction((78 << 20) / dipu.mem_get_info()[1])
other = torch.empty(30 << 20, dtype=torch.uint8, device="dipu")
assert dipu.memory_reserved() < 35 << 20, "unused blocks were kept above the threshold"

# freed pinned memory is given away again, or with RAW goes back
pinned = torch.ones(1000).pin_memory()
address = pinned.data_ptr()
del pinned
again = torch.ones(900).pin_memory()
print("REUSED", again.data_ptr() == address, again.is_pinned())

# each operator's path and dtypes
from typer.testing import CliRunner
from dicp.cli import app
printed = CliRunner().invoke(app, ["device", "ops"]).output
rows = [line.replace("│", " ").split() for line in printed.splitlines()]
paths = {row[0]: row[1:] for row in rows if row}
for operator, path in ("add.Tensor", "compiled"), ("nonzero", "cpu"), ("mm", "library"):
    assert path in paths[operator], (operator, paths[operator])
print("LISTED")
"""


def test_settings(run: Any) -> None:
    """Variables that no other test sets, each by its effect."""
    done = run(
        SETTINGS,
        DIPU_PYTHON_DEVICE_AS_CUDA="false", DIPU_SIMULATED_DEVICES="3", DIPU_VISIBLE_DEVICES="2,0",
        DIPU_SYNC_EXEC_MODE="1", DIPU_DUMP_OP_ARGS="0", DIPU_LOG_FALLBACK_INFO="1",
        DIPU_DEVICE_MEMCACHING_ALGORITHM="TORCH", DIPU_HOST_MEMCACHING_ALGORITHM="BS",
        DIPU_TORCH_ALLOCATOR_CONF="max_split_size_mb:2,garbage_collection_threshold:0.5",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines.count("DIPU_SYNC_EXEC_MODE: every operator is waited for") == 1
    assert len([line for line in lines if "]:add.out" in line]) == 1, lines
    assert done.stderr.count("linalg_qr.out runs on the CPU") == 2, done.stderr
    assert lines[-2] == "REUSED True True" and lines[-1] == "LISTED"


PROFILED = """
import json, tempfile, torch
from dicp.testing import torchvision_operators
torchvision_operators.define()
import torch_dipu, torchvision

def trace_of(profile):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.load(open(file.name))["traceEvents"]
    return events, [e for e in events if e.get("ph") == "X"]

def undisturbed(times):
    return {name: min(spent) * len(spent) for name, spent in times.items()}

host_only = [torch.profiler.ProfilerActivity.CPU]
host_model = torchvision.models.resnet18(num_classes=4).eval()
host_image = torch.randn(1, 3, 32, 32)
compiled = torch.compile(host_model, backend="cpugraph")
with torch.no_grad():
    compiled(host_image)
    with torch.profiler.profile(record_shapes=True, activities=host_only) as profile:
        for _ in range(3):
            compiled(host_image)
kernels = [e for e in trace_of(profile)[1] if e["name"].startswith("dicp::")]
kinds, spent = {}, {}
for event in kernels:
    known, name = event["args"], event["name"]
    found = [kind for kind in ("convolution", "batch_norm") if kind in known["operators"]]
    kinds[name] = (found or ["others"])[0]
    assert not found or found[0] in name and "resnet.py" in known["source"], event
    spent.setdefault(name, []).append(event["dur"])
normalized = [e for e in kernels if "batch_norm" in e["name"]]
on_images = [e for e in normalized if any(len(d) == 4 for d in e["args"]["Input Dims"])]
calls = sum(e["args"]["operators"].count("batch_norm") for e in on_images)  # some are fused
assert sum(kinds[e["name"]] == "convolution" for e in kernels) == calls == 3 * 20, calls
total = dict.fromkeys(("convolution", "batch_norm", "others"), 0.0)
for name, time in undisturbed(spent).items():
    total[kinds[name]] += time
assert sorted(total, key=total.get)[0] == "others", total

model, image = host_model.to("dipu"), host_image.to("dipu")
with torch.no_grad():
    for _ in range(3):
        model(image)
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(activities=host_only, **options) as profile:
        with torch.profiler.record_function("inference"):
            model(image)
calls = {event.key: event for event in profile.key_averages()}
for name in ("convolution", "native_batch_norm"):
    names = f"dipu_{name}", f"LaunchKernel_{name}", f"{name} (simulated dipu:0)"
    rows = [calls[row] for row in names]
    assert [row.count for row in rows] == [20] * 3, rows
    assert rows[0].device_time_total == rows[2].self_device_time_total > 0
    assert rows[2].self_cpu_time_total == 0, "a row of the device"
assert calls["aten::conv2d"].count == calls["aten::batch_norm"].count == 20
assert "wrapper_DIPU_empty_strided" in calls
shaped = profile.key_averages(group_by_input_shape=True)
for row in ("aten::conv2d", "dipu_convolution"):
    assert any(e.key == row and e.input_shapes[:2] == [[1, 3, 32, 32], [64, 3, 7, 7]]
               for e in shaped), row
table = profile.key_averages().table(sort_by="self_cpu_time_total")
for column in ("Name", "Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg",
               "# of Calls", "Self DIPU", "Self DIPU %", "DIPU total", "DIPU time avg",
               "DIPU Mem", "Self DIPU Mem"):
    assert column in table, column
spent = {}
for _ in range(3):
    with torch.no_grad(), torch.profiler.profile(activities=host_only) as ranked:
        model(image)
    for event in ranked.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            spent.setdefault(event.name, []).append(event.device_time_total)
by_device = undisturbed(spent)
assert "convolution" in max(by_device, key=by_device.get), by_device
assert max(e.device_memory_usage for e in profile.key_averages()) > 64 * 16 * 16 * 4

events, ranges = trace_of(profile)
at = {(e["ts"], e["pid"], e["tid"]): e for e in ranges}
launches = [e for e in ranges if e["name"].startswith("LaunchKernel_")]
rows = {e["pid"] for e in events if e.get("args", {}).get("name") == "simulated dipu:0"}
kernels = [e for e in ranges if e["pid"] in rows]
starts = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "ac2g"}
ends = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == "ac2g"}
assert len(rows) == 1 and len(launches) == len(kernels) == len(starts) == len(ends) > 40
for number, start in starts.items():
    launch, kernel = (at[e["ts"], e["pid"], e["tid"]] for e in (start, ends[number]))
    assert kernel["name"] == launch["name"][len("LaunchKernel_"):] + " (simulated dipu:0)"
    assert kernel["args"]["queued us"] >= 0 and kernel["args"]["simulated"], kernel
assert any(e["name"] == "inference" for e in ranges)
stacks = [e for e in ranges if e.get("cat") == "python_function"]
assert any("resnet" in e["name"] for e in stacks)
print("all well")
"""


def test_profiler(run: Any) -> None:
    """ResNet-18's inference on the device and compiled for the host: rows, shapes, memory, stacks,
    a kernel for each launch. The profiles name no device."""
    done = run(PROFILED, DIPU_MOCK_CUDA="false", FORCE_USE_DIPU_PROFILER="1")
    assert done.stdout.splitlines()[-1] == "all well"


ERRORS = {
    "pattern": (
        "import torch_dipu",
        {"DIPU_FORCE_FALLBACK_OPS_LIST": "add.out,(("},
        r"DIPU_FORCE_FALLBACK_OPS_LIST is 'add.out,\(\('; expected regular expressions",
    ),
    "vendor": ("import torch_dipu", {"DIPU_DEVICE": "nobody"}, r"DIPU_DEVICE\) is 'nobody'"),
    "second name": (
        "import torch; torch.utils.rename_privateuse1_backend('other'); import torch_dipu",
        {},
        "named 'other' already and cannot be named 'dipu'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(run: Any, name: str) -> None:
    program, variables, expected = ERRORS[name]
    done = run(program, ok=False, **variables)
    assert done.returncode != 0 and re.search(expected, done.stderr), done.stderr[-800:]


VENDOR = """
import torch, torch_dipu
from torch_dipu import dipu
assert dipu.get_device_name() == "droplet" and dipu.device.__vendor__ == "droplet"
x = torch.randn(5, 3, device="dipu", requires_grad=True)
w = torch.randn(3, 2, device="dipu")
y = torch.relu(x @ w).sum()
y.backward()
h = x.detach().cpu().requires_grad_()
torch.relu(h @ w.cpu()).sum().backward()
torch.testing.assert_close(x.grad.cpu(), h.grad)
z = x.detach().t()
z[1:].mul_(2)
assert torch.equal(z.cpu()[1:], h.detach().t()[1:] * 2)
assert torch.equal(torch.sort(z).values.cpu(), torch.sort(z.cpu()).values)
print("all well")
"""


def _vendor(folder: Path, runtime: str) -> None:
    """An installed package whose runtime is the class of this text."""
    info = folder / "droplet-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: droplet\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text("[dicp.devices]\ndroplet = droplet:library\n")
    folder.joinpath("droplet.py").write_text(
        "from dicp.device.runtime_template import HostRuntime\n"
        f"{runtime}\n"
        "runtime = Runtime('droplet')\n"
        "def library():\n    return runtime.library()\n"
    )


def test_vendor_runtime(run: Any, tmp_path: Path) -> None:
    """A vendor's runtime by entry point: the template, whose memory the host does not address."""
    _vendor(tmp_path, "Runtime = HostRuntime")
    done = run(VENDOR, PYTHONPATH=str(tmp_path), DIPU_DEVICE="droplet", DIPU_MOCK_CUDA="0")
    assert done.stdout.splitlines()[-1] == "all well"


COMPILED = """
import torch, torch_dipu

def adds(x, y):
    x.add_(y)
    return x * 2

def scales_a_column(x, y):
    x[:, 0].mul_(3)
    return x + y

def fills(x, y):
    y.copy_(x.sum(0))
    return y + 1

for function in (adds, scales_a_column, fills):
    expected = torch.arange(12.0).view(3, 4), torch.ones(4)
    mine = [tensor.to("dipu") for tensor in expected]
    found, wanted = torch.compile(function, backend="dicp")(*mine), function(*expected)
    for a, b in zip((found, *mine), (wanted, *expected), strict=True):
        torch.testing.assert_close(a.cpu(), b, msg=lambda text: f"{function.__name__}: {text}")
print("all well")
"""


@pytest.mark.parametrize("vendor", ["", "droplet"])
def test_graphs_overwrite_their_inputs(run: Any, tmp_path: Path, vendor: str) -> None:
    """A compiled function writes to its arguments, also where the host addresses no memory."""
    _vendor(tmp_path, "Runtime = HostRuntime")
    done = run(COMPILED, PYTHONPATH=str(tmp_path), DIPU_DEVICE=vendor, DIPU_MOCK_CUDA="0")
    assert done.stdout.splitlines()[-1] == "all well"


WRITTEN = """
import torch, torch_dipu
from torch_dipu import dipu

library = torch.library.Library("own", "DEF")
library.define("mul_(Tensor(a!) self, Tensor other) -> Tensor(a!)")
library.impl("mul_", lambda self, other: self.copy_(self + 3 * other), "CPU")

def given(place):
    torch.manual_seed(0)
    x = torch.randn(4, 6).to(place)
    whole = torch.zeros(3, 6, 4, dtype=torch.float64).to(place)
    return x, whole

def empty(x, dtype=None):
    return torch.empty(0, dtype=dtype or x.dtype, device=x.device)

CALLS = {  # each returns its result, and the tensor that this must be
    "a result": lambda x, w: (lambda r: (torch.add(x, 1, out=r), r))(torch.empty_like(x)),
    "resized": lambda x, w: (lambda r: (torch.mul(x, x, out=r), r))(empty(x)),
    "resized, in columns": lambda x, w: (lambda r: (torch.abs(x.t(), out=r), r))(empty(x)),
    "a view, transposed and wider": lambda x, w: (torch.sub(x, 0.5, out=w[1].t()), None),
    "wider numbers": lambda x, w: (lambda r: (torch.add(x.int(), 1, out=r), r))(
        empty(x, torch.float64)),
    "two results": lambda x, w: (lambda v, i: (torch.sort(x, 1, out=(v, i))[1], i))(
        torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)),
    "two resized": lambda x, w: (lambda v, i: (torch.kthvalue(x, 2, 1, out=(v, i))[0], v))(
        empty(x), empty(x, torch.int64)),
    "decomposed": lambda x, w: (lambda r: (torch.softmax(x, 1, out=r), r))(torch.empty_like(x)),
    "decomposed and resized": lambda x, w: (lambda r: (torch.softmax(x, 0, out=r), r))(empty(x)),
    "over what it reads": lambda x, w: (torch.ops.aten.flip.out(x, [0, 1], out=x), x),
    "resized by the CPU, in columns": lambda x, w: (lambda q, r: (
        torch.linalg.qr(x, out=(q, r))[0], q))(empty(x), empty(x)),
    "in place": lambda x, w: (x.mul_(3), x),
    "in place, numbers promoted": lambda x, w: (lambda h: (h.add_(1e-3), h))(x.half()),
    "in place, of another library": lambda x, w: (torch.ops.own.mul_(x, x + 1), x),
    "in place on a view": lambda x, w: (x[1:, ::2].cumsum_(1), None),
    "in place, beside what it reads": lambda x, w: (x[:, 0].add_(x[:, 1]), None),
    "between what it reads": lambda x, w: (torch.mul(x[:, ::2], 3, out=x[:, 1::2]), None),
    "one column after the other": lambda x, w: (
        torch._foreach_mul_([x[:, 0], x[:, 1]], [x[:, 2], x[:, 3]]), None),
    "resized within its memory": lambda x, w: (lambda r: (torch.add(x[0], 1, out=r), r))(
        empty(x).set_(w.clone().float().untyped_storage(), 2, (0,))),
    "in place by indices": lambda x, w: (x.index_put_((x.argmax(0),), x[0].clone()), x),
    "lists in place": lambda x, w: (torch._foreach_mul_([x[0], x[2]], 2.0), None),
    "cast": lambda x, w: (w[0].copy_(x.t() * 1e3), None),
    "cast to whole numbers": lambda x, w: (x.mul(9).to(torch.int8), None),
    "cast to bool": lambda x, w: (x.relu().to(torch.bool), None),
    "cast from complex": lambda x, w: (torch.complex(x, x * 2).conj().to(torch.complex128), None),
    "cast to bfloat16": lambda x, w: (x.to(torch.bfloat16), None),
}
for forced in ([], [".*"]):
    dipu.set_fallback_ops(forced)
    for name, call in CALLS.items():
        for attempt in range(3):
            expected, mine = given("cpu"), given("dipu")
            places = [t.data_ptr() for t in mine]
            wanted, _ = call(*expected)
            found, same = call(*mine)
            assert same is None or found is same, (name, forced)
            if wanted is None or isinstance(wanted, (list, tuple)):
                wanted = found = expected[0].new_zeros(0)
            assert [t.data_ptr() for t in mine] == places, (name, forced)
            for a, b in zip((found, *mine), (wanted, *expected), strict=True):
                assert (a.dtype, a.stride()) == (b.dtype, b.stride()), (name, forced)
                said = f"{name}, forced {forced}, call {attempt + 1}"
                torch.testing.assert_close(a.cpu(), b, msg=lambda text: f"{said}: {text}")
taken = dipu.path_counts()
assert {("_softmax.out", "decomposed"), ("add.out", "compiled"), ("add.out", "forced")} <= {*taken}
print("all well")
"""


@pytest.mark.parametrize("vendor", ["", "droplet"])
def test_given_results_are_written(run: Any, tmp_path: Path, vendor: str) -> None:
    """By the device's paths and by the CPU, with and without memory that the host addresses."""
    if vendor:
        _vendor(tmp_path, "Runtime = HostRuntime")
    done = run(
        WRITTEN,
        PYTHONPATH=str(tmp_path), DIPU_DEVICE=vendor, DIPU_MOCK_CUDA="0",
        DIPU_KEEP_TORCHOP_DEFAULT_IMPL_OPS="_softmax.out",
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "all well"


THREE_DEVICES = """
from dicp.device.runtime_template import Properties
class Runtime(HostRuntime):
    places = {}
    def stream_create(self, device, priority, stream):
        print("STREAM", priority, flush=True)
        super().stream_create(device, priority, stream)
    def device_count(self, count):
        count[0] = 3
    def set_device(self, device):
        assert 0 <= device < 3
    def device_properties(self, device, properties):
        super().device_properties(device, properties)
        Properties.from_address(properties).name = f"droplet {device}".encode()
    def malloc(self, device, size, address):
        super().malloc(device, size, address)
        self.places[address[0]] = device
    def address_device(self, address, device):
        device[0] = self.places.get(address, -1)
    def copy_between(self, to_device, to, from_device, source, size, stream):
        print("COPIED", from_device, to_device, flush=True)
        self.copy_on_device(to_device, to, source, size, stream)
"""
VISIBLE = """
import torch, torch_dipu
from torch_dipu import dipu
assert [dipu.get_device_name(k) for k in range(dipu.device_count())] == ["droplet 2", "droplet 0"]
x = torch.arange(6.0, device="dipu:1")
assert x.device == torch.device("dipu:1") and (x + 1).device == x.device
y = x.to("dipu:0")
assert torch.equal(y.cpu(), torch.arange(6.0))
import droplet
places = droplet.runtime.places
assert places[x.data_ptr()] == 0 and places[y.data_ptr()] == 2, places
dipu.synchronize(1)
for priority in (0, -1):
    with dipu.stream(dipu.Stream(priority=priority)):
        assert torch.equal((y + 1).cpu(), torch.arange(6.0) + 1)
print("all well")
"""


COLLECTIVES = """
from collections import Counter
from dicp.device.runtime_interface import collectives

def counted(name):
    def call(self, *args):
        self.counts[name] += 1
        getattr(HostRuntime, name)(self, *args)
    return call

class Runtime(HostRuntime):
    counts = Counter()
    for _name in collectives():
        if not _name.startswith("communicator"):
            locals()[_name] = counted(_name)
"""
DEAD_LINK = """
from dicp.device.runtime_template import _Failed

class Runtime(HostRuntime):
    def broadcast(self, *args):
        raise _Failed("the link is down")
"""
NO_COLLECTIVES = """
from types import SimpleNamespace
from dicp.device.runtime_interface import collectives

class Runtime(HostRuntime):
    def library(self):
        whole = vars(super().library())
        for name in collectives():
            del whole["dicp_rt_" + name]
        return SimpleNamespace(**whole)
"""
PART_OF_COLLECTIVES = """
class Runtime(HostRuntime):
    def library(self):
        whole = super().library()
        del whole.dicp_rt_broadcast, whole.dicp_rt_all_to_all
        return whole
"""


def _two_processes(run: Any, folder: Path, *arguments: str) -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = ROOT / "test/device/vendor_collectives.py"
    given = {"PYTHONPATH": str(folder), "DIPU_DEVICE": "droplet", "DIPU_MOCK_CUDA": "0"}
    said = run(program, str(port), *arguments, TMPDIR=str(folder), **given).stdout
    return str(said)


def test_collectives_by_gloo(run: Any, tmp_path: Path) -> None:
    """Of a vendor's device whose memory the host does not address, without collectives."""
    _vendor(tmp_path, NO_COLLECTIVES)
    assert _two_processes(run, tmp_path, "gloo").count("all well") == 2


def test_collectives_of_a_vendor(run: Any, tmp_path: Path) -> None:
    """Device tensors go by the vendor's collectives, what it lacks by gloo."""
    _vendor(tmp_path, COLLECTIVES)
    assert _two_processes(run, tmp_path, "vendor").count("all well") == 2


def test_a_collective_that_fails(run: Any, tmp_path: Path) -> None:
    _vendor(tmp_path, DEAD_LINK)
    said = _two_processes(run, tmp_path, "failing")
    for rank in (0, 1):
        expected = f"dicl: dicp_rt_broadcast failed on rank {rank} of 2 with status 1: the link is "
        assert f"CollectiveError: {expected}down. " in said, said


def test_a_part_of_the_collectives(run: Any, tmp_path: Path) -> None:
    _vendor(tmp_path, PART_OF_COLLECTIVES)
    given = {"PYTHONPATH": str(tmp_path), "DIPU_DEVICE": "droplet", "DIPU_MOCK_CUDA": "0"}
    said = run("import torch_dipu", ok=False, **given).stderr
    assert "interface: dicp_rt_broadcast, dicp_rt_all_to_all. " in said, said


def test_visible_devices_of_a_vendor(run: Any, tmp_path: Path) -> None:
    """DIPU_VISIBLE_DEVICES renumbers the devices of any runtime, which is told priorities."""
    _vendor(tmp_path, THREE_DEVICES)
    given = {"PYTHONPATH": str(tmp_path), "DIPU_DEVICE": "droplet", "DIPU_MOCK_CUDA": "0"}
    lines = run(VISIBLE, DIPU_VISIBLE_DEVICES="2,0", **given).stdout.splitlines()
    assert lines[-1] == "all well" and "COPIED 0 2" in lines, lines
    assert {"STREAM 0", "STREAM -1"} <= {*lines}, lines
    done = run(VISIBLE, ok=False, DIPU_VISIBLE_DEVICES="0,3", **given)
    assert "DIPU_VISIBLE_DEVICES: device 3 is to be visible, but the runtime has 3" in done.stderr


def test_runtime_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated chip and the template pass; a library that lacks functions is told so."""
    from dicp.cli import app
    from dicp.device.runtime_check import check_library, check_runtime
    from dicp.device.runtime_template import HostRuntime

    source = ROOT / "dicp/device/native/simulator.cpp"
    library = tmp_path / "libchip.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-pthread", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    findings = check_library(library)
    assert len(findings) == 7 and [f for f in findings if not f.ok] == []
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["device", "check", library.name])
    assert printed.exit_code == 0 and printed.output.count("ok ") == 7, printed.output
    runtime = HostRuntime()
    functions = runtime.library()
    findings = [*check_runtime(functions)]
    assert findings[-1].name == "collectives" and [f for f in findings if not f.ok] == []
    functions.dicp_rt_all_to_all = ctypes.CFUNCTYPE(ctypes.c_int, *5 * [ctypes.c_void_p])(
        lambda *args: 0
    )
    assert [f.detail for f in check_runtime(functions)][-1] == "wrong contents after all_to_all"

    text = source.read_text().replace("dicp_rt_fill(", "dicp_rt_fil(")
    broken = tmp_path / "broken.cpp"
    broken.write_text(text.replace('#include "runtime.h"', f'#include "{source.parent}/runtime.h"'))
    subprocess.run([*command[:-1], str(tmp_path / "libbroken.so"), str(broken)], check=True)
    assert [f.name for f in check_library(tmp_path / "libbroken.so")] == ["dicp_rt_fill"]
    (loaded,) = check_library(broken)
    assert not loaded.ok and loaded.name == "loading" and "invalid ELF header" in loaded.detail
    printed = CliRunner().invoke(app, ["device", "check", str(tmp_path / "libbroken.so")])
    assert printed.exit_code == 1 and "FAILED  dicp_rt_fill" in printed.output, printed.output
