"""Our own convolutions of filters with many channels: taken where they fit, and right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_routines import by_dtype, by_vectors, check, leaf, named  # noqa: F401 (a fixture)
from torch import Tensor

from dicp.dynamo_bridge.backend import Backend
from dicp.vendor.cpu.routines import choice
from dicp.vendor.cpu.thresholds import EAGER_IM2COL_PIXELS, WIDE_CONVOLUTIONS

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("shared_builds")]


@pytest.mark.parametrize(
    ("image", "filters", "options"),
    [
        ((2, 3, 9, 11), (5, 3, 3, 3), {"padding": 1}),
        ((1, 4, 20, 17), (6, 2, 3, 3), {"stride": 2, "padding": (1, 0), "groups": 2}),
        ((3, 8, 5, 5), (100, 8, 1, 1), {}),
        ((1, 2, 30, 7), (3, 2, 5, 3), {"padding": 2, "dilation": 2}),
        ((2, 4, 6, 34), (5, 4, 3, 3), {"padding": 1}),
        ((1, 2, 3, 100), (4, 2, 1, 5), {"padding": (0, 2)}),
        ((2, 70, 40, 40), (50, 70, 1, 1), {}),
        ((1, 60, 6, 6), (520, 60, 3, 3), {"padding": 1}),
        ((1, 3, 4, 4), (2, 3, 3, 3), {"stride": 3, "padding": 4}),
        ((2, 16, 33), (8, 16, 10), {"stride": 5}),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
def test_convolution(
    tmp_path: Path, image: tuple[int, ...], filters: tuple[int, ...], options: dict[str, Any],
    symbolic: bool,
) -> None:  # fmt: skip
    convolve = F.conv2d if len(image) == 4 else F.conv1d

    def convolution(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return convolve(x, w, b, **options)

    x, w = leaf(*image), leaf(*filters)
    for bias, tag in ((leaf(filters[0]), "_biased"), (None, "")):
        steps = check(tmp_path, convolution, x, w, bias, dynamic=symbolic)
        if not symbolic:
            single, small = max(filters[2:]) == 1, filters[0] >= 32 and image[-1] <= 16
            name = "im2col" if small else "product" if single else "convolution"
            assert f"dicp_{name}{tag}" in steps
            assert f"dicp_{'im2col' if small else 'convolution'}_filters" in steps
            fewer = filters[1] < 16 and ("stride" in options or "groups" in options)
            assert any("::convolution_backward" in step for step in steps) == fewer


@pytest.mark.parametrize("axes", [(0,), (0, 2, 3)], ids=["batch", "sizes"])
@pytest.mark.parametrize(
    ("image", "filters", "name"),
    [
        ((2, 20, 30, 27), (24, 20, 3, 3), "convolution"),
        ((3, 40, 9, 8), (64, 40, 3, 3), "im2col"),
        ((2, 20, 33, 28), (24, 20, 1, 1), "product"),
        ((2, 32, 9, 11), (32, 1, 3, 3), "depthwise_3"),
    ],
)
def test_symbolic_sizes(
    tmp_path: Path, image: tuple[int, ...], filters: tuple[int, ...], name: str,
    axes: tuple[int, ...],
) -> None:  # fmt: skip
    """The first call's sizes choose the kernels, which are right for other sizes, too."""

    def convolution(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1] // w.shape[1])

    def images(more: int) -> Tensor:
        x = leaf(*(size + more * (axis in axes) for axis, size in enumerate(image)))
        for axis in axes:
            torch._dynamo.mark_dynamic(x, axis)
        return x

    weights = [torch.nn.Parameter(leaf(*shape)) for shape in (filters, filters[:1])]
    given, later = (images(0), *weights), (images(5), *weights)
    steps = check(tmp_path, convolution, *given, dynamic=None, later=later)
    assert f"dicp_{name}_biased" in steps
    assert not any("::convolution" in step for step in steps), steps


@torch.no_grad()
def test_padding_of_symbolic_images(tmp_path: Path) -> None:
    """Eager skips it unless a single image is small, when infinite filters multiply its zeros."""
    convolution = functools.partial(F.conv2d, padding=1)
    compiled = torch.compile(convolution, backend=Backend("cpu", cache_dir=tmp_path))
    w = leaf(24, 16, 3, 3)
    w[3, 2, 0, 1] = torch.inf
    for size in (24, 30, 40, 60):
        x = torch.randn(1, 16, size, 24)
        torch._dynamo.mark_dynamic(x, 2)
        got, eager = compiled(x, w), convolution(x, w)
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert bool(eager.isnan().any()) == (x.numel() <= EAGER_IM2COL_PIXELS)


def test_options_by_name(tmp_path: Path) -> None:
    def convolution(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.convolution.default(
            x, w, None, stride=[1, 1], padding=[1, 1], dilation=[1, 1], transposed=False,
            output_padding=[0, 0], groups=1,
        )  # fmt: skip

    steps = check(tmp_path, convolution, torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3))
    assert steps == ["dicp_convolution"]


@by_dtype
@pytest.mark.usefixtures("by_vectors")
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
def test_filters_of_one_pixel_on_channels_last(
    tmp_path: Path, dtype: torch.dtype, symbolic: bool
) -> None:
    x = torch.randn(2, 7, 6, 5).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    weights = [torch.nn.Parameter(leaf(*shape, dtype=dtype)) for shape in ((9, 7, 1, 1), (9,))]
    steps = check(tmp_path, F.conv2d, x, *weights, dynamic=symbolic)
    of_rows = "dicp_product_any_rows_biased" if symbolic else "dicp_product_biased"
    assert steps.count(named(of_rows, dtype)) == 1
    assert steps.count(named("dicp_product", dtype)) == 2, "the gradients of images and filters"
    single = torch.randn(5, 7, 1, 1).to(dtype).requires_grad_()
    steps = check(tmp_path, F.conv2d, single, *weights, dynamic=symbolic)
    assert steps.count(named("dicp_product", dtype)) == 2, "rows of one matrix"


def test_images_of_symbolic_sizes_are_read_as_rows_of_pixels(tmp_path: Path) -> None:
    """No copy of them, though their height and width are rounded quotients."""

    def convolve(x: Tensor, w: Tensor, pixels: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, w, stride=2, padding=1), pixels)

    x = torch.randn(2, 16, 14, 20).to(memory_format=torch.channels_last)
    weights = torch.randn(16, 16, 3, 3), torch.randn(9, 16, 1, 1)
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, axis)
    later = torch.randn(3, 16, 11, 9).to(memory_format=torch.channels_last)
    steps = check(tmp_path, convolve, x, *weights, dynamic=None, later=(later, *weights))
    assert [step.split(".")[0] for step in steps] == ["aten::convolution", "dicp_product_any_rows"]


@by_dtype
@pytest.mark.usefixtures("by_vectors")
@pytest.mark.parametrize("taps", [(2, 2), (2, 4), (1, 3)], ids=str)
def test_steps_as_long_as_filters(
    tmp_path: Path, taps: tuple[int, int], dtype: torch.dtype
) -> None:
    """Products with pieces of the images, forward and backward, where no pixel is left over."""

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.conv2d(x, w, b, stride=taps)
        return y.contiguous(memory_format=torch.channels_last)

    def operand(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).to(memory_format=torch.channels_last).requires_grad_()

    w, b = torch.nn.Parameter(operand(35, 6, *taps)), leaf(35, dtype=dtype)
    steps = check(tmp_path, convolve, operand(3, 6, 4, 12), w, b)
    assert steps.count(named("dicp_product_biased", dtype)) == 1
    assert steps.count(named("dicp_product", dtype)) == 2
    steps = check(tmp_path, convolve, operand(3, 6, 4, 13), w, b)
    assert not any("dicp_product" in step for step in steps), steps


@pytest.mark.parametrize(
    ("taps", "options"), [(4, {"stride": 4}), (3, {"padding": 1}), (5, {"stride": 3})], ids=str
)
def test_filters_of_few_channels(tmp_path: Path, taps: int, options: dict[str, Any]) -> None:
    """Their gradient is made from patches, that of the images is not wanted."""

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, **options)

    x, w = torch.randn(2, 3, 24, 20), leaf(21, 3, taps, taps)
    steps = check(tmp_path, convolve, x, w, leaf(21))
    assert "dicp_im2col_filters" in steps
    assert not any("::convolution_backward" in step for step in steps), steps


def test_larger_convolutions(tmp_path: Path) -> None:
    """Images in parts, some of them the last; tiles that pixels of several rows share."""

    def kernel(filters: int, taps: int, small: bool) -> str:
        if taps == 1 and not small:
            return "product"
        return "im2col" if small or filters >= WIDE_CONVOLUTIONS.filters else "convolution"

    for image, filters, stride in (
        ((1, 64, 61, 40), (44, 64, 3, 3), 1),
        ((3, 60, 57, 31), (30, 60, 3, 3), 2),
        ((2, 96, 1, 1700), (32, 96, 1, 9), 1),
        ((1, 512, 7, 7), (100, 512, 3, 3), 1),
        ((2, 60, 33, 30), (130, 60, 3, 3), 1),
        ((2, 130, 30, 33), (40, 130, 3, 3), 1),
        ((2, 300, 16, 15), (200, 300, 1, 1), 1),
    ):
        convolve = functools.partial(F.conv2d, stride=stride, padding=filters[-1] // 2)
        operands = leaf(*image), leaf(*filters), leaf(filters[0])
        steps = check(tmp_path, lambda x, w, b: convolve(x, w, b), *operands)  # noqa: B023
        small = image[-1] == 7
        count, channels, _, taps = filters
        assert f"dicp_{kernel(count, taps, small)}_biased" in steps
        routine = "im2col_images" if stride > 1 else kernel(channels, taps, small)
        assert f"dicp_{routine}" in steps, "the gradient of the images"
        assert f"dicp_{'im2col' if small else 'convolution'}_filters" in steps


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("taps", [(2, 2), (3, 4)], ids=str)
def test_transposed_convolutions_in_patches(
    tmp_path: Path, taps: tuple[int, int], biased: bool
) -> None:
    """A product makes a patch of each pixel; infinite and NaN pixels stay in their patches."""

    def convolve(x: Tensor, *operands: Tensor) -> Tensor:
        return F.conv_transpose2d(x[:, ::2], *operands, stride=taps)

    operands = (leaf(17, 5, *taps), leaf(5))[: 1 + biased]
    check(tmp_path, convolve, leaf(3, 34, 17, 19), *operands)
    x, *rest = (t.detach() for t in (leaf(3, 34, 17, 19), *operands))
    x[0, 0, 3, 3], x[1, 2, 0, 0] = torch.inf, torch.nan
    steps = check(tmp_path, convolve, x, *rest)
    assert any(step.startswith("dicp_product") for step in steps), steps
    few = check(tmp_path, convolve, torch.randn(1, 34, 15, 15), *rest)
    assert not any(step.startswith("dicp") for step in few), few


def test_heavy_and_wasteful_convolutions_go_to_the_library(tmp_path: Path) -> None:
    """Many images of few pixels would use half of each tile; few filters, patches too seldom."""
    steps = check(tmp_path, F.conv2d, torch.randn(128, 330, 4, 4), torch.randn(30, 330, 3, 3))
    assert not any("dicp" in s for s in steps)
    steps = check(tmp_path, F.conv2d, torch.randn(4, 256, 34, 34), torch.randn(512, 256, 3, 3))
    assert not any("dicp" in s for s in steps)
    half = [torch.randn(*shape).bfloat16() for shape in ((1, 3, 5, 5), (4, 3, 3, 3))]
    assert not any("dicp" in s for s in check(tmp_path, F.conv2d, *half))


@by_dtype
def test_steps_over_few_channels_channels_last(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library reads past such images where it makes the gradient of filters of one pixel."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, w, stride=2), v, padding=1, groups=48)

    weights = leaf(48, 3, 1, 1, dtype=dtype), leaf(48, 1, 3, 3, dtype=dtype)
    steps = check(tmp_path, fn, leaf(2, 3, 128, 128, dtype=dtype), *weights)
    assert named("dicp_depthwise_3", dtype) in steps, "images lie channels last"


def test_a_size_of_one_keeps_its_stride(tmp_path: Path) -> None:
    """The library tells channels last by it, and refuses a gradient in another layout."""
    last = torch.channels_last
    x, w = (
        torch.randn(shape).half().contiguous(memory_format=last).requires_grad_()
        for shape in ((2, 3, 1, 2), (4, 3, 2, 1))
    )
    check(tmp_path, lambda x, w: F.conv2d(x, w, padding=(1, 0)), x, w)


@pytest.mark.parametrize("wide", [False, True], ids=["avx2", "avx512"])
def test_kernels_by_the_width_of_vectors(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2, only small images and gradients of filters are ours."""
    monkeypatch.setattr(choice, "has_feature", lambda name: wide or name == "avx2")

    def kernels(side: int, taps: int, images: int = 4) -> list[str | None]:
        how = choice.Options([1, 1], [taps // 2] * 2, [1, 1], False, [0, 0], 1)
        x, w = torch.empty(images, 256, side, side), torch.empty(256, 256, taps, taps)
        return [
            choice.result(how, x, w, x.shape, choice.Layout(True, False)),
            choice.images_gradient(how, x, w, x.shape),
            choice.filters_gradient(how, x, w, x.shape),
        ]

    large, small = kernels(32, 3), kernels(8, 3)
    pixels, light = kernels(16, 1), kernels(3, 3, images=1)
    assert large == (["im2col", "im2col", "convolution"] if wide else [None, None, "convolution"])
    assert small == (["im2col"] * 3 if wide else ["im2col", None, "im2col"])
    assert pixels == (["product", "product", "convolution"] if wide else [None, None, None])
    assert light == ["im2col"] * 3


@pytest.mark.parametrize(
    ("channels", "groups", "formats", "strides"),
    [
        (4, 1, "xw", ((540, 1, 60, 4), (4, 1, 4, 4))),
        (4, 2, "w", ((540, 1, 60, 4), (2, 1, 2, 2))),
        (8, 1, "x", ((1080, 1, 120, 8), (8, 1, 8, 8))),
    ],
)
def test_gradients_of_strided_pixels_have_eager_strides(
    channels: int, groups: int, formats: str, strides: Sequence[tuple[int, ...]]
) -> None:
    """Those of single taps, too, by which PyTorch tells formats; they are computed row-major.

    Eager's strides are written down, and its float64 is the reference: its float32 gradients write
    past their memory (`library_backward`), which ends the process on some processors.
    """
    x, w = torch.randn(3, channels, 9, 15), torch.randn(6, channels // groups, 1, 1)
    inputs = [
        t.to(memory_format=torch.channels_last if name in formats else torch.contiguous_format)
        for name, t in (("x", x), ("w", w))
    ]

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in inputs]
        result = run(*given)
        return torch.autograd.grad(result, given, torch.ones_like(result))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=3, groups=groups)

    found = gradients(torch.compile(fn, backend="cpugraph"), torch.float32)
    for mine, exact in zip(found, gradients(fn, torch.float64), strict=True):
        torch.testing.assert_close(mine, exact.float())
    assert tuple(mine.stride() for mine in found) == strides
