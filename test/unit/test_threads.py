"""Work that threads share: the other tests run on one thread each, these on several."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compare import assert_matches
from dicp.config import Config
from dicp.vendor.cpu.toolchain import compile_shared, find_toolchain
from dicp.vendor.cpu.units import header_texts

pytestmark = pytest.mark.sweep


@pytest.fixture(autouse=True, params=[2, 3, 40])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Even and uneven shares, and more threads than a reduction has chunks at least."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield request.param
    torch.set_num_threads(before)


def leaf(*shape: int, last: bool = False) -> Tensor:
    made = torch.randn(shape)
    if last:
        made = made.contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


def rows(*shape: int) -> Tensor:
    return torch.randint(0, shape[0], shape[1:])


Work = tuple[Callable[..., Tensor], list[Tensor]]

WORK: dict[str, Callable[[], Work]] = {
    "elements": lambda: (lambda x: torch.tanh(x) * 3, [leaf(1021, 513)]),
    "transpose": lambda: (lambda x: x.t().contiguous() * 2, [leaf(1021, 513)]),
    "sum of rows": lambda: (lambda x: x.sum(1), [leaf(513, 1021)]),
    "sum of columns": lambda: (lambda x: x.sum(0), [leaf(4099, 129)]),
    "sum of all": lambda: (lambda x: x.square().mean(), [leaf(700, 1021)]),
    "few long rows": lambda: (lambda x: x.logsumexp(1), [leaf(1, 300_001)]),
    "running sum": lambda: (lambda x: x.cumsum(1), [leaf(5, 70_001)]),
    "softmax": lambda: (lambda x: x.softmax(-1), [leaf(513, 1021)]),
    "layer norm": lambda: (
        lambda x, w, b: F.layer_norm(x, (384,), w, b), [leaf(1031, 384), leaf(384), leaf(384)]
    ),
    "batch norm": lambda: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [leaf(16, 37, 32, 33), leaf(37), leaf(37)],
    ),
    "batch norm, channels last": lambda: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [leaf(16, 37, 32, 33, last=True), leaf(37), leaf(37)],
    ),
    "rows by index": lambda: (lambda i, w: F.embedding(i, w), [rows(301, 4099), leaf(301, 65)]),
    "product": lambda: (lambda a, b: a @ b, [leaf(513, 257), leaf(257, 385)]),
    "deep product": lambda: (lambda a, b: a @ b, [leaf(16, 16384), leaf(16384, 16)]),
    "batch of products": lambda: (lambda a, b: a @ b, [leaf(7, 65, 129), leaf(7, 129, 65)]),
    "attention": lambda: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [leaf(1, 3, 257, 64), leaf(1, 3, 193, 64), leaf(1, 3, 193, 64)],
    ),
    "convolution": lambda: (
        lambda x, w: F.conv2d(x, w, padding=1), [leaf(3, 33, 29, 31), leaf(65, 33, 3, 3)]
    ),
    "small images": lambda: (
        lambda x, w: F.conv2d(x, w, padding=1, stride=2), [leaf(3, 64, 9, 9), leaf(65, 64, 3, 3)]
    ),
    "channel by channel": lambda: (
        lambda x, w: F.conv2d(x, w, padding=2, groups=33),
        [leaf(3, 33, 57, 31, last=True), leaf(33, 1, 5, 5)],
    ),
    "pieces": lambda: (
        lambda x, w: F.conv2d(x, w, stride=2),
        [leaf(3, 32, 58, 34, last=True), leaf(65, 32, 2, 2)],
    ),
}  # fmt: skip


def results(fn: Callable[..., Tensor], inputs: list[Any]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = fn(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=torch.float32).to(out.dtype))
    return [out, *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("name", WORK)
def test_shares_make_up_the_whole(name: str) -> None:
    fn, inputs = WORK[name]()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    compiled = torch.compile(fn, backend="cpugraph", dynamic=False)
    seen = (results(compiled, inputs), results(fn, inputs), results(fn, wide))
    for got, eager, real in zip(*seen, strict=True):
        assert_matches(got, eager, real)


def distances(rows: int, keys: int) -> Tensor:
    return torch.arange(rows)[:, None] - torch.arange(keys)


ATTENTION: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "few heads": ((1, 3, 257, 64), (1, 3, 700, 64), {}),
    "causal": ((1, 2, 601, 40), (1, 2, 601, 40), {"is_causal": True}),
    "groups of heads": ((2, 4, 130, 24), (2, 2, 500, 24), {}),
    "window": ((1, 2, 601, 40), (1, 2, 601, 40), {"attn_mask": distances(601, 601) // 100 == 1}),
    "hidden rows": ((2, 4, 300, 24), (2, 2, 500, 24), {"attn_mask": distances(300, 500) > 120}),
    "padded": ((2, 2, 100, 24), (2, 2, 500, 24), {
        "attn_mask": torch.arange(500) < torch.tensor([300, 0]).view(2, 1, 1, 1)
    }),
}  # fmt: skip
"""The shape of q, that of k and v, and options. Masks hide keys from whole blocks of queries."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1, 100], ids=["moderate", "large"])
@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_of_attention_do_not_depend_on_threads(
    name: str, scale: float, dtype: torch.dtype, threads: int
) -> None:
    """Large scores: a head whose rows need all their scores is one task."""
    rows, columns, options = ATTENTION[name]
    q, k, v = (torch.randn(shape).to(dtype) for shape in (rows, columns, columns))
    inputs = [(q * scale).requires_grad_(), k.requires_grad_(), v.requires_grad_()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    def computed() -> list[Tensor]:
        return results(torch.compile(attend, backend="cpugraph", dynamic=False), inputs)

    several = computed()
    torch.set_num_threads(1)
    assert all(map(torch.equal, several, computed()))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for got, eager, real in zip(
        several, results(attend, inputs), results(attend, wide), strict=True
    ):
        assert_matches(got, eager, real)


PARTS = """
#include "attention_gradients.h"
extern "C" int64_t parts_of(int64_t others, int64_t least, int64_t most, int64_t threads) {
  return d_balanced_parts(others, least, most, threads);
}
extern "C" int64_t key_parts_of(int64_t heads, int64_t keys, int64_t threads, int64_t* step) {
  const d_key_partition<float> cut(heads, keys, threads);
  *step = cut.step();
  return cut.parts;
}
"""


@pytest.fixture(scope="module")
def compiled_parts(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    files = {"unit.cpp": PARTS, **header_texts()}
    library = tmp_path_factory.mktemp("parts") / "unit.so"
    names = ["parts_of", "key_parts_of"]
    library.write_bytes(compile_shared(find_toolchain(Config()), files, "unit.cpp", names))
    return ctypes.CDLL(str(library))


@pytest.fixture
def parts_of(compiled_parts: ctypes.CDLL) -> Callable[[int, int, int, int], int]:
    found: Callable[[int, int, int, int], int] = compiled_parts.parts_of
    return found


def longest_thread(heads: int, lengths: list[int], count: int) -> int:
    """Keys of the thread that has most of them; tasks go to the first thread that is free."""
    ends = [0] * count
    for length in lengths * heads:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@pytest.mark.parametrize("count", [1, 2, 8, 64, 128])
def test_gradients_of_attention_keep_all_threads_busy(
    compiled_parts: ctypes.CDLL, count: int
) -> None:
    """The share of the time in which threads have keys, where each head has enough of them; a head
    was one task, and 12 heads left 64 threads idle for 81% of the time."""
    step = ctypes.c_int64()
    for heads in (1, 3, 12, 24, 48, 96, 1000):
        for keys in (1, 96, 512, 4096, 20_000):
            parts = compiled_parts.key_parts_of(heads, keys, count, ctypes.byref(step))
            lengths = [min(step.value, keys - k * step.value) for k in range(parts)]
            assert min(lengths) > 0 and sum(lengths) == keys
            whole = heads * keys / (count * longest_thread(heads, [keys], count))
            busy = heads * keys / (count * longest_thread(heads, lengths, count))
            assert parts == 1 if count == 1 or whole >= 0.8 else busy >= whole
            if heads * keys >= 400 * count:
                assert busy >= 0.7


@pytest.mark.parametrize("count", [1, 2, 8, 64, 128])
def test_tasks_of_products_keep_all_threads_busy(
    parts_of: Callable[[int, int, int, int], int], count: int
) -> None:
    """The share of the time in which threads have a task, for strips of columns and parts of rows;
    24 strips on 64 threads were 72 tasks, and threads idle for 44% of the time."""
    for strips in (1, 3, 12, 24, 48, 96, 1000):
        for most in (1, 4, 16, 100):
            parts = parts_of(strips, 1, most, count)
            busy = [strips * k / (-(-strips * k // count) * count) for k in range(1, most + 1)]
            assert 1 <= parts <= most
            assert busy[parts - 1] >= min(0.8, max(busy))
            assert all(share < 0.8 for share in busy[: parts - 1])
    assert parts_of(24, 1, 18, 64) == 5
    assert [parts_of(6, 1, 18, 2), parts_of(3, 1, 18, 2), parts_of(3, 4, 18, 2)] == [1, 2, 4]
