"""Upsampling and grid sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from dicp.compare import Rule, assert_matches
from dicp.dynamo_bridge.interpolation import interpolate
from dicp.testing import BackendUnderTest, T, op

X = (2, 3, 5, 7)
F32_F64 = (torch.float32, torch.float64)
WITH_BF16 = (torch.float32, torch.float64, torch.bfloat16)
FORMATS = ("contiguous", "channels_last", "sliced")
ONE = ("contiguous",)
aten = torch.ops.aten


def up(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ONE)
    return op(name, fn, *specs, strides=False, **options)


def beside(x: torch.Tensor, mode: str, dim: int) -> torch.Tensor:
    """An upsampled image and a part of another one, as in a U-Net."""
    large = F.interpolate(x, scale_factor=2, mode=mode)
    return torch.cat([large, x.repeat(1, 1, 2, 2).narrow(dim, 0, 2)], dim)


CASES = [
    up("nearest", lambda x: F.interpolate(x, scale_factor=2), X, dtypes=WITH_BF16, layouts=FORMATS),
    up("nearest_size", lambda x: F.interpolate(x, size=(8, 9)), X, layouts=FORMATS),
    up("nearest_down", lambda x: F.interpolate(x, scale_factor=0.5), X),
    up("nearest_exact", lambda x: F.interpolate(x, size=(8, 9), mode="nearest-exact"), X),
    up("nearest_1d", lambda x: F.interpolate(x, scale_factor=3), (2, 3, 7)),
    up("nearest_3d", lambda x: F.interpolate(x, scale_factor=2), (2, 3, 3, 4, 5)),
    up("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), X, layouts=FORMATS),
    up(
        "bilinear_corners",
        lambda x: F.interpolate(x, size=(8, 9), mode="bilinear", align_corners=True),
        X,
    ),
    up("bilinear_down", lambda x: F.interpolate(x, size=(3, 4), mode="bilinear"), X),
    up(
        "bilinear_vec",
        lambda x: (
            aten.upsample_bilinear2d.vec(x, None, False, [2.0, 1.5]),
            aten.upsample_nearest2d.vec(x, None, [2.0, 1.5]),
        ),
        X,
    ),
    *(
        up(
            f"{mode}_beside_{dim}",
            lambda x, mode=mode, dim=dim: beside(x, mode, dim),
            X,
            dtypes=WITH_BF16,
            layouts=FORMATS,
        )
        for mode, dim in (("nearest", 1), ("nearest", 2), ("nearest", 3), ("bilinear", 1))
    ),
    up(
        "nearest_padded",
        lambda x: F.pad(F.interpolate(x, scale_factor=2), (1, 2, 0, 3)),
        X,
        layouts=FORMATS,
    ),
    up("linear", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 3, 7)),
    up("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 3, 3, 4, 5)),
    up("bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), X),
    up(
        "bilinear_antialias",
        lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True),
        X,
    ),
    up("area", lambda x: F.interpolate(x, size=(3, 4), mode="area"), X, graphs=3),
    up(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        X,
        T((2, 4, 6, 2), -1.2, 1.2),
        fixed=(2,),
    ),
    up(
        "grid_sample_border",
        lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=True),
        X,
        T((2, 4, 6, 2), -1.2, 1.2),
        fixed=(2,),
    ),
    up(
        "grid_sample_nearest",
        lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=False),
        X,
        T((2, 4, 6, 2), -1.2, 1.2),
        fixed=(2,),
    ),
    up(
        "grid_sample_reflection",
        lambda x, g: F.grid_sample(x, g, padding_mode="reflection", align_corners=False),
        X,
        T((2, 4, 6, 2), -1.2, 1.2),
        fixed=(2,),
    ),
    up(
        "grid_sample_without_gradient_of_images",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        T(X, grad=False),
        T((2, 4, 6, 2), -1.2, 1.2),
        fixed=(2,),
    ),
    up(
        "grid_sample_3d_without_gradient_of_images",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        T((2, 3, 3, 4, 5), grad=False),
        T((2, 4, 6, 2, 3), -1.2, 1.2),
        fixed=(2, 3),
    ),
    up(
        "affine_grid",
        lambda t: F.affine_grid(t, [2, 3, 5, 7], align_corners=False),
        (2, 2, 3),
        fixed=(2, 3),
    ),
    up(
        "affine_grid_of_one_row",
        lambda t: F.affine_grid(t, [2, 3, 1, 7], align_corners=False),
        (2, 2, 3),
        fixed=(2, 3),
    ),
]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 2, 4, 3)])
def test_affine_grid_under_autocast(
    size: tuple[int, ...], dtype: torch.dtype, backend_name: str
) -> None:
    """A matrix product, which autocast computes in 16 bits."""

    def grid(theta: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.affine_grid(theta, size, align_corners=False)

    dims = len(size) - 2
    theta = torch.randn(2, dims, dims + 1, dtype=dtype, requires_grad=True)
    results = []
    for function in (torch.compile(grid, backend=backend_name), grid):
        result = function(theta)
        results.append((result, *torch.autograd.grad(result.sum(), theta)))
    for mine, theirs in zip(*results, strict=True):
        assert_matches(mine, theirs, rule=Rule(floor=2))


LINEAR = (("linear", 1), ("bilinear", 2), ("trilinear", 3))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("mode", "dims"), LINEAR, ids=[mode for mode, _ in LINEAR])
def test_numbers_beside_infinities(mode: str, dims: int, train: bool, backend_name: str) -> None:
    """The difference of an infinity and its neighbour is no number that the result may hold."""
    x = torch.arange(2.0 * 4**dims).reshape(1, 2, *[4] * dims)
    x[0, 0].view(-1)[1], x[0, 1].view(-1)[2] = torch.inf, -torch.inf

    def sizes(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.interpolate(x, size=[size] * dims, mode=mode) for size in (3, 4, 7, 8)]

    got = torch.compile(sizes, backend=backend_name, dynamic=False)(x.requires_grad_(train))
    for mine, theirs in zip(got, sizes(x), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


MODES = (*LINEAR, ("bicubic", 2))
DECOMPOSED = ("ascendgraph", "topsgraph")
"""Backends whose targets scatter the products with weights of 0 elsewhere, or leave them out."""
SIZES = {"same": (6, 4, 5), "mixed": (13, 4, 3), "other": (5, 11, 12), "far": (1, 40, 5)}


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "dims"), MODES, ids=[mode for mode, _ in MODES])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_gradients(mode: str, dims: int, corners: bool, name: str, backend_name: str) -> None:
    """Of results that grow, shrink and stay along an axis, and of an infinite one beside weights
    of 0: their product is NaN."""
    size = SIZES[name][:dims]
    x = torch.randn(2, 3, *(6, 4, 5)[:dims], requires_grad=True)

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size, mode=mode, align_corners=corners)

    compiled = torch.compile(resized, backend=backend_name, dynamic=False)
    grad = torch.randn(2, 3, *size)
    spiked = grad.clone()
    spiked.view(-1)[1] = torch.inf
    for g in (grad,) if backend_name in DECOMPOSED else (grad, spiked):
        mine, theirs = (torch.autograd.grad(fn(x), x, g)[0] for fn in (compiled, resized))
        wide = x.detach().double().requires_grad_()
        exact = torch.autograd.grad(resized(wide), wide, g.double())[0]
        assert_matches(mine, theirs, exact)


@pytest.mark.parametrize("corners", [False, True])
def test_antialiased_by_factors(corners: bool, backend_name: str) -> None:
    """Between aligned corners, the distance of results follows from the sizes, not the factors."""

    def resized(x: torch.Tensor) -> torch.Tensor:
        factors = (0.4, 0.6)
        return F.interpolate(
            x, None, factors, mode="bilinear", align_corners=corners, antialias=True
        )

    x = torch.randn(2, 3, 7, 6, requires_grad=True)
    grad, results = torch.randn(2, 3, 2, 3), []
    for function in (torch.compile(resized, backend=backend_name), resized):
        result = function(x)
        results.append((result, *torch.autograd.grad(result, x, grad)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(3, 4), (5, 12), (1, 1)])
def test_antialiased_beside_infinities(
    size: tuple[int, int], corners: bool, symbolic: bool, backend_name: str
) -> None:
    """What a result does not read has no weight, not one of 0: 0 times an infinity is NaN."""

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size, mode="bilinear", align_corners=corners, antialias=True)

    compiled = torch.compile(resized, backend=backend_name, dynamic=symbolic)
    for shape in ((2, 3, 7, 9), (2, 3, 8, 10)):
        x, grad = torch.randn(shape), torch.randn(2, 3, *size)
        x[0, 0, 3, 4], x[1, 1, 0, 0], grad[0, 1, -1, 0] = torch.inf, torch.nan, -torch.inf
        inputs, results = x.requires_grad_(), []
        for function in (compiled, resized):
            result = function(inputs)
            results.append((result, *torch.autograd.grad(result, inputs, grad)))
        torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_bytes_are_rounded_as_by_eager(mode: str, backend_name: str) -> None:
    def resized(x: torch.Tensor) -> list[torch.Tensor]:
        given: list[dict[str, Any]] = [{"size": (20, 17)}, {"scale_factor": (1.7, 0.6)}]
        return [
            F.interpolate(x, mode=mode, align_corners=corners, **numbers)
            for numbers in given for corners in (False, True)
        ]  # fmt: skip

    compiled = torch.compile(resized, backend=backend_name)
    for shape in ((2, 3, 9, 11), (1, 3, 7, 12)):
        x = torch.randint(0, 256, shape, dtype=torch.uint8)
        for mine, theirs in zip(compiled(x), resized(x), strict=True):
            assert torch.equal(mine, theirs)


def test_old_names(backend_name: str) -> None:
    """Each is computed as `interpolate` is, bytes in integers."""

    def resized(x: torch.Tensor) -> list[torch.Tensor]:
        several = (F.upsample_nearest, F.upsample_bilinear)
        modes = [F.upsample(x, 7, mode=mode) for mode in ("nearest", "bilinear", "bicubic")]
        return [*modes, *(f(x, scale_factor=2) for f in several)]

    compiled = torch.compile(resized, backend=backend_name)
    x = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    for mine, theirs in zip(compiled(x), resized(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("factor", [2, 2.0, (3, 1.0)])
def test_whole_factors_scale_symbolic_sizes_in_integers(factor: Any) -> None:
    """Shapes that hold floating point expressions take minutes to compare in a large graph."""
    traced = make_fx(lambda x: interpolate(x, scale_factor=factor), tracing_mode="symbolic")
    *_, output = traced(torch.randn(X)).graph.nodes
    sizes = [n.node.expr for n in output.args[0].meta["val"].shape[2:]]
    assert all(len(n.args) == 2 and n.args[0].is_Integer for n in sizes if n.args), sizes


EMPTY: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "of size 0": ((1, 2, 4, 4), {"size": (4, 0)}),
    "shrunk to nothing": ((1, 2, 4, 4), {"scale_factor": 0.1}),
    "without channels": ((1, 0, 4, 4), {"scale_factor": 2}),
    "without rows": ((1, 2, 0, 4), {"scale_factor": 2}),
    "a volume shrunk to nothing": ((1, 2, 4, 4, 4), {"scale_factor": 0.1}),
}


@pytest.mark.parametrize("mode", ["nearest", "linear", "bicubic"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_images_are_refused_as_by_eager(
    name: str, mode: str, backend: BackendUnderTest
) -> None:
    shape, given = EMPTY[name]
    if mode == "linear":
        mode = "bilinear" if len(shape) == 4 else "trilinear"

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, mode=mode, **given)

    for train in (False, True):
        x = torch.randn(shape, requires_grad=train)
        with pytest.raises(RuntimeError):
            resized(x)
        backend.start_over()
        with pytest.raises(RuntimeError):
            torch.compile(resized, backend=backend)(x)


def test_symbolic_sizes_are_refused_where_they_are_empty(backend_name: str) -> None:
    """All others share a graph; batches may be empty."""

    def resized(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=0.1, mode="bilinear")

    compiled = torch.compile(resized, backend=backend_name, dynamic=True)
    counted = torch._dynamo.utils.counters["stats"]
    for length, graphs in ((20, 1), (30, 0), (47, 0)):
        x, before = torch.randn(3, 2, length, length + 10), counted["unique_graphs"]
        torch.testing.assert_close(compiled(x), resized(x))
        assert counted["unique_graphs"] == before + graphs
    with pytest.raises(RuntimeError, match="greater than 0"):
        compiled(torch.randn(3, 2, 8, 20))
    assert compiled(torch.randn(0, 2, 20, 20)).shape == (0, 2, 2, 2)


def test_gradients_of_empty_images_are_refused_as_by_eager(backend: BackendUnderTest) -> None:
    def gradient(grad: torch.Tensor) -> Any:
        return aten.upsample_bilinear2d_backward(grad, [0, 4], [1, 2, 4, 4], False)

    for fn in (gradient, torch.compile(gradient, backend=backend)):
        with pytest.raises(RuntimeError, match="Input and output sizes should be greater than 0"):
            fn(torch.randn(1, 2, 0, 4))
