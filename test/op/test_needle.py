"""What needle's course trains networks with: dilation, NHWC convolutions, axes, initialization,
gradients against differences, optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from dicp.compare import Rule, check_tensor
from dicp.testing import op

SIGNIFICANCE = 1e-6  # the chance that right initial weights fail the test of one distribution
AXES = list(chain.from_iterable(combinations(range(3), n) for n in (1, 2, 3)))
case = partial(op, dtypes=(torch.float32,), layouts=("contiguous", "transposed"))


def dilate(x: Tensor, axes: tuple[int, ...], gaps: int) -> Tensor:
    """`gaps` zeros after each element along `axes`; PyTorch's dilation is `gaps` + 1."""
    out = x.new_zeros([n * (gaps + 1) if d in axes else n for d, n in enumerate(x.shape)])
    out[_kept(x, axes, gaps)] = x
    return out


def undilate(x: Tensor, axes: tuple[int, ...], gaps: int) -> Tensor:
    return x[_kept(x, axes, gaps)]


def _kept(x: Tensor, axes: tuple[int, ...], gaps: int) -> tuple[slice, ...]:
    return tuple(slice(None, None, gaps + 1 if d in axes else None) for d in range(x.ndim))


def nhwc(x: Tensor, w: Tensor, **options: int) -> Tensor:
    """A convolution of NHWC images with (k, k, in, out) weights."""
    return F.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), **options).permute(0, 2, 3, 1)


def stack_and_split(x: Tensor, y: Tensor) -> list[Tensor]:
    stacked = [torch.stack([x, y * 2, x + y], axis) for axis in range(3)]
    return [part * n for axis, s in enumerate(stacked) for n, part in enumerate(s.unbind(axis))]


def split_and_stack(x: Tensor) -> list[Tensor]:
    return [torch.stack([n - part for n, part in enumerate(x.unbind(axis))], axis)
            for axis in range(3)]  # fmt: skip


def set_items(x: Tensor, y: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Assignments to views with steps, of views, and through two of them."""
    a, b, c = x.clone(), x.clone(), x.clone()
    a[1::2, :, ::3] = y[::2, :, 4:]
    b.transpose(0, 2)[1:, ::2] = row
    c[:, 1][::2] = -1.0
    c[..., 1:][1:, ::2] *= 3
    return a, b, c


CASES = [
    *(case(f"dilate_{gaps}", lambda x, a=axes, n=gaps: dilate(x, a, n) * 2, (2, 3, 4, 5))
      for axes, gaps in (((1, 2), 0), ((1, 2), 1), ((0, 3), 2), ((2,), 3))),
    *(case(f"undilate_{gaps}", lambda x, n=gaps: undilate(x, (1, 2), n) + 1, (2, 6, 8, 3))
      for gaps in (1, 2)),
    case("undilate_dilated", lambda x: undilate(dilate(x, (0, 1), 1), (0, 1), 1) * 2, (4, 6)),
    *(case(f"nhwc_{number}", lambda x, w, o=options: nhwc(x, w, **o), (2, 9, 8, 4), (3, 3, 4, 6),
           fixed=(3, 4, 6))
      for number, options in enumerate(
          ({}, {"padding": 1}, {"stride": 2, "padding": 1}, {"padding": 2, "dilation": 2},
           {"stride": 2, "dilation": 2}))),
    case("logsumexp_of_axes", lambda x: [x.logsumexp(axes) for axes in AXES], (3, 4, 5)),
    case("stack_split", stack_and_split, (3, 4), (3, 4)),
    case("split_stack", split_and_stack, (3, 4, 5), fixed=(3, 4, 5)),
    case("set_items", set_items, (6, 5, 7), (6, 5, 7), (6, 3, 6), fixed=(3, 5, 6, 7)),
]  # fmt: skip


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


FAN_IN, FAN_OUT = 48, 300
DEVIATION = math.sqrt(2 / FAN_IN)
BOUND = math.sqrt(3) * DEVIATION
INITIAL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "normal": (partial(torch.nn.init.kaiming_normal_, nonlinearity="relu"),
               stats.norm(scale=DEVIATION).cdf),
    "uniform": (partial(torch.nn.init.kaiming_uniform_, nonlinearity="relu"),
                stats.uniform(-BOUND, 2 * BOUND).cdf),
}  # fmt: skip


@pytest.mark.parametrize("name", INITIAL)
def test_kaiming(name: str, backend: Any, dynamic: bool) -> None:
    fill, distribution = INITIAL[name]

    def initial(x: Tensor) -> Tensor:
        return fill(torch.empty_like(x)) + x

    run = torch.compile(initial, backend=backend, dynamic=dynamic, fullgraph=True)
    for rows in (FAN_OUT, FAN_OUT + 7) if dynamic else (FAN_OUT,):
        x = torch.zeros(rows, FAN_IN, device=backend.device)
        found = run(x)
        drawn = stats.kstest(found.flatten().double().cpu().numpy(), distribution)
        assert drawn.pvalue > SIGNIFICANCE, drawn
        assert abs(found.double().std().item() / DEVIATION - 1) < 0.03, "5 standard errors"
        assert not torch.equal(found, run(x)), "two calls gave the same numbers"


FAMILIES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "pointwise": (lambda x, y: torch.sigmoid(x) * y.tanh() + x / (2 + y.square()), [(3, 4), (4,)]),
    "reduction": (lambda x: x.logsumexp(1) + x.var(1) + x.square().sum(1).sqrt(), [(3, 4)]),
    "normalization": (lambda x, w: torch.softmax(F.layer_norm(x, (4,), w), 0), [(3, 4), (4,)]),
    "product": (lambda x, y, b: F.linear(x, y, b).exp(), [(3, 4), (2, 4), (2,)]),
    "convolution": (partial(nhwc, stride=2, padding=1), [(1, 5, 4, 2), (3, 3, 2, 3)]),
    "shape": (lambda x: dilate(x.flip(0).roll(1, 1), (0,), 1).cumsum(1), [(3, 4)]),
    "indexing": (lambda x: x[[2, 0, 2]].index_add(0, torch.tensor([1, 1], device=x.device), x[1:]),
                 [(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck(family: str, backend: Any) -> None:
    """In double: every derivative against differences."""
    fn, shapes = FAMILIES[family]
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    given = [x.to(backend.device).requires_grad_() for x in drawn]
    assert torch.autograd.gradcheck(torch.compile(fn, backend=backend, dynamic=False), given)


# Compiled, PyTorch computes 1 - beta ** step of tensors in float32, of which little is left beside
# a beta near 1; its uncompiled step computes it of Python's numbers.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, betas=(0.8, 0.9), weight_decay=1e-2, eps=1e-4),
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.9), eps=1e-4),
}


@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps(name: str, rate: str, backend: Any) -> None:
    def trained(dtype: torch.dtype, compiled: bool) -> list[Tensor]:
        """Weights and the optimizer's state after steps at two learning rates."""
        gen = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(backend.device, dtype)

        weights = [drawn(5, 3).requires_grad_(), drawn(3).requires_grad_()]
        lr = torch.tensor(0.1, device=backend.device) if rate == "tensor" else 0.1
        optimizer = OPTIMIZERS[name](weights, lr=lr)
        step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
        for number in range(4):
            for w in weights:
                w.grad = drawn(*w.shape)
            if number == 2 and isinstance(lr, Tensor):
                lr.mul_(0.5)
            step()
        state = [v for w in weights for v in optimizer.state[w].values() if isinstance(v, Tensor)]
        return [x.detach() for x in (*weights, *state)]

    found, eager = trained(torch.float32, True), trained(torch.float32, False)
    for got, expected, exact in zip(found, eager, trained(torch.float64, False), strict=True):
        assert not check_tensor(got, expected, exact, Rule())
