"""Convolutions of small images and gradients at strides, computed by im2col."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_convolution_padding import results_match
from test_routines import check, leaf
from torch import Tensor

from dicp.config import Config

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("shared_builds")]

CASES = {
    "rows of seven": ((3, 20, 7, 7), (70, 20, 3, 3), {"padding": 1}),
    "one image": ((1, 90, 6, 5), (44, 90, 3, 3), {"padding": 1}),
    "few pixels": ((5, 33, 3, 3), (50, 33, 2, 2), {}),
    "one pixel": ((4, 130, 4, 4), (96, 130, 1, 1), {}),
    "one pixel at a step": ((2, 40, 9, 8), (64, 40, 1, 1), {"stride": 2}),
    "a step": ((2, 40, 13, 12), (33, 40, 3, 3), {"stride": 2, "padding": 1}),
    "longer steps": ((2, 18, 17, 16), (40, 18, 5, 5), {"stride": (3, 2), "padding": (2, 1)}),
    "one axis at a step": ((2, 18, 9, 16), (40, 18, 5, 3), {"stride": (1, 2), "padding": (2, 1)}),
    "steps past taps": ((2, 17, 12, 13), (34, 17, 2, 2), {"stride": 3, "padding": 1}),
    "dilation": ((2, 35, 14, 10), (40, 35, 3, 3), {"padding": 2, "dilation": 2}),
    "groups": ((2, 96, 9, 8), (66, 48, 3, 3), {"padding": 1, "groups": 2}),
    "more groups at a step": ((2, 60, 9, 8), (96, 20, 3, 3), {"stride": 2, "groups": 3}),
    "more taps than lanes": ((2, 16, 12, 9), (32, 16, 5, 5), {"padding": 2}),
    "rows": ((2, 48, 90), (64, 48, 3), {"stride": 2}),
    "many taps": ((1, 64, 49), (64, 16, 128), {"padding": 64, "groups": 4}),
    "patches in parts": ((1, 4, 50), (36, 4, 600), {"padding": 300}),
    "more columns than a strip": ((9, 32, 11, 13), (37, 32, 3, 3), {"padding": 1}),
}
"""Images, filters and options of what is made from patches, forward or backward."""


def convolved(options: dict[str, Any]) -> Any:
    def convolve(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return (F.conv2d if x.ndim == 4 else F.conv1d)(x, w, b, **options)

    return convolve


@pytest.mark.parametrize("what", CASES)
def test_im2col(tmp_path: Path, what: str) -> None:
    image, filters, options = CASES[what]
    for bias in (leaf(filters[0]), None):
        steps = check(tmp_path, convolved(options), leaf(*image), leaf(*filters), bias)
        assert any(step.startswith("dicp_im2col") for step in steps), steps
        assert not any("aten::convolution" in step for step in steps), steps


@pytest.mark.parametrize("what", ["rows of seven", "a step", "groups", "longer steps"])
@pytest.mark.parametrize("where", ["images", "filters", "gradient"])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan], ids=["infinity", "nan"])
def test_odd_numbers_stay_off_the_padding(
    tmp_path: Path, what: str, where: str, odd: float
) -> None:
    image, filters, options = CASES[what]
    steps = results_match(tmp_path, convolved(options), leaf(*image), leaf(*filters), where, odd)
    assert "dicp_im2col" in steps


@pytest.mark.parametrize("what", ["rows of seven", "one pixel", "a step", "many taps"])
@pytest.mark.parametrize("lesser", ["-mno-avx512f", "-mno-avx"])
def test_without_the_widest_vectors(tmp_path: Path, what: str, lesser: str) -> None:
    image, filters, options = CASES[what]
    flags = Config(cache_dir=tmp_path, cxx_flags=(lesser,))
    steps = check(tmp_path, convolved(options), leaf(*image), leaf(*filters), config=flags)
    assert any(step.startswith("dicp_im2col") for step in steps), steps


def test_rows_of_channels(tmp_path: Path) -> None:
    """As between layers of a transformer."""
    x, w = leaf(2, 49, 64), leaf(64, 16, 9)

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(x.transpose(1, 2), w, padding=4, groups=4).transpose(1, 2)

    steps = check(tmp_path, convolve, x, w)
    assert "dicp_im2col_images" in steps
    assert "dicp_im2col_filters" in steps


def test_gradients_of_filters_that_are_larger_than_channels_last_images(tmp_path: Path) -> None:
    """Depthwise convolutions make the whole graph channels-last."""
    x, each, w = leaf(2, 64, 4, 5), leaf(64, 1, 3, 3), leaf(48, 64, 3, 3)

    def convolve(x: Tensor, each: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, each, padding=1, groups=64), w, padding=2, dilation=2)

    assert "dicp_im2col_filters" in check(tmp_path, convolve, x, each, w)


def test_large_and_wide_ones_go_elsewhere(tmp_path: Path) -> None:
    wide = check(tmp_path, F.conv2d, torch.randn(2, 40, 9, 40), torch.randn(40, 40, 3, 3))
    assert wide == ["dicp_convolution"]
    few = check(tmp_path, F.conv2d, torch.randn(2, 40, 9, 9), torch.randn(20, 40, 3, 3))
    assert few == ["dicp_convolution"], "filters that read a patch"
    double = [torch.randn(2, 40, 9, 9).double(), torch.randn(40, 40, 3, 3).double()]
    assert not any("dicp" in step for step in check(tmp_path, F.conv2d, *double))
