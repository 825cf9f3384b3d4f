"""Operator cases through Triton's interpreter, and every kernel they give built for two chips.

A choice of cases that meets every form of kernel; `test/triton_scripts` runs all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chosen import cases_named

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import IndexOutOfBoundsError
from dicp.testing import BackendUnderTest
from dicp.vendor.triton import aot
from dicp.vendor.triton.builder import Builder, Workers

pytestmark = pytest.mark.sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "op"))

CHOSEN = {
    "test_pointwise": (
        "add",
        "div",
        "where",
        "gelu",
        "pow_tensor",
        "pow_ints",
        "floor_divide",
        "bitwise_not",
        "sign",
    ),
    "test_reduction": (
        "sum",
        "sum_dims",
        "sum_long",
        "argmax",
        "amax_amin",
        "prod",
        "any_all",
        "var",
        "softmax",
        "log_softmax",
    ),
    "test_normalization": ("layer_norm", "batch_norm_training", "rms_norm"),
    "test_scan": ("cumsum", "cumprod"),
    "test_shape": ("cat", "constant_pad", "flip", "roll", "permute", "im2col"),
    "test_indexing": (
        "gather",
        "index_add",
        "scatter_add",
        "index_put",
        "index",
        "scatter_reduce_amax",
        "scatter_reduce_amin",
        "scatter_reduce_prod",
        "index_reduce_prod",
    ),
    "test_embedding": ("embedding",),
    "test_loss": ("cross_entropy",),
    "test_pooling": ("max_pool2d", "avg_pool2d"),
    "test_upsample": ("bilinear",),
}
"""Names of cases by the file they stand in."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of this file's tests."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def interpreted(kept: Path) -> Iterator[BackendUnderTest]:
    backend = BackendUnderTest("tritongraph")
    backend.inner = Backend("triton", cache_dir=kept)
    yield backend


@pytest.mark.parametrize("case", cases_named(CHOSEN), ids=lambda case: case.name)
def test_operator(case: Any, interpreted: BackendUnderTest) -> None:
    case.check(interpreted, dynamic=False)


DYNAMIC = ("add", "sum_dims", "softmax", "cumsum", "constant_pad", "scatter_add", "embedding")


@pytest.mark.parametrize(
    "case", [c for c in cases_named(CHOSEN) if c.name in DYNAMIC], ids=lambda case: case.name
)
def test_operator_of_any_size(case: Any, interpreted: BackendUnderTest) -> None:
    case.check(interpreted, dynamic=True)


def draws(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.nn.functional.dropout(x, 0.3), torch.rand_like(x), torch.randn_like(x),
        torch.rand_like(x.double()), torch.randint(0, 1000, (64,)),
    )  # fmt: skip


def test_random_numbers_are_those_of_the_host(kept: Path) -> None:
    x = torch.ones(33, 7)
    found = []
    for target in ("cpu", "triton"):
        compiled = torch.compile(draws, backend=Backend(target, cache_dir=kept))
        torch.manual_seed(11)
        found.append(compiled(x))
        torch._dynamo.reset()
    for host, device in zip(*found, strict=True):
        torch.testing.assert_close(host, device, rtol=1e-5, atol=1e-6)


def test_an_index_out_of_range_names_operator_and_line(kept: Path) -> None:
    compiled = torch.compile(lambda x, i: x[i] + 1, backend=Backend("triton", cache_dir=kept))
    with pytest.raises(IndexOutOfBoundsError, match=r"index.*test_triton_ops\.py:\d+"):
        compiled(torch.ones(4), torch.tensor([1, 4]))


BUILT = ("where", "gelu", "pow_tensor", "pow_ints", "sum_dims", "sum_long", "argmax", "prod",
         "softmax", "layer_norm",
         "cumsum", "constant_pad", "permute", "scatter_add", "scatter_reduce_amax",
         "scatter_reduce_amin", "scatter_reduce_prod", "embedding", "max_pool2d")  # fmt: skip


@pytest.mark.parametrize("part", range(6))
def test_every_kernel_is_built_for_two_chips(part: int, tmp_path: Path) -> None:
    """In the compiler's processes: this one interprets."""
    backend = BackendUnderTest("tritongraph")
    backend.inner = Backend("triton", cache_dir=tmp_path)
    for case in cases_named(CHOSEN):
        if case.name in BUILT[part::6]:
            case.check(backend, dynamic=case.name == "softmax")
    config = Config(cache_dir=tmp_path)
    cache, workers = Cache.open(config), Workers()
    jobs = aot.jobs_of(aot.stored_programs(cache), aot.ARCHITECTURES)
    jobs += [replace(j, variant=replace(j.variant, wide=True)) for j in jobs[::4]]
    try:
        failures = aot.build_all(jobs, Builder(cache, workers, config.jobs))
    finally:
        workers.close()
    assert {job.variant.arch for job in jobs} == set(aot.ARCHITECTURES) and len(jobs) > 10
    assert not failures, "\n".join(map(str, failures[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["amax", "amin"])
def test_colliding_extrema_of_floats(how: str, dtype: torch.dtype, kept: Path) -> None:
    values = torch.tensor([-3.0, -1.5, 0.0, 2.0, 7.5, float("inf"), -float("inf"), float("nan")])
    values = torch.cat((values, -values, torch.randn(48))).to(dtype)
    index = torch.arange(64) % 6

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, i, s, how)

    backend = Backend("triton", cache_dir=kept)
    start = torch.tensor([-1.0, 1.0, -0.5, 0.0, float("nan"), 3.0, -2.0]).to(dtype)
    got = torch.compile(fn, backend=backend)(start, index, values)
    torch.testing.assert_close(got, fn(start, index, values), rtol=0, atol=0, equal_nan=True)
    assert not any(n.decision == "eager" for n in backend.reports[-1].nodes)


def test_colliding_sums_of_half_precision_are_rounded_once(kept: Path) -> None:
    source = torch.rand(400, 8).bfloat16()
    index = torch.arange(400) % 3
    backend = Backend("triton", cache_dir=kept)
    start = torch.ones(3, 8).bfloat16()
    got = torch.compile(lambda x, i, s: x.index_add(0, i, s), backend=backend)(start, index, source)
    exact = start.double().index_add(0, index, source.double())
    assert torch.equal(got, exact.bfloat16())
    assert not any(n.decision == "eager" for n in backend.reports[-1].nodes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("how", ["sum", "prod", "amax", "amin"])
def test_colliding_short_integers_wrap_around(how: str, dtype: torch.dtype, kept: Path) -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, i, s, how)

    values = torch.randint(-3, 100, (300,)).to(dtype)
    inputs = torch.full((9,), 3).to(dtype), torch.arange(300) % 8, values
    backend = Backend("triton", cache_dir=kept)
    assert torch.equal(torch.compile(fn, backend=backend)(*inputs), fn(*inputs))
    assert not any(n.decision == "eager" for n in backend.reports[-1].nodes)


def test_colliding_products_keep_what_is_not_a_number_and_signs(kept: Path) -> None:
    values = torch.tensor([-0.0, float("nan"), float("inf"), -2.0, 0.5, 3.0])
    start, index = torch.tensor([1.0, 2.0, -1.0, -4.0, 7.0]), torch.tensor([0, 1, 2, 3, 3, 3])

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, i, s, "prod")

    backend = Backend("triton", cache_dir=kept)
    got, expected = (
        torch.compile(fn, backend=backend)(start, index, values),
        fn(start, index, values),
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit(), expected.signbit())
    assert not any(n.decision == "eager" for n in backend.reports[-1].nodes)


@pytest.mark.parametrize("how", ["sum", "prod"])
def test_collisions_in_a_fixed_order_are_left_to_eager_with_the_reason(
    how: str, kept: Path
) -> None:
    backend = Backend("triton", cache_dir=kept)
    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(lambda x, i, s: x.scatter_reduce(0, i, s, how), backend=backend)
        run(torch.ones(3), torch.tensor([0, 0, 1]), torch.ones(3))
    finally:
        torch.use_deterministic_algorithms(False)
    reasons = [n.reason for n in backend.reports[-1].nodes if n.decision == "eager"]
    assert len(reasons) == 1 and "deterministic" in reasons[0]


def test_sums_over_a_batch_of_any_size_are_split_along_what_is_known(kept: Path) -> None:
    backend = Backend("triton", cache_dir=kept)
    run = torch.compile(lambda x: x.sum((0, 2, 3)), backend=backend)
    for batch in (300, 30):
        x = torch.randn(batch, 8, 16, 12)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), x.sum((0, 2, 3)), rtol=1e-4, atol=1e-3)
    (report,) = backend.reports
    assert len(report.kernels) == 2


OF_ANY_LENGTH = {
    "sum": (lambda x: x.sum(), (300, 400)),
    "minimum of integers": (lambda x: (x * 100).to(torch.int32).amin(), (300, 400)),
    "any": (lambda x: (x > 3).any(0), (20000, 5)),
    "all": (lambda x: (x < 3).all(), (300, 400)),
    "columns": (lambda x: x.sum(0), (3000, 70)),
    "product": (lambda x: (1 + x * 1e-3).prod(), (300, 400)),
    "mean": (lambda x: x.bfloat16().mean(), (300, 400)),
}


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_sweeps_of_any_length_are_split(name: str, kept: Path) -> None:
    """However long a row then is: shorter than the parts are many, or longer than at first."""
    fn, shape = OF_ANY_LENGTH[name]
    backend = Backend("triton", cache_dir=kept)
    run = torch.compile(fn, backend=backend, dynamic=True)
    for now in (shape, (7, 5), (2, 9), (shape[0] + 37, shape[1] + 3)):
        x = torch.randn(now)
        torch.testing.assert_close(run(x), fn(x), rtol=2e-3, atol=1e-2)
    (report,) = backend.reports
    assert len(report.kernels) == 2


def test_short_sweeps_of_any_length_stay_whole(kept: Path) -> None:
    backend = Backend("triton", cache_dir=kept)
    run = torch.compile(lambda x: x.sum(), backend=backend, dynamic=True)
    for size in (30, 3000):
        x = torch.randn(size)
        torch.testing.assert_close(run(x), x.sum(), rtol=1e-4, atol=1e-4)
    assert len(backend.reports[-1].kernels) == 1
