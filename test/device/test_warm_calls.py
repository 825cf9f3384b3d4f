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
dipu = torch_dipu.dipu
del given, found
held = dipu.memory_allocated()
square = inputs("cpu")[0][:, :4]
given = square.to("dipu")
for _ in range(3):  # equal sizes, other strides
    torch.testing.assert_close([given.sum(0).cpu(), given.t().sum(0).cpu()],
                               [square.sum(0), square.t().sum(0)])
for number in range(12):  # the number is data
    assert torch.equal(given.fill_(number / 8).cpu(), torch.full((4, 4), number / 8))
del given
assert dipu.memory_allocated() == held, dipu.memory_leaks()
complex_ones = torch.ones(3, dtype=torch.complex128)
for changed in ("mul_", "sub_", "fill_"):
    found = getattr(complex_ones.to("dipu"), changed)(0.1 + 0.3j).cpu()
    expected = getattr(complex_ones.clone(), changed)(0.1 + 0.3j)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15, msg=changed)
try:
    torch.ones(2, dtype=torch.int8, device="dipu").fill_(300)
except RuntimeError as error:
    assert "without overflow" in str(error), error
else:
    raise AssertionError("300 is no int8")
print("all well")
"""
)

OVER_INPUTS = (
    LIST_ENTRIES
    + """
def inputs(place):
    torch.manual_seed(0)
    return torch.randn(33, 40).to(place), torch.randperm(33).to(place)

def numbers(like):
    return torch.empty(0, dtype=torch.int64, device=like.device)

CALLS = {
    "rows": lambda x, i, **given: torch.index_select(x, 0, i, **given),
    "elements": lambda x, i, **given: torch.gather(x, 0, i[:, None].expand(33, 40), **given),
    "joined": lambda x, i, **given: torch.cat([x[20:], x[:20]], **given),
    "sums so far": lambda x, i, **given: torch.cumsum(x, 0, **given),
    "products so far": lambda x, i, **given: torch.cumprod(x, 1, **given),
    "probabilities": lambda x, i, **given: torch.softmax(x, 0, **given),
    "in order": lambda x, i, **given: torch.sort(x, 0, **(
        {"out": (given["out"], numbers(x))} if given else {}))[0],
    "maximum": lambda x, i, **given: torch.amax(x, 1, **given),
    "neighbours": lambda x, i, **given: torch.add(x[1:], x[:-1], **given),
    "beyond the storage": lambda x, i, **given: torch.cat([x, x[1:]], **given),
}
warm = set()
OUTS = {
    "itself": lambda x: x,
    "its first rows": lambda x: x[:0],
    "other rows": lambda x: x[1:1],
}
for name, call in CALLS.items():
    expected = call(*inputs("cpu"))
    for where, out_of in OUTS.items():
        if out_of(inputs("cpu")[0]).shape not in (expected.shape, (0, 40)):
            continue
        for attempt in range(3):
            x, i = inputs("dipu")
            out = out_of(x)
            entered.clear()
            try:
                call(x, i, out=out)
            except RuntimeError as error:  # as eager refuses it
                assert "single memory location" in str(error), error
                continue
            torch.testing.assert_close(out.cpu(), expected, msg=f"{name}: {where}, {attempt + 1}")
            warm |= {(name, where)} if not entered and attempt == 2 else set()
assert {(name, where) for name in ("rows", "elements") for where in list(OUTS)[:2]} <= warm, warm
print("all well")
"""
)

NUMBERS = """
import torch, torch_dipu
from dicp.device.active import registered
from torch_dipu import dipu

compiler = registered.dispatcher.compiler
SCALED = {
    "fill_": lambda x, n: x.clone().fill_(n),
    "fill_ of integers": lambda x, n: x.int().fill_(8 * n),
    "fill_ of booleans": lambda x, n: (x > 0).fill_(n),
    "power": lambda x, n: x.abs() ** n,
    "power in halves": lambda x, n: x.half().abs().pow(n),
    "leaky_relu": lambda x, n: torch.nn.functional.leaky_relu(x, n),
    "leaky_relu in halves": lambda x, n: torch.nn.functional.leaky_relu(x.half(), n),
    "gradient": lambda x, n: torch.ops.aten.leaky_relu_backward(x, -x, n, False),
    "product": lambda x, n: x * n,
    "promoted": lambda x, n: (x > 0) * n,
    "sum": lambda x, n: x + int(8 * n),
    "add": lambda x, n: torch.add(x, x, alpha=n),
    "add_": lambda x, n: x.clone().add_(x, alpha=-n),
    "add in halves": lambda x, n: torch.add(x.half(), x.half(), alpha=n),
    "sub": lambda x, n: torch.sub(x, x, alpha=n),
    "addcmul_": lambda x, n: x.clone().addcmul_(x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x.abs() + 1, value=n),
    "addcdiv of large numbers": lambda x, n: torch.addcdiv(
        x, x.sign() * 1e25, x.abs() * 1e-20 + 1e-20, value=n * 1e-25),
    "lerp": lambda x, n: torch.lerp(x, -x, n),
    "lerp in halves": lambda x, n: torch.lerp(x.half(), -x.half(), n),
    "whole numbers": lambda x, n: torch.add(x.int(), x.int(), alpha=int(8 * n) + 3),
    "compared": lambda x, n: torch.stack([x < n, x >= n, x == n, x != n]),
    "one element, compared": lambda x, n: (x.half().sum() + n).eq(0.1) | x[0, 0].gt(n),
    "dropout": lambda x, n: torch.nn.functional.dropout(x, 0.4).shape[0] * x,
}
torch.manual_seed(0)
host = torch.randn(4, 5)
x = host.to("dipu")
for name, call in SCALED.items():
    for number in range(12):
        before = sum(len(made) for made in compiler._found.values())
        found, expected = call(x, number / 8 - 0.1), call(host, number / 8 - 0.1)
        close = {"atol": 2e-3, "rtol": 2e-3} if "halves" in name else {}
        torch.testing.assert_close(found.cpu(), expected, msg=f"{name}, {number}", **close)
        made = sum(len(made) for made in compiler._found.values()) - before
        assert number < 1 or not made, (name, number, made)

def losses(kind, device, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)).to(device)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(12):
        before = sum(len(made) for made in compiler._found.values())
        optimizer.zero_grad()
        loss = model(host.to(device)).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        assert step < 2 or sum(map(len, compiler._found.values())) == before, (kind, step)
        yield loss.item()

for foreach in (False, True):
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        found, expected = (list(losses(kind, d, foreach=foreach)) for d in ("dipu", "cpu"))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=str(kind))
fell = {name for name, path in dipu.path_counts() if path in ("cpu", "decomposed")}
assert not fell, fell
REFUSED = (  # as eager does
    lambda x: x.fill_(300), lambda x: x.add_(x, alpha=2.5), lambda x: x.add_(x, alpha=300),
    lambda x: torch.add(x, x, alpha=300), lambda x: torch.addcmul(x, x, x, value=300),
    lambda x: x.fill_(float("nan")), lambda x: torch.lerp(x, x, 2), lambda x: torch.lerp(x, x, x),
    lambda x: torch.pow(x, -1),
)
for number, refused in enumerate(REFUSED):
    x = torch.ones(2, dtype=torch.int8, device="dipu")
    try:
        refused(x)
    except RuntimeError as error:
        whys = ("without overflow", "must not be a floating", "not implemented for", "negative int")
        assert any(why in str(error) for why in whys), error
    else:
        raise AssertionError(number)
print("all well")
"""

PROMOTION = """
import torch, torch_dipu
from torch_dipu import dipu

CALLS = {
    "//": lambda x, n: x // n, "reversed //": lambda x, n: n // (x + 1), "%": lambda x, n: x % n,
    "+": lambda x, n: x + n, "*": lambda x, n: n * x, "/": lambda x, n: x / n,
    "/ in place": lambda x, n: x.double().div_(n), "where": lambda x, n: torch.where(x > 1, x, n),
    "alpha": lambda x, n: torch.add(x, n, alpha=2),
}
for name, call in CALLS.items():
    for kind in (torch.float16, torch.int64):
        for host in (torch.tensor(3, dtype=kind), torch.tensor([3, 1], dtype=kind)):
            x = host.to("dipu")
            for number in (2.5, 2):
                held = torch.tensor(number, dtype=torch.float64), torch.tensor(number)
                for given in (number, *held, *held, number, held[0], number):
                    found, expected = call(x, given), call(host, given)
                    said = name, host, given, found, expected
                    assert found.dtype == expected.dtype, said
                    assert torch.allclose(found.cpu(), expected, rtol=1e-3), said
fell = {name for name, path in dipu.path_counts() if path == "cpu"}
assert not fell, fell
print("all well")
"""

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

PEAKS = """
import torch, torch_dipu
import torch.nn.functional as F
from torch_dipu import dipu

CALLS = {
    "add": (1, lambda x, y: x + y), "softmax": (1, lambda x, y: x.softmax(-1)),
    "gelu": (1, lambda x, y: F.gelu(x)), "transposed": (1, lambda x, y: x.t() + y),
    "joined": (2, lambda x, y: torch.cat([x, y])),
    "gaps": (1.5, lambda x, y: x[:, ::2] * y[:, ::2]),
    "in place": (0, lambda x, y: y.mul_(1.5)), "given": (0, lambda x, y: torch.exp(x, out=y)),
    "resized": (1, lambda x, y: torch.sigmoid(x, out=y.new_empty(0))),
    "over its input": (1, lambda x, y: torch.softmax(y, -1, out=y)),
}
x = torch.linspace(0, 1, 1 << 16).reshape(256, 256)
for name, (shares, call) in CALLS.items():
    expected = call(x, x + 1)
    for attempt in range(2):
        given = x.to("dipu"), (x + 1).to("dipu")
        dipu.synchronize()
        dipu.reset_peak_memory_stats()
        held = dipu.memory_allocated()
        found = call(*given)
        peak = (dipu.max_memory_allocated() - held) / x.nbytes
        assert peak == shares, (name, attempt, peak)
        torch.testing.assert_close(found.cpu(), expected, msg=f"{name}, call {attempt + 1}")
        assert found.stride() == expected.stride(), (name, found.stride())
        del given, found
print("all well")
"""


@pytest.mark.parametrize(
    "program",
    [GAPS, OVER_INPUTS, NUMBERS, PROMOTION, TWO_DEVICES, PEAKS],
    ids=["gaps", "over_inputs", "numbers", "promotion", "two_devices", "peaks"],
)
def test_warm_calls(run: Any, program: str) -> None:
    """Inputs with gaps are copied without Python; memory is that of the inputs' device, and of the
    first call what it is of the others."""
    done = run(program, DIPU_MOCK_CUDA="false", DIPU_SIMULATED_DEVICES="2")
    assert done.stdout.splitlines()[-1] == "all well"
