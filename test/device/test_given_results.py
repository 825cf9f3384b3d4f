"""Tensors that an operator writes to: given results, running statistics."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.sweep

PROGRAM = """
import torch, torch_dipu
import torch.nn.functional as F

x = torch.arange(24.0).reshape(2, 4, 3).sin()

def gapped(*shape, dtype=torch.float32):
    return torch.ones(*shape, 2, dtype=dtype)[..., 0]

def statistics(mean, variance, given):
    return F.batch_norm(given, mean, variance, training=True), mean, variance

def into(function, *arguments, **keywords):
    def run(out, *given):
        result = function(*given, *arguments, out=out, **keywords)
        return out, *(t.stride() for t in (result if isinstance(result, tuple) else (result,)))
    return run

wide = torch.float64
CALLS = {
    "statistics with gaps": (statistics, gapped(4), gapped(4), x),
    "softmax": (into(torch.softmax, 1), gapped(2, 4, 3), x),
    "log_softmax": (into(torch.log_softmax, 1), gapped(2, 4, 3), x),
    "ones": (into(torch.ones, 2, 3), gapped(2, 3)),
    "transposed": (lambda out: out.resize_(2, 3).stride(), torch.ones(3, 2).t()),
    "larger": (lambda out: out.resize_(4, 3).stride(), torch.ones(3, 2).t()),
    "mode": (lambda a, b, given: torch.mode(given, 1, out=(a, b)), gapped(2, 3),
             gapped(2, 3, dtype=torch.int64), x.round()),
    "add into float64": (into(torch.add, 2), torch.ones(2, 4, 3, dtype=wide), x),
}
REFUSED = {
    "argmax": (into(torch.argmax, 1), torch.ones(2, 3, dtype=wide), x),
    "isin": (into(torch.isin, torch.ones(2)), torch.ones(2, 4, 3, dtype=wide), x),
    "signbit": (into(torch.signbit), torch.ones(2, 4, 3, dtype=wide), x),
    "all": (into(torch.all, 1), torch.ones(2, 3, dtype=wide), x),
    "gather": (lambda out, given, index: torch.gather(given, 0, index, out=out),
               torch.ones(2, dtype=wide), x[0, 0], torch.arange(2)),
    "cumsum": (into(torch.cumsum, 0, dtype=torch.int64), torch.ones(3, dtype=wide), x[0, 0]),
    "aminmax": (lambda a, b, given: torch.aminmax(given, out=(a, b)), torch.ones((), dtype=wide),
                torch.ones((), dtype=wide), x),
    "heaviside": (into(torch.heaviside), torch.ones(2, 4, 3), x.long(), x.long()),
    "bitwise_not": (into(torch.bitwise_not), torch.ones(2, 4, 3), x.long()),
    "addr_ of a row": (torch.Tensor.addr_, torch.ones(3), x[0, :2, 0], x[0, 0]),
    "shared elements": (lambda out, given, index: torch.index_select(given, 0, index, out=out),
                        torch.ones(1).expand(3), x[0, :, 0], torch.arange(3)),
    "complex": (torch.complex, x, x.double()),
    "polar": (torch.polar, x, x.double()),
    "a complex result": (into(torch.mul, 1j), torch.ones(2, 4, 3), x),
}

def on(device, given):
    found = []
    for tensor in given:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        found.append(copy if 0 in tensor.stride() else copy.copy_(tensor))
    return found

for name, (function, *given) in CALLS.items():
    want, got = (torch.utils._pytree.tree_leaves(function(*on(d, given))) for d in ("cpu", "dipu"))
    for a, b in zip(want, got, strict=True):
        same = torch.allclose(a, b.cpu()) if isinstance(a, torch.Tensor) else a == b
        assert same, (name, a, b)
for name, (function, *given) in REFUSED.items():
    for device in ("cpu", "dipu"):
        try:
            function(*on(device, given))
        except RuntimeError:
            continue
        raise AssertionError(f"{name} is not refused on {device}")
print("all well")
"""


FILLED = """
import itertools
import torch, torch_dipu

torch.use_deterministic_algorithms(True)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)
MADE = {
    "empty": lambda given: torch.empty(2, 3, dtype=given.dtype, device=given.device),
    "empty_like": torch.empty_like,
    "new_empty": lambda given: given.new_empty(4),
    "empty_strided": lambda given: torch.empty_strided((2, 3), (1, 2), dtype=given.dtype,
                                                       device=given.device),
    "resize_": lambda given: given.clone().resize_(4, 3),
    "resize_ of a part": lambda given: given.clone()[0].resize_(9),
}
for filled, dtype, (name, make) in itertools.product((True, False), DTYPES, MADE.items()):
    torch.utils.deterministic.fill_uninitialized_memory = filled
    want, got = (make(torch.ones(2, 3, dtype=dtype, device=d)) for d in ("cpu", "dipu"))
    assert want.stride() == got.stride(), name
    if filled:
        same = torch.allclose(want, got.cpu(), equal_nan=True)
        assert same, (name, dtype, want, got.cpu())
print("all well")
"""


def test_memory_without_values_is_filled_as_in_eager(run: Any) -> None:
    assert run(FILLED, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"


def test_tensors_that_are_written_to(run: Any) -> None:
    """Values and strides are eager's, and what eager refuses is refused."""
    assert run(PROGRAM, DIPU_MOCK_CUDA="false").stdout.splitlines()[-1] == "all well"
