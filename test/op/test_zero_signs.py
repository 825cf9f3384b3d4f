"""The sign of each zero that an operator gives is that of eager, whose vectorized loops decide.

Left out is where eager's own sign depends on an element's place: bounds of `clamp` that are tensors
of another shape, `lerp` with weight 1, maxima of rows with zeros of both signs, norms, and linear
interpolation, whose products eager joins; and `softshrink`, which PyTorch decomposes before
autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.graphop.target import GraphTarget

VALUES = (0.0, 1.0, 0.5, 2.5, 3.0, 60.0, 1e-3, 0.3, 1e-7, torch.inf)
SIGNED = [*VALUES, *(-v for v in VALUES), torch.nan]

UNARY: list[Callable[[Tensor], Tensor]] = [
    *(getattr(torch, name) for name in (
        "abs neg sign sgn floor ceil trunc round frac sqrt exp expm1 log log1p sin tan asin atan "
        "sinh tanh asinh atanh erf erfinv sigmoid relu square nan_to_num deg2rad sinc reciprocal"
    ).split()),
    *(getattr(F, name) for name in (
        "silu mish softsign hardtanh hardswish hardsigmoid relu6 elu selu celu leaky_relu softplus "
        "logsigmoid tanhshrink hardshrink"
    ).split()),
    *(lambda x, zero=zero: x.clamp(min=zero) for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: x.clamp(max=zero) for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: x * zero for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: x + zero for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: x - zero for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: zero - x for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: zero / x for zero in (0.0, -0.0)),
    *(lambda x, zero=zero: torch.copysign(x, zero) for zero in (0.0, -0.0)),
    *(lambda x, power=power: x**power for power in (-1, 0.5, 1, 2, 3)),
    *(lambda x, mode=mode: torch.div(x, 2, rounding_mode=mode) for mode in ("floor", "trunc")),
    *(lambda x, by=by: torch.fmod(x, by) for by in (1.5, -1.5)),
    *(lambda x, by=by: torch.remainder(x, by) for by in (1.5, -1.5)),
    lambda x: torch.round(x, decimals=1),
    lambda x: F.threshold(x, 0.0, -0.0),
    lambda x: x.masked_fill(x > 0, -0.0),
    lambda x: F.avg_pool1d(x[None, None], 2)[0, 0],
    lambda x: F.adaptive_avg_pool1d(x[None, None], 11)[0, 0],
    lambda x: x.to(torch.bfloat16),
    lambda x: -(x - x),
    lambda x: x - 2 * x,
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(getattr(torch, name) for name in (
        "add sub mul div maximum minimum fmax fmin fmod remainder atan2 copysign hypot xlogy "
        "floor_divide heaviside rsub"
    ).split()),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.clamp(min=y),
    lambda x, y: x.clamp(max=y),
    lambda x, y: torch.addcmul(x, x, y, value=-1),
    lambda x, y: torch.addcdiv(x, y, y, value=-1),
    lambda x, y: x * y + x,
    lambda x, y: -(x - y),
    lambda x, y: -x * y,
    lambda x, y: x + (-y),
]  # fmt: skip
REDUCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(1), lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x.prod(1),
    lambda x: x.cumsum(1), lambda x: x.cumprod(1), lambda x: x.cummax(1)[0],
    lambda x: x.sort(1)[0], lambda x: x.nansum(1), lambda x: x @ x.T,
    lambda x: F.max_pool1d(x[None], 2)[0], lambda x: x.diff(dim=1),
]  # fmt: skip
SINGLE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(1), lambda x: x[0, 0].sum(), lambda x: x[0, 0].sum(0), lambda x: x.mean(1),
    lambda x: x[:1, :1].trace(), lambda x: x.nansum(1), lambda x: x.prod(1), lambda x: x.cumsum(1),
    lambda x: x[0, 0].cumsum(0), lambda x: x.cumprod(1), lambda x: x.amax(1),
    lambda x: F.cosine_similarity(x[0], -x[0], 0), lambda x: torch.einsum("ij->i", x),
    lambda x: torch.var_mean(x, 1, correction=0)[1], lambda x: x.bfloat16().sum(1),
]  # fmt: skip
ROWS = torch.tensor([
    [0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, -0.0, 0.0], [-0.0, -0.0, -0.0, -0.0], [0.0, 0.0, 0.0, 0.0],
    [-1.0, -0.0, 1.0, 0.0], [-0.0, -1e-3, -0.0, -5.0], [1.0, -1.0, -0.0, -0.0],
])  # fmt: skip


def _all(functions: list[Any]) -> Callable[..., list[Tensor]]:
    return lambda *inputs: [function(*inputs) for function in functions]


@pytest.mark.static_only
@pytest.mark.parametrize("kind", ["unary", "binary", "reductions", "single"])
def test_zero_signs(kind: str, backend: Any, dynamic: bool) -> None:
    if isinstance(backend.target, GraphTarget):
        pytest.skip("the vendor's operators decide")
    pairs = torch.tensor(list(itertools.product(SIGNED, SIGNED)))
    functions, inputs = {
        "unary": (UNARY, [torch.tensor(SIGNED).repeat(16)]),
        "binary": (BINARY, list(pairs.repeat(16, 1).T.contiguous())),
        "reductions": (REDUCTIONS, [ROWS]),
        "single": (SINGLE, [torch.tensor([[-0.0], [0.0], [1.0], [-0.0]])]),
    }[kind]
    backend.start_over()
    compiled = torch.compile(_all(functions), backend=backend, dynamic=dynamic, fullgraph=True)
    for number, (mine, theirs) in enumerate(
        zip(compiled(*inputs), _all(functions)(*inputs), strict=True)
    ):
        zeros = (mine == 0) & (theirs == 0)
        wrong = zeros & (mine.signbit() != theirs.signbit())
        name = getattr(functions[number], "__name__", "")
        assert not wrong.any(), f"{kind} {number} {name}: eager has {theirs[wrong]}"
