"""What lies around an image is no number: infinite and NaN filters and gradients do not meet it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_routines import PastBlas, leaf
from torch import Tensor, fx

from dicp.compare import assert_matches
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("shared_builds")]

CASES = [
    ((2, 3, 9, 11), (5, 3, 3, 3), {"padding": 1}),
    ((1, 60, 6, 6), (52, 60, 3, 3), {"padding": 1}),
    ((1, 64, 31, 20), (44, 64, 3, 3), {"padding": 1}),
    ((2, 5, 30, 7), (13, 5, 5, 3), {"padding": (2, 1), "dilation": (2, 1)}),
    ((3, 16, 9, 8), (40, 16, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 32, 6, 7), (32, 16, 3, 3), {"padding": 1, "groups": 2}),
    ((2, 3, 40), (70, 3, 9), {"padding": 3}),
    ((2, 3, 40), (70, 3, 9), {"padding": 4}),
    ((2, 64, 30), (64, 64, 9), {"padding": 2, "stride": 2}),
    ((2, 17, 12, 14), (33, 17, 1, 5), {"padding": 1}),
    ((2, 3, 17, 15), (40, 3, 2, 3), {"padding": 4, "dilation": 2}),
]
"""Of images, filters, and options: those that eager computes by oneDNN, and from patches."""


def _results(fn: Callable[..., Tensor], reached: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The result and both gradients where `reached` is that of the result."""
    result = fn(*inputs)
    return [result.detach(), *torch.autograd.grad(result, inputs, reached.to(result.dtype))]


def results_match(
    tmp_path: Path, fn: Callable[..., Tensor], x: Tensor, w: Tensor, where: str, odd: float
) -> list[str]:
    """The steps of the compiled `fn`, which is as good as eager with an odd number in a corner."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, inputs, target, Config(cache_dir=tmp_path), lambda report: None)

    target, reached = PastBlas(), torch.randn(fn(x, w).shape)
    with torch.no_grad():
        operand = {"images": x, "filters": w, "gradient": reached}[where]
        operand[(0,) * operand.ndim] = odd
    torch._dynamo.reset()
    got = _results(torch.compile(fn, backend=backend), reached, x, w)
    eager = _results(fn, reached, x, w)
    wide = _results(fn, reached, *(t.detach().double().requires_grad_() for t in (x, w)))
    for name, *values in zip(("output", "images", "filters"), got, eager, wide, strict=True):
        assert_matches(*values, name=name)
    return target.steps


@pytest.mark.parametrize(("image", "filters", "options"), CASES, ids=str)
@pytest.mark.parametrize("where", ["images", "filters", "gradient"])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan], ids=["infinity", "nan"])
def test_odd_numbers_stay_off_the_padding(
    tmp_path: Path, image: tuple[int, ...], filters: tuple[int, ...], options: dict[str, Any],
    where: str, odd: float,
) -> None:  # fmt: skip
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return (F.conv2d if x.ndim == 4 else F.conv1d)(x, w, **options)

    steps = results_match(tmp_path, convolve, leaf(*image), leaf(*filters), where, odd)
    assert any(step.startswith(("dicp_convolution", "dicp_im2col")) for step in steps)


TAPS_ON_PADDING: list[tuple[Any, ...]] = [
    ((2, 3, 5, 1), (3, 3, 3, 3), F.conv2d, {"padding": 1, "stride": 2}),
    ((1, 2, 3, 2), (8, 2, 1, 3), F.conv2d, {"padding": (0, 2), "stride": (1, 3)}),
    ((4, 3, 8, 1), (1, 3, 5, 5), F.conv2d, {"padding": 2, "stride": (2, 3)}),
    ((2, 3, 3, 1), (3, 3, 3, 3), F.conv_transpose2d, {"padding": 1, "stride": 2}),
]


def no_address(value: object) -> str:
    """Ids of tests are the same in every process."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("image", "filters", "fn", "options"), TAPS_ON_PADDING, ids=no_address)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
def test_gradients_of_taps_that_see_only_padding(
    image: tuple[int, ...], filters: tuple[int, ...], fn: Any, options: Any, symbolic: bool
) -> None:
    """They are 0: the library leaves what lay in memory there, in bfloat16 and with a stride."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = (
        torch.randn(shape, dtype=torch.bfloat16)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
        for shape in (image, filters)
    )
    run = torch.compile(
        lambda a, b: fn(a, b, **options), backend="cpugraph", fullgraph=True, dynamic=symbolic
    )
    result = run(x, w)
    reached = torch.randn(result.shape, dtype=torch.bfloat16)
    wide = [v.detach().double().requires_grad_() for v in (x, w)]
    exact = torch.autograd.grad(fn(*wide, **options), wide, reached.double())
    for dtype in (torch.bfloat16, torch.float32):  # of sizes that the next allocations reuse
        odd = [torch.full((n,), torch.nan, dtype=dtype) for n in (w.numel(), 2 * w.numel())] * 8
        del odd
    for got, real in zip(torch.autograd.grad(result, (x, w), reached), exact, strict=True):
        assert_matches(got, real.bfloat16(), real)
