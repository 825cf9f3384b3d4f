"""Results and gradients lie in memory as eager's, for inputs and gradients in any memory format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compare import Rule, check_tensor, significant_strides

pytestmark = pytest.mark.sweep
Layout = Callable[[Tensor], Tensor]


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()])


def every_second(x: Tensor) -> Tensor:
    """Channels-last, with gaps."""
    wide = channels_last(x.new_zeros([2 * n for n in x.shape]))
    part = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    return part.copy_(x)


def reversed_dimensions(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def of_exchanged_channels(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def nearly_channels_last(x: Tensor) -> Tensor:
    """The strides of single elements are not those of channels-last tensors."""
    x = channels_last(x)
    pairs = zip(x.shape, x.stride(), strict=True)
    return x.as_strided(x.shape, [1 if n == 1 else s for n, s in pairs])


def batch_norm(x: Tensor, training: bool = True) -> Tensor:
    count = x.shape[1]
    mean, var = torch.zeros(count, dtype=x.dtype), torch.ones(count, dtype=x.dtype)
    return F.batch_norm(x, mean, var, training=training)


def batch_norm_inference(x: Tensor) -> Tensor:
    return batch_norm(x, training=False)


def padded(mode: str) -> Callable[[Tensor], Tensor]:
    def pad(x: Tensor) -> Tensor:
        return F.pad(x, (1, 0) * (x.dim() - 2), mode=mode)

    pad.__name__ = mode
    return pad


def shuffled(x: Tensor) -> Tensor:
    return F.channel_shuffle(x, 2)


def rolled(x: Tensor) -> Tensor:
    return x.roll((1, -2, 2), (1, -1, 1))


def rolled_around(x: Tensor) -> Tensor:
    """One of the slices that eager concatenates is empty, and in no format."""
    return x.roll((1, 2 * x.shape[1]), (2, 1))


def angle_of_complex(x: Tensor) -> Tensor:
    return torch.complex(x, x.cos()).angle()


def upsampled(mode: str) -> Callable[[Tensor], Tensor]:
    def upsample(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode)

    upsample.__name__ = mode
    return upsample


UPSAMPLED = [upsampled(mode) for mode in ("nearest", "bilinear", "trilinear")]
DECOMPOSED = ("ascendgraph", "topsgraph")
"""Targets without rules for the gradients of interpolation: those of its decomposition are
contiguous."""


def adaptively_pooled(x: Tensor) -> Tensor:
    return F.adaptive_max_pool3d(x, 2)


def loss_of(name: str, reduction: str) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        target = torch.linspace(0, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
        return getattr(F, name)(x.sigmoid(), target, reduction=reduction)

    loss.__name__ = f"{name}_{reduction}"
    return loss


def unpooled(x: Tensor) -> Tensor:
    index = torch.arange(x[0, 0].numel()).reshape(x[0, 0].shape).expand(x.shape)
    return F.max_unpool2d(x, index.to(memory_format=torch.channels_last), 2)


FORMATS = [
    (fn, shape, layout, of_gradient)
    for fn in (batch_norm, batch_norm_inference, padded("reflect"), padded("replicate"), shuffled,
               F.instance_norm)
    for shape in ((3, 4, 5, 6), (2, 4, 3, 2, 5))
    for layout in (channels_last, every_second, reversed_dimensions)
    for of_gradient in (Tensor.contiguous, channels_last)
    if fn is not shuffled or of_gradient is not channels_last
] + [  # gradients have the format of the result, in which AOTAutograd passes them
    (fn, shape, layout, Tensor.contiguous if layout is reversed_dimensions else channels_last)
    for fn, shape in zip(
        UPSAMPLED, ((3, 4, 5, 6), (3, 4, 5, 6), (2, 4, 3, 2, 5)), strict=True
    )
    for layout in (channels_last, every_second, reversed_dimensions)
] + [
    (fn, shape, layout, Tensor.contiguous)
    for fn in (rolled, rolled_around, angle_of_complex)
    for shape in ((3, 4, 5, 6), (2, 4, 3, 2, 5))
    for layout in (channels_last, every_second, reversed_dimensions)
] + [
    (upsampled(mode), (3, 4, 5), of_exchanged_channels, Tensor.contiguous)
    for mode in ("nearest", "nearest-exact", "linear")
] + [
    (padded(mode), shape, nearly_channels_last, Tensor.contiguous)
    for mode, shape in (("replicate", (2, 1, 2, 1)), ("replicate", (2, 1, 2, 1, 3)),
                        ("reflect", (2, 1, 3, 2)))
] + [
    (loss_of(name, reduction), (4, 5), reversed_dimensions, Tensor.contiguous)
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy")
    for reduction in ("mean", "none")
] + [
    (adaptively_pooled, (2, 3, 4, depth, 2), channels_last, Tensor.contiguous)
    for depth in (4, 3)
] + [
    (unpooled, (3, 4, 5, 6), layout, Tensor.contiguous)
    for layout in (channels_last, every_second, reversed_dimensions)
] + [
    (fn, (3, 4, 1, 6), layout, channels_last)
    for fn in (batch_norm, batch_norm_inference, padded("replicate"))
    for layout in (channels_last, nearly_channels_last)
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "shape", "layout", "of_gradient"),
    FORMATS,
    ids=lambda x: x.__name__ if callable(x) else "x".join(map(str, x)),
)
def test_memory_format(
    fn: Any, shape: tuple[int, ...], layout: Layout, of_gradient: Layout, backend_name: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)

    def both(call: Any, dtype: torch.dtype) -> list[Tensor]:
        given = layout(x.to(dtype)).detach().requires_grad_()
        out = call(given)
        towards = of_gradient(torch.linspace(-1, 1, out.numel(), dtype=dtype).reshape(out.shape))
        return [out.detach(), *torch.autograd.grad(out, given, towards)]

    compiled = torch.compile(fn, backend=backend_name, dynamic=False)
    runs = [both(call, dtype) for call, dtype in (
        (compiled, torch.float32), (fn, torch.float32), (fn, torch.float64)
    )]  # fmt: skip
    gradient_rule = Rule(strides=fn not in UPSAMPLED or backend_name not in DECOMPOSED)
    for rule, got, eager, exact in zip((Rule(), gradient_rule), *runs, strict=True):
        assert not check_tensor(got, eager, exact, rule)


ORDERED_BY_BOTH = {
    "copysign": torch.copysign, "complex": torch.complex, "heaviside": torch.heaviside,
    "floor_divide": torch.floor_divide, "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "rounded_quotient": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "lcm": lambda x, y: torch.lcm(x.int(), y.int()),
    "power": lambda x, y: 2.0 ** (x + y), "log_sigmoid": lambda x, y: F.logsigmoid(x + y),
    "ldexp": torch.ldexp,
    "ldexp_of_integers": lambda x, y: torch.ldexp(x.int(), y),
    "ldexp_of_float64": lambda x, y: torch.ldexp(x.double(), y),
    "ldexp_in_half": lambda x, y: torch.ldexp(x.int(), y.half()),
    "scaled": lambda x, y: torch.ldexp(x, y.int()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", ORDERED_BY_BOTH)
def test_strides_of_two_operands(name: str, backend_name: str) -> None:
    """Of which one is broadcast: neither alone determines the strides of the result."""
    fn = ORDERED_BY_BOTH[name]
    x = torch.ones(4, 3).t()
    run = torch.compile(fn, backend=backend_name)
    for pair in ((x, torch.ones(1)), (x, torch.ones(())), (torch.ones(3, 1), x), (x[:, :1], x)):
        assert not check_tensor(run(*pair), fn(*pair), None, Rule())


OF_BOOL = {
    "copysign": torch.copysign, "heaviside": torch.heaviside, "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py, "logical_and": torch.logical_and,
    "floor_divide": lambda x, y: torch.floor_divide(x, y.float() + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_BOOL)
def test_strides_of_operands_of_bool(name: str, backend_name: str) -> None:
    fn = OF_BOOL[name]
    x = torch.arange(60).reshape(3, 4, 5) % 3 > 0
    run = torch.compile(fn, backend=backend_name, dynamic=False)
    others = x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, x[:1, :, :1]
    for other in others:
        for pair in ((x, other), (other, x), (others[0], other), (other, others[0])):
            assert not check_tensor(run(*pair), fn(*pair), None, Rule())


def of_expanded(x: Tensor, row: Tensor, column: Tensor) -> list[Tensor]:
    row, column, one = (part.expand_as(x) for part in (row, column, x.new_ones(())))
    pairs = [(row, x), (column, x), (x, column), (one, x), (row, column), (row.float(), x)]
    functions = torch.add, torch.maximum, torch.eq, torch.xlogy, torch.copysign
    return [fn(*pair) for fn in functions for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_strides_of_expanded_operands(dtype: torch.dtype, backend_name: str) -> None:
    """PyTorch's inference orders them after a conversion, which eager does of other dtypes only."""
    run = torch.compile(of_expanded, backend=backend_name)
    for rows, columns in ((3, 4), (5, 6)):
        x = torch.ones(columns, rows, dtype=dtype).t()
        given = x, x.new_ones(columns), x.new_ones(rows, 1)
        for mine, theirs in zip(run(*given), of_expanded(*given), strict=True):
            assert not check_tensor(mine, theirs, None, Rule())


OF_GRADIENT = {
    "silu": F.silu, "gelu": F.gelu, "mish": F.mish, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "logsigmoid": F.logsigmoid,
    "weighted": lambda x: (x.exp() * torch.ones(5, 4, dtype=x.dtype).t()).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_GRADIENT)
def test_strides_of_expanded_gradients(name: str, backend_name: str) -> None:
    def total(x: Tensor) -> Tensor:
        return OF_GRADIENT[name](x).sum()

    run = torch.compile(total, backend=backend_name)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(5, 4).to(dtype).t().requires_grad_()
        grads = [torch.autograd.grad(fn(x), x)[0] for fn in (run, total)]
        assert not check_tensor(*grads, None, Rule(floor=2))


ORDERED_BY_GRADIENT = {
    "elu": F.elu, "glu": lambda x: F.glu(x, 2), "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "layer_norm": lambda x: F.layer_norm(x, x.shape[3:]),
    "log_softmax": lambda x: F.log_softmax(x, 1), "logit": torch.logit, "relu6": F.relu6,
    "softplus": F.softplus,
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED_BY_GRADIENT)
def test_strides_of_gradients_in_another_format(name: str, backend_name: str) -> None:
    """The gradient of the result comes in other strides than the input has."""
    fn = ORDERED_BY_GRADIENT[name]

    def reordered(x: Tensor, dims: Sequence[int]) -> Tensor:
        return fn(x).permute(dims).contiguous() * 2

    for dims in ((0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2)):
        x = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
        run = torch.compile(reordered, backend=backend_name, dynamic=False)
        outs = [call(x, dims) for call in (run, reordered)]
        towards = torch.rand(outs[0].shape)
        grads = [torch.autograd.grad(out, x, towards)[0] for out in outs]
        assert not check_tensor(*grads, None, Rule(floor=2))


@pytest.mark.parametrize("name", ["binary_cross_entropy", "huber_loss", "mse_loss"])
def test_strides_of_losses_of_an_expanded_input(name: str, backend_name: str) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return getattr(F, name)(x.expand_as(y), y, reduction="none")

    x, y = torch.rand(4), torch.rand(4, 3).t()
    run = torch.compile(loss, backend=backend_name)
    assert not check_tensor(run(x, y), loss(x, y), None, Rule(floor=2))


CROPPED = {
    "one_side": lambda x: F.pad(x, (0, 0, 0, x.shape[2] - 11)),
    "all_sides": lambda x: F.pad(x, (-1, -1, x.shape[0] - 6, x.shape[2] - 9)),
    "nothing": lambda x: F.pad(x, (0, x.shape[0] - 5)),
    "padded": lambda x: F.pad(x, (0, -1, 0, x.shape[2] - 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CROPPED)
def test_strides_of_crops_by_symbolic_widths(name: str, backend_name: str) -> None:
    fn = CROPPED[name]
    run = torch.compile(fn, backend=backend_name, dynamic=True)
    x = torch.randn(5, 7, 10).mT
    assert not check_tensor(run(x), fn(x), None, Rule(exact=True))


def test_strides_of_gradients_of_padding_by_symbolic_widths(backend_name: str) -> None:
    """They are crops of the result's gradient."""

    def reordered(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, x.shape[1])).mT.contiguous() * 2

    x = torch.randn(5, 6, 7, requires_grad=True)
    run = torch.compile(reordered, backend=backend_name, dynamic=True)
    towards = torch.randn(5, 7, 12)
    grads = [torch.autograd.grad(fn(x), x, towards)[0] for fn in (run, reordered)]
    assert not check_tensor(*grads, None, Rule(exact=True))


IN_PLACE = {
    "addmm": lambda x, y, i: x.addmm_(y.mT, y),
    "baddbmm": lambda x, y, i: x[None].baddbmm_(y.mT[None], y[None]),
    "bernoulli": lambda x, y, i: x.bernoulli_(1.0),
    "cumsum": lambda x, y, i: x.cumsum_(0),
    "index_add": lambda x, y, i: x.index_add_(0, i, y[:2]),
    "index_copy": lambda x, y, i: x.index_copy_(0, i, y[:2]),
    "masked_fill": lambda x, y, i: x.masked_fill_(y > 0, 0.5),
    "masked_scatter": lambda x, y, i: x.masked_scatter_(y > 0, y),
    "renorm": lambda x, y, i: x.renorm_(2, 0, 1.0),
    "scatter": lambda x, y, i: x.scatter_(0, i.expand(2, 2), 2.0),
    "scatter_add": lambda x, y, i: x.scatter_add_(0, i.expand(2, 2), y),
    "triu": lambda x, y, i: x.triu_(),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_strides_of_what_is_written_into(name: str, backend_name: str) -> None:
    """They stay as they are; `contiguous` of a view is then a copy of its own where it is in eager.

    Of what is no input, too, and with a gradient.
    """

    def written(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        z = x * 2
        IN_PLACE[name](x, y, i)
        IN_PLACE[name](z, y, i)
        apart = z.t().contiguous()
        apart.add_(1)
        x.t().contiguous().add_(1)
        return x * 2, z, apart

    index = torch.tensor([2, 0])
    for shape in ((4, 4), (5, 5)):
        y = torch.randn(shape)
        x = torch.randn(shape).t()
        runs = []
        for function in (torch.compile(written, backend=backend_name), written):
            leaf = x.clone().requires_grad_()
            given = leaf * 1
            found = function(given, y, index)
            (grad,) = torch.autograd.grad([each.square().sum() for each in found], leaf)
            runs.append((*found, given, grad.contiguous()))
        for mine, theirs in zip(*runs, strict=True):
            assert not check_tensor(mine.detach(), theirs.detach(), None, Rule(floor=4))


COPIES = {
    "rows": lambda x: x[1:].contiguous(),
    "columns": lambda x: x[:, 1:].t().contiguous().t(),
    "channels_last": lambda x: x[None, None, 1:].contiguous(memory_format=torch.channels_last),
    "no copy": lambda x: x.clone().t()[1:].contiguous(),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_part_of_what_is_written_into(name: str, backend_name: str) -> None:
    """`contiguous` of a tensor that is not gives memory of its own: after a write, too."""

    def written(x: Tensor) -> Tensor:
        x.add_(1)
        return COPIES[name](x).mul_(2)

    layouts: list[Callable[[Tensor], Tensor]] = [lambda x: x[:, ::2], torch.t, lambda x: x]
    for layout in layouts:
        base = torch.randn(6, 6)
        mine, theirs = layout(base.clone()), layout(base.clone())
        found = torch.compile(written, backend=backend_name)(mine)
        assert not check_tensor(found, written(theirs), None, Rule())
        assert not check_tensor(mine, theirs, None, Rule())


@pytest.mark.parametrize("grad", [False, True])
def test_strides_of_pooled_columns(grad: bool, backend_name: str) -> None:
    """Eager pools one dimension by another kernel without a gradient, and without indices."""
    x = torch.randn(2, 8, 3).transpose(1, 2).requires_grad_(grad)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return F.max_pool1d(x, 2), *F.max_pool1d(x, kernel_size=2, return_indices=True)

    got = torch.compile(fn, backend=backend_name, fullgraph=True)(x)
    for mine, theirs in zip(got, fn(x), strict=True):
        assert not check_tensor(mine, theirs, None, Rule())


BY_INDICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a_new_dimension_before": lambda x, i: x[None, i[0]],
    "a_new_dimension_inside": lambda x, i: x[:, None, i[0]],
    "transposed": lambda x, i: x[i.t()],
    "last": lambda x, i: x[..., i.t()],
    "in_the_middle": lambda x, i: x[:, i.t(), 1:],
    "two": lambda x, i: x[i.t(), i[1, 0]],
    "apart": lambda x, i: x[i.t(), :, i[0, 0]],
    "written": lambda x, i: x.clone().index_put_((i.t(),), x.sum())[None, i[0]],
}


@pytest.mark.parametrize("symbolic", [False, True])
def test_strides_of_what_indices_pick(symbolic: bool, backend_name: str) -> None:
    """The strides of the indices order what those of the input do not."""

    def fn(x: Tensor, i: Tensor) -> list[Tensor]:
        return [pick(x, i) for pick in BY_INDICES.values()]

    compiled = torch.compile(fn, backend=backend_name, dynamic=symbolic)
    places = torch.tensor([[0, 1, 1], [1, 0, 0]])
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        given = torch.arange(120.0).view(4, 5, 6).permute(order)
        results = zip(BY_INDICES, compiled(given, places), fn(given, places), strict=True)
        for name, got, expected in results:
            assert significant_strides(got) == significant_strides(expected), (name, order)
            torch.testing.assert_close(got, expected)
