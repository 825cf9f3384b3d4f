"""Convolutions of filters that see one channel each, and their gradients, channels last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_convolution_padding import results_match
from test_routines import by_dtype, check, leaf, named
from torch import Tensor

pytestmark = pytest.mark.sweep

CHANNELS_LAST = torch.channels_last

CASES = {
    "three taps": ((2, 24, 7, 9), (3, 3), {"padding": 1}),
    "five taps": ((1, 40, 8, 17), (5, 5), {"padding": 2}),
    "seven taps": ((3, 16, 5, 12), (7, 7), {"padding": 3}),
    "few pixels": ((2, 33, 4, 4), (5, 5), {"padding": 2}),
    "one pixel": ((4, 16, 1, 1), (3, 3), {"padding": 1}),
    "one row": ((1, 21, 1, 30), (1, 7), {"padding": (0, 3)}),
    "a step": ((2, 18, 13, 12), (3, 3), {"stride": 2, "padding": 1}),
    "a step from the corner": ((2, 16, 12, 13), (5, 5), {"stride": 2}),
    "a long step": ((1, 20, 11, 15), (7, 7), {"stride": 2, "padding": 3}),
    "one axis at a step": ((2, 17, 14, 9), (5, 3), {"stride": (3, 1), "padding": (1, 0)}),
    "the other axis at a step": ((2, 17, 9, 14), (3, 5), {"stride": (1, 2), "padding": (1, 2)}),
    "steps past taps": ((1, 16, 20, 9), (1, 3), {"stride": (4, 2)}),
    "dilation down": ((1, 24, 12, 11), (3, 3), {"padding": (2, 1), "dilation": (2, 1)}),
    "other axes": ((2, 25, 10, 9), (4, 7), {"padding": (2, 3)}),
}
"""Images, taps and options of what the kernels make."""

OTHERS = {
    "four taps": ((2, 16, 9, 11), (5, 4), {"padding": 2}),
    "nine taps": ((1, 21, 20, 17), (3, 9), {"stride": 2, "padding": (1, 0)}),
    "dilation": ((2, 33, 12, 3), (1, 3), {"padding": (0, 4), "dilation": 2}),
    "long steps": ((2, 18, 4, 14), (5, 5), {"stride": (2, 3), "padding": 4}),
}
"""What the library makes but for the gradient of filters."""


def convolved(image: tuple[int, ...], options: dict[str, Any]) -> Any:
    def convolve(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = F.conv2d(x, w, b, groups=image[1], **options)
        return y.contiguous(memory_format=CHANNELS_LAST)

    return convolve


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(memory_format=CHANNELS_LAST).requires_grad_()


@by_dtype
@pytest.mark.parametrize("what", CASES)
def test_depthwise(tmp_path: Path, what: str, dtype: torch.dtype) -> None:
    image, taps, options = CASES[what]
    x, w = channels_last(*image, dtype=dtype), leaf(image[1], 1, *taps, dtype=dtype)
    for bias, tag in ((leaf(image[1], dtype=dtype), "_biased"), (None, "")):
        steps = check(tmp_path, convolved(image, options), x, w, bias)
        for name in (f"{taps[1]}{tag}", f"images_{taps[1]}", f"filters_{taps[1]}"):
            assert steps.count(named(f"dicp_depthwise_{name}", dtype)) == 1, steps
        assert not any("aten::convolution" in step for step in steps), steps


@by_dtype
def test_depthwise_of_any_size(tmp_path: Path, dtype: torch.dtype) -> None:
    convolve = convolved((2, 24), {"padding": 2, "stride": 2})
    x, w = channels_last(2, 24, 13, 12, dtype=dtype), leaf(24, 1, 5, 5, dtype=dtype)
    check(tmp_path, convolve, x, torch.nn.Parameter(w), dynamic=True)


@by_dtype
@pytest.mark.parametrize("what", OTHERS)
def test_filters_of_other_sizes(tmp_path: Path, what: str, dtype: torch.dtype) -> None:
    image, taps, options = OTHERS[what]
    x, w = channels_last(*image, dtype=dtype), leaf(image[1], 1, *taps, dtype=dtype)
    steps = check(tmp_path, convolved(image, options), x, w)
    assert [s for s in steps if "dicp_depthwise" in s] == [named("dicp_depthwise_filters", dtype)]


def test_many_rows(tmp_path: Path) -> None:
    """Sums over more pixels than are summed at a time, by all threads."""
    for taps, stride in ((3, 2), (5, 1)):
        image = (3, 34, 50, 70)
        convolve = convolved(image, {"padding": taps // 2, "stride": stride})
        steps = check(tmp_path, convolve, channels_last(*image), leaf(34, 1, taps, taps))
        assert f"dicp_depthwise_filters_{taps}" in steps


@pytest.mark.parametrize("what", ["three taps", "five taps", "a step"])
@pytest.mark.parametrize("where", ["images", "filters", "gradient"])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan], ids=["infinity", "nan"])
def test_odd_numbers_stay_off_the_padding(
    tmp_path: Path, what: str, where: str, odd: float
) -> None:
    image, taps, options = CASES[what]
    x, w = channels_last(*image), leaf(image[1], 1, *taps)
    steps = results_match(tmp_path, convolved(image, options), x, w, where, odd)
    assert sum(step.startswith("dicp_depthwise") for step in steps) == 3


@pytest.mark.parametrize("where", ["images", "gradient"])
def test_more_padding_than_taps(tmp_path: Path, where: str) -> None:
    convolve = convolved((2, 19), {"padding": 5})
    x, w = channels_last(2, 19, 5, 6), leaf(19, 1, 3, 3)
    steps = results_match(tmp_path, convolve, x, w, where, torch.nan)
    found = [step for step in steps if step.startswith("dicp_depthwise")]
    assert found == ["dicp_depthwise_3", "dicp_depthwise_images_3"]


def test_the_library_makes_large_images_in_halves(tmp_path: Path) -> None:
    """But for gradients at a stride, which it makes slowly."""
    half = torch.bfloat16
    image, w = (2, 64, 68, 68), leaf(64, 1, 3, 3, dtype=half)
    for stride, kernels in ((1, ["filters_3"]), (2, ["3", "images_3", "filters_3"])):
        convolve = convolved(image, {"padding": 1, "stride": stride})
        steps = check(tmp_path, convolve, channels_last(*image, dtype=half), w)
        found = [step for step in steps if "dicp_depthwise" in step]
        assert found == [f"dicp_depthwise_{kernel}_bf16" for kernel in kernels]


@by_dtype
@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (5, 1), (4, 2), (9, 1)], ids=str)
def test_images_in_rows(tmp_path: Path, size: int, stride: int, dtype: torch.dtype) -> None:
    """The library makes slowly gradients of bfloat16, in whatever layout: not in bfloat16."""

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=stride, padding=size // 2, groups=24)

    w = torch.nn.Parameter(leaf(24, 1, size, size, dtype=dtype))
    check(tmp_path, convolve, leaf(2, 24, 13, 12, dtype=dtype), w)
