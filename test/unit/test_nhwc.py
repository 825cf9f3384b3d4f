"""Convolutions of channels-last bfloat16 images whose filters are large beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_im2col import convolved
from test_routines import check, leaf
from torch import Tensor

from dicp import Backend
from dicp.config import Config
from dicp.vendor.cpu.routines import choice
from dicp.vendor.cpu.toolchain import has_feature

pytestmark = [
    pytest.mark.skipif(
        not has_feature("avx512_bf16"), reason="the processor does not multiply pairs of bfloat16"
    ),
    pytest.mark.usefixtures("shared_builds"),
]
HALF = torch.bfloat16
CASES = {
    "whole vectors": ((1, 64, 6, 6), (32, 64, 3, 3), {"padding": 1}),
    "channels in parts": ((2, 256, 5, 4), (70, 256, 3, 3), {"padding": 1}),
    "an odd channel": ((1, 117, 3, 4), (33, 117, 3, 3), {"padding": 1}),
    "more filters than a strip": ((1, 48, 4, 4), (300, 48, 3, 3), {"padding": (1, 0)}),
    "more pixels than a block": ((2, 900, 7, 7), (5, 900, 3, 3), {"padding": 1}),
    "a step": ((2, 130, 8, 9), (40, 130, 3, 3), {"padding": 1, "stride": 2}),
    "more taps than lanes": ((2, 20, 5, 6), (36, 20, 5, 5), {"padding": 2, "stride": (2, 3)}),
    "taps at different steps": (
        (1, 36, 7, 7),
        (16, 36, 7, 3),
        {"padding": (6, 1), "dilation": (2, 1)},
    ),
    "one pixel": ((1, 24, 3, 3), (20, 24, 3, 3), {}),
    "an image of one pixel": ((3, 27, 1, 1), (20, 27, 3, 3), {"padding": 1}),
}
"""Images, filters and options."""


def images(*shape: int) -> Tensor:
    made = torch.randn(shape).to(HALF).contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


@pytest.mark.sweep
@pytest.mark.parametrize("what", CASES)
def test_results_and_gradients(tmp_path: Path, what: str) -> None:
    image, filters, options = CASES[what]
    for bias in (leaf(filters[0], dtype=HALF), None):
        given = images(*image), leaf(*filters, dtype=HALF), bias
        steps = check(tmp_path, convolved(options), *given)
        assert any(step.startswith("dicp_nhwc") for step in steps), steps


@pytest.mark.sweep
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("where", [0, 1], ids=["images", "filters"])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan], ids=["infinity", "nan"])
@torch.no_grad()
def test_odd_numbers_stay_off_the_padding(
    tmp_path: Path, what: str, where: int, odd: float
) -> None:
    image, filters, options = CASES[what]
    given = images(*image), leaf(*filters, dtype=HALF)
    given[where][0, 0, 0, 0] = odd
    torch._dynamo.reset()
    fn = convolved(options)
    got = torch.compile(fn, backend=Backend("cpu", cache_dir=tmp_path))(*given)
    torch.testing.assert_close(got, fn(*given), equal_nan=True)


GRADIENTS = CASES | {
    "channels that fill panels": ((2, 64, 9, 7), (45, 64, 3, 3), {"padding": 1}),
    "pixels in parts": ((3, 32, 21, 20), (40, 32, 3, 3), {"padding": 1}),
    "an odd number of pixels": ((1, 40, 7, 9), (33, 40, 3, 3), {"padding": (0, 1)}),
    "strided pixels": ((2, 48, 9, 9), (70, 48, 1, 1), {"stride": 2}),
    "padding that no tap skips": ((1, 32, 5, 5), (32, 32, 2, 2), {"padding": 2}),
    "more steps than taps": ((2, 34, 8, 11), (17, 34, 2, 3), {"stride": (3, 4), "padding": 1}),
    "rows at the end that no tap reaches": ((1, 32, 10, 9), (48, 32, 3, 3), {"stride": (4, 2)}),
    "a step along one axis": (
        (2, 32, 6, 7),
        (40, 32, 3, 3),
        {"stride": (1, 2), "padding": (0, 2)},
    ),
}


def gradients(what: str) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[str]]:
    """Both gradients of a convolution, their arguments, and the routines that compute them."""
    image, filters, options = GRADIENTS[what]
    stride, padding, dilation = (
        torch.nn.modules.utils._pair(options.get(name, default))
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    x = images(*image).detach()
    w = torch.randn(filters).to(HALF).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(x, w, None, stride, padding, dilation)

    def compute(grad: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        found = torch.ops.aten.convolution_backward(
            grad, x, w, None, stride, padding, dilation, False, (0, 0), 1, (True, True, False)
        )
        return list(found[:2])

    reach = [d * (taps - 1) for d, taps in zip(dilation, filters[2:], strict=True)]
    whole = all(p <= r for p, r in zip(padding, reach, strict=True))
    single = image[2:] == (1, 1)  # row-major, too
    name = "dicp_nhwc_bf16" if stride == (1, 1) else "dicp_nhwc_strided_bf16"
    routines = [name] * whole + ["dicp_nhwc_filters_bf16"]
    return compute, [torch.randn(out.shape).to(out), x, w], [] if single else routines


@pytest.fixture
def by_nhwc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels compute gradients of any size."""
    for name in ("IMAGES_PIXELS", "STRIDED_PIXELS", "FILTERS_PIXELS", "TILE_PIXELS"):
        monkeypatch.setattr(choice, f"NHWC_{name}", 1 << 40)


@pytest.mark.sweep
@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients(tmp_path: Path, by_nhwc: None, what: str) -> None:
    compute, given, routines = gradients(what)
    steps = check(tmp_path, lambda *xs: torch.cat([g.flatten() for g in compute(*xs)]), *given)
    assert [step for step in steps if step.startswith("dicp_nhwc")] == routines, steps


@pytest.mark.parametrize(
    "what", ["an odd channel", "a step", "more taps than lanes", "channels that fill panels"]
)
def test_odd_numbers_of_gradients_stay_off_the_padding(
    tmp_path: Path, by_nhwc: None, what: str
) -> None:
    """oneDNN multiplies padding at the left and right of a gradient by zeros: that may be NaN."""
    compute, given, _ = gradients(what)
    torch._dynamo.reset()
    compiled = torch.compile(compute, backend=Backend("cpu", cache_dir=tmp_path))
    for tensor in given:
        tensor[0, 0, 0, 0] = 0
        without = compute(*given)
        for odd in (torch.inf, torch.nan):
            tensor[0, 0, 0, 0] = odd
            pairs = zip(compiled(*given), compute(*given), without, strict=True)
            for results in pairs:
                assert_odd_numbers_stay(*results)
        tensor[0, 0, 0, 0] = 1


def assert_odd_numbers_stay(mine: Tensor, eager: Tensor, clean: Tensor) -> None:
    """`mine` is eager's result, or that without the odd number where only eager's is NaN."""
    finite = torch.where(eager.isnan(), clean, eager)
    expected = torch.where(mine.isnan(), eager, finite)
    torch.testing.assert_close(mine, expected, equal_nan=True, atol=0.1, rtol=0.02)


@pytest.mark.parametrize(
    ("pixels", "stride", "tiles", "routines"),
    [
        (5, 1, False, ["dicp_nhwc_bf16", "dicp_nhwc_filters_bf16"]),
        (8, 1, False, ["dicp_nhwc_filters_bf16"]),
        (8, 1, True, ["dicp_nhwc_bf16", "dicp_nhwc_filters_bf16"]),
        (20, 1, False, []),
        (60, 1, True, ["dicp_nhwc_bf16"]),  # read in place
        (20, 2, True, ["dicp_nhwc_strided_bf16", "dicp_nhwc_filters_bf16"]),
        (30, 2, False, ["dicp_nhwc_strided_bf16"]),
        (34, 2, False, []),
        (34, 2, True, ["dicp_nhwc_strided_bf16"]),
        (46, 2, True, []),
    ],
)
def test_gradients_of_many_pixels_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    pixels: int, stride: int, tiles: bool, routines: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(choice, "has_tiles", lambda: tiles)

    def compute(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        steps = (stride, stride)
        options = (None, steps, (1, 1), (1, 1), False, (0, 0), 1, (True, True, False))
        found = torch.ops.aten.convolution_backward(grad, x, w, *options)
        return found[0].sum() + found[1].sum()

    grad = images(1, 32, pixels, pixels).detach()
    x = images(1, 64, stride * pixels, stride * pixels).detach()
    w = torch.randn(32, 64, 3, 3).to(HALF).contiguous(memory_format=torch.channels_last)
    steps = check(tmp_path, compute, grad, x, w)
    assert [s for s in steps if s.startswith("dicp_nhwc")] == routines, steps


TRANSPOSED = {
    "a step": ((2, 48, 6, 5), (48, 33, 4, 4), {"stride": 2, "padding": 1}),
    "rows that no tap reaches": (
        (1, 32, 4, 6),
        (32, 40, 2, 3),
        {"stride": (3, 2), "output_padding": 1},
    ),
    "no step": ((2, 100, 7, 7), (100, 20, 3, 3), {"padding": (1, 0), "dilation": (1, 2)}),
    "one pixel": ((2, 100, 1, 1), (100, 64, 4, 4), {}),
}


@pytest.mark.parametrize("what", TRANSPOSED)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_transposed_convolutions(tmp_path: Path, what: str, layout: torch.memory_format) -> None:
    image, filters, options = TRANSPOSED[what]

    def convolve(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv_transpose2d(x, w, bias, **options)

    x = images(*image).detach().contiguous(memory_format=layout)
    for bias in (torch.randn(filters[1]).to(HALF), None):
        steps = check(tmp_path, convolve, x, torch.randn(filters).to(HALF), bias)
        assert any(step.startswith("dicp_nhwc") for step in steps), steps


@pytest.mark.parametrize("what", TRANSPOSED)
@pytest.mark.parametrize("where", [0, 1], ids=["images", "filters"])
def test_transposed_convolutions_of_odd_numbers(tmp_path: Path, what: str, where: int) -> None:
    """With tile registers oneDNN multiplies padding by odd numbers of filters."""
    image, filters, options = TRANSPOSED[what]

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, None, **options)

    given = [images(*image).detach(), torch.randn(filters).to(HALF)]
    compiled = torch.compile(convolve, backend=Backend("cpu", cache_dir=tmp_path))
    given[where][0, 0, 0, 0] = 0
    clean = convolve(*given)
    for odd in (torch.inf, torch.nan):
        given[where][0, 0, 0, 0] = odd
        assert_odd_numbers_stay(compiled(*given), convolve(*given), clean)


def test_images_and_filters_with_other_strides(tmp_path: Path) -> None:
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x[:, ::2, 1:].transpose(2, 3), w.flip(0), padding=1)

    steps = check(tmp_path, convolve, images(2, 80, 6, 4), leaf(12, 40, 3, 3, dtype=HALF))
    assert "dicp_nhwc_bf16" in steps


def test_compiler_flags_may_leave_out_what_it_multiplies_by(tmp_path: Path) -> None:
    image, filters, options = CASES["a step"]
    given = images(*image), leaf(*filters, dtype=HALF)
    flags = Config(cache_dir=tmp_path, cxx_flags=("-mno-avx512bf16",))
    assert "dicp_nhwc_bf16" in check(tmp_path, convolved(options), *given, config=flags)


STRIDED = {
    "a stride": ((2, 40, 9, 9), (70, 40, 1, 1), {"stride": 2}),
    "strides that differ": ((1, 64, 7, 10), (33, 64, 1, 1), {"stride": (3, 2)}),
    "one axis": ((2, 33, 4, 12), (48, 33, 1, 1), {"stride": (1, 5)}),
    "dilation, which has no effect": ((1, 32, 8, 8), (16, 32, 1, 1), {"stride": 2, "dilation": 3}),
}


@pytest.mark.parametrize("what", STRIDED)
def test_pixels_at_strides_are_rows_of_a_product(tmp_path: Path, what: str) -> None:
    image, filters, options = STRIDED[what]
    for bias in (leaf(filters[0], dtype=HALF), None):
        given = images(*image), leaf(*filters, dtype=HALF), bias
        steps = check(tmp_path, convolved(options), *given)
        assert any(step.startswith("dicp_product") for step in steps), steps


def test_filters_that_lie_as_the_kernel_reads_them_are_not_copied(tmp_path: Path) -> None:
    """A copy of filters to channels last, for the library, is not copied back."""

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w.clone(memory_format=torch.channels_last), padding=1)

    given = images(1, 64, 6, 6), leaf(32, 64, 3, 3, dtype=HALF)
    assert check(tmp_path, convolve, *(x.detach() for x in given)) == ["dicp_nhwc_bf16"]
