"""Random operators: shape, dtype, seeding, distribution, and dropout's two passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch.utils.checkpoint import checkpoint

from dicp.testing import created_on

N = 20_000
SIGNIFICANCE = 1e-6  # the chance that a right generator fails one of these tests

UNIFORM: Callable[[Any], Any] = stats.uniform.cdf
NORMAL: Callable[[Any], Any] = stats.norm.cdf

CONTINUOUS = {
    "rand": (lambda x: torch.rand(x.shape, device=x.device), UNIFORM),
    "rand_like": (torch.rand_like, UNIFORM),
    "rand_double": (lambda x: torch.rand(x.shape, dtype=torch.float64, device=x.device), UNIFORM),
    "uniform": (lambda x: torch.empty_like(x).uniform_(0, 1), UNIFORM),
    "randn": (lambda x: torch.randn(x.shape, device=x.device), NORMAL),
    "randn_like": (torch.randn_like, NORMAL),
    "normal": (lambda x: torch.normal(torch.zeros_like(x), 1.0), NORMAL),
    "normal_in_place": (lambda x: torch.empty_like(x).normal_(), NORMAL),
    "exponential": (lambda x: torch.empty_like(x).exponential_(), stats.expon.cdf),
    "rand_scaled": (lambda x: (torch.rand_like(x) * 2 - 1) * 0.5 + 0.5, UNIFORM),
}

DISCRETE = {
    "bernoulli_p": (lambda x: torch.empty_like(x).bernoulli_(0.3), {0.0: 0.7, 1.0: 0.3}),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), {0.0: 0.7, 1.0: 0.3}),
    "randint": (
        lambda x: torch.randint(2, 6, x.shape, device=x.device),
        dict.fromkeys(range(2, 6), 0.25),
    ),
    "randint_like": (lambda x: torch.randint_like(x, 4), dict.fromkeys(range(4), 0.25)),
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.25), {0.0: 0.25, 4 / 3: 0.75}),
}


@pytest.fixture(autouse=True)
def on_the_device(backend: Any) -> Iterator[None]:
    """What a test makes lies on the device under test."""
    with created_on(backend.device):
        yield


def compiled(fn: Any, backend: Any, dynamic: bool) -> Any:
    return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)


def sizes(dynamic: bool) -> list[tuple[int, ...]]:
    return [(N,), (N + 17,)] if dynamic else [(N,)]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous(name: str, backend: Any, dynamic: bool) -> None:
    fn, distribution = CONTINUOUS[name]
    run = compiled(fn, backend, dynamic)
    for shape in sizes(dynamic):
        x = torch.zeros(shape)
        value, again = run(x), run(x)
        eager = fn(x)
        assert (value.shape, value.dtype) == (eager.shape, eager.dtype)
        assert not torch.equal(value, again), "two calls gave the same numbers"
        found = stats.kstest(value.double().cpu().numpy(), distribution)
        assert found.pvalue > SIGNIFICANCE, found
        assert abs(value.double().mean() - eager.double().mean()) < 0.06
        assert value.unique().numel() > 0.99 * min(N, 2**20), "too few different numbers"
        neighbours = stats.pearsonr(
            value[:-1].double().cpu().numpy(), value[1:].double().cpu().numpy()
        )
        assert neighbours.pvalue > SIGNIFICANCE, f"neighbours correlate: {neighbours}"


@pytest.mark.static_only
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_numbers_far_apart_are_independent(name: str, backend: Any, dynamic: bool) -> None:
    """No number tells the size of another one, at any distance."""
    drawn = compiled(CONTINUOUS[name][0], backend, dynamic)(torch.zeros(2**21)).double().cpu()
    centred = drawn - drawn.mean()
    sizes = centred.abs() - centred.abs().mean()
    spectrum = torch.fft.rfft(centred) * torch.fft.rfft(sizes).conj()
    deviation = centred.square().mean().sqrt() * sizes.square().mean().sqrt()
    correlations = torch.fft.irfft(spectrum) / drawn.numel() / deviation
    chance = 2 * stats.norm.sf((correlations.abs().max() * drawn.numel() ** 0.5).item())
    assert chance * drawn.numel() > SIGNIFICANCE, f"at distance {correlations.abs().argmax()}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_uniform_numbers_are_below_their_end(dtype: torch.dtype, backend: Any) -> None:
    """With more bits than the dtype holds, some would be rounded to it."""
    ranges = ((0.0, 1.0), (2.0, 3.0), (-3.0, -2.0), (-1.0, 0.0), (0.3, 0.4))

    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand_like(x), *(torch.empty_like(x).uniform_(*each) for each in ranges)]

    run = compiled(draw, backend, dynamic=False)
    drawn = run(torch.zeros(4 * N, dtype=dtype))
    for value, (low, high) in zip(drawn, (ranges[0], *ranges), strict=True):
        assert low <= value.double().min() and value.double().max() < high


def test_integers_of_a_wide_range(backend: Any) -> None:
    ends = ((-(2**63), 2**63 - 1), (-(2**62), 2**62), (0, 2**60 + 1), (-5, 2**40))

    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.randint(*each, x.shape, device=x.device) for each in ends]

    for value, (low, high) in zip(
        compiled(draw, backend, False)(torch.zeros(N)), ends, strict=True
    ):
        assert low <= value.min() and value.max() < high
        assert value.unique().numel() > 0.99 * N
        share = (value.double() - low) / (high - low)
        assert stats.kstest(share.cpu().numpy(), UNIFORM).pvalue > SIGNIFICANCE
        assert 0.45 < (value & 1).double().mean() < 0.55


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete(name: str, backend: Any, dynamic: bool) -> None:
    fn, probabilities = DISCRETE[name]
    run = compiled(fn, backend, dynamic)
    for shape in sizes(dynamic):
        x = torch.zeros(shape)
        value, again = run(x), run(x)
        eager = fn(x)
        assert (value.shape, value.dtype) == (eager.shape, eager.dtype)
        assert not torch.equal(value, again), "two calls gave the same numbers"
        counts = [
            int(
                torch.isclose(
                    value.double(), torch.tensor(float(k), dtype=torch.float64), rtol=1e-6
                ).sum()
            )
            for k in probabilities
        ]
        assert sum(counts) == value.numel(), f"values outside {sorted(probabilities)}"
        expected = [p * value.numel() for p in probabilities.values()]
        assert stats.chisquare(counts, expected).pvalue > SIGNIFICANCE, counts


def test_seed_reproduces(backend: Any, dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> Any:
        return (
            torch.rand_like(x),
            torch.randn(x.shape, device=x.device),
            F.dropout(x + 1, 0.5),
            torch.randint(9, (5,), device=x.device),
        )

    run = compiled(fn, backend, dynamic)
    x = torch.ones(64)
    torch.manual_seed(3)
    first, second = run(x), run(x)
    torch.manual_seed(3)
    again = run(x)
    torch.manual_seed(4)
    other = run(x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


def test_two_calls_in_one_graph_differ(backend: Any) -> None:
    run = compiled(
        lambda x: (torch.rand_like(x), torch.rand_like(x), F.dropout(x, 0.5), F.dropout(x, 0.5)),
        backend,
        False,
    )
    a, b, c, d = run(torch.ones(256))
    assert not torch.equal(a, b)
    assert not torch.equal(c, d)


def test_randperm(backend: Any, dynamic: bool) -> None:
    run = compiled(lambda x: torch.randperm(x.shape[0], device=x.device) + 0, backend, dynamic)
    for n in (40, 57) if dynamic else (40,):
        value, again = run(torch.zeros(n)), run(torch.zeros(n))
        assert value.dtype is torch.int64
        assert torch.equal(value.sort()[0], torch.arange(n))
        assert not torch.equal(value, again)


def test_multinomial(backend: Any) -> None:
    run = compiled(lambda p: torch.multinomial(p, N, replacement=True), backend, False)
    counts = torch.bincount(run(torch.tensor([0.1, 0.2, 0.7])), minlength=3)
    assert stats.chisquare(counts.cpu().numpy(), [0.1 * N, 0.2 * N, 0.7 * N]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_scale_and_backward_mask(dtype: torch.dtype, backend: Any, dynamic: bool) -> None:
    run = compiled(lambda x: F.dropout(x * 2, 0.25) * 3, backend, dynamic)
    for n in (1000, 1234) if dynamic else (1000,):
        x = torch.ones(n, dtype=dtype, requires_grad=True)
        y = run(x)
        y.sum().backward()
        kept = y != 0
        assert 0.6 < kept.double().mean() < 0.9
        assert torch.allclose(y[kept].double(), torch.tensor(8.0).double(), rtol=1e-2)
        assert x.grad is not None
        assert torch.allclose(x.grad, y.detach(), rtol=1e-2), "the backward pass drew another mask"


def test_checkpoint_draws_the_same_numbers_again(backend: Any, dynamic: bool) -> None:
    """Backward runs the checkpoint again: with the mask of dropout, and the noise, of forward."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5).exp() * torch.rand_like(x)

    run = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False), backend=backend, dynamic=dynamic
    )
    for n in (1000, 1234) if dynamic else (1000,):
        x = torch.full((n,), 0.5, requires_grad=True)
        y = run(x)
        y.sum().backward()
        ratio = y.detach() / x.grad  # type: ignore[operator]
        slope = torch.tensor(2 * math.cos(0.5))
        assert torch.allclose(ratio[ratio.isfinite()], 1 / slope, rtol=1e-4)
        assert 0.3 < ratio.isfinite().double().mean() < 0.7


def test_dropout_off_in_eval(backend: Any) -> None:
    module = torch.nn.Dropout(0.5).eval()
    x = torch.randn(64)
    assert torch.compile(module, backend=backend)(x) is x
    assert compiled(lambda t: F.dropout(t, 0.0), backend, False)(x) is x
    assert compiled(lambda t: torch.dropout(t, 0.0, True), backend, False)(x) is x
    with pytest.raises(Exception, match="between 0 and 1"):
        compiled(lambda t: F.dropout(t, 2.0, training=False), backend, False)(x)
    assert not compiled(lambda t: F.dropout(t, 1.0), backend, False)(x).any()


@pytest.mark.parametrize(
    "fn", [F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d], ids=lambda fn: fn.__name__
)
def test_dropout_kinds(fn: Any, backend: Any) -> None:
    x = torch.ones(8, 16, 5, 5)
    value = compiled(lambda t: fn(t, 0.5, training=True), backend, False)(x)
    assert value.shape == x.shape
    assert value.unique().numel() == 2
    if fn is F.dropout2d:
        assert (value.flatten(2) == value.flatten(2)[..., :1]).all(), "a channel drops as a whole"


def test_rrelu_and_gumbel(backend: Any) -> None:
    x = torch.full((4000,), -1.0)
    value = compiled(lambda t: F.rrelu(t, 0.1, 0.3, training=True), backend, False)(x)
    assert -0.31 < value.min() < -0.28 and -0.12 < value.max() < -0.09
    soft = compiled(lambda t: F.gumbel_softmax(t, hard=True), backend, False)(torch.zeros(500, 4))
    assert torch.equal(soft.sum(1), torch.ones(500))
