"""Losses, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.testing import T, index, op

X = (6, 11)
F32_F64 = (torch.float32, torch.float64)
WITH_BF16 = (torch.float32, torch.float64, torch.bfloat16)
PROBABILITY = T(X, 0.05, 0.95)
TARGET = T(X, 0.0, 1.0, grad=False)


def loss(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ("contiguous", "transposed"))
    return op(name, fn, *specs, **options)


CASES = [
    loss("cross_entropy", F.cross_entropy, X, index((6,), 11), dtypes=WITH_BF16),
    loss(
        "cross_entropy_ignore",
        lambda x, t: F.cross_entropy(x, t, ignore_index=2),
        X,
        index((6,), 4),
    ),
    loss(
        "cross_entropy_all_ignored",
        lambda x, t: F.cross_entropy(x, t, ignore_index=0),
        X,
        index((6,), 1),
    ),
    loss(
        "cross_entropy_smooth",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        X,
        index((6,), 11),
    ),
    loss(
        "cross_entropy_weight",
        lambda x, t, w: F.cross_entropy(x, t, w),
        X,
        index((6,), 11),
        T((11,), 0.5, 2, grad=False),
    ),
    loss(
        "cross_entropy_none",
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        X,
        index((6,), 11),
    ),
    loss("cross_entropy_image", F.cross_entropy, (2, 5, 4, 3), index((2, 4, 3), 5), fixed=(5,)),
    loss("cross_entropy_probabilities", F.cross_entropy, X, TARGET),
    loss(
        "language_model_loss",
        lambda x, t: F.cross_entropy(
            x[:, :-1].reshape(-1, x.shape[-1]).float(), t[:, 1:].reshape(-1)
        ),
        (2, 6, 11),
        index((2, 6), 11),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    loss(
        "nll", lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="sum"), X, index((6,), 11)
    ),
    loss(
        "nll_2d",
        lambda x, t: F.nll_loss(F.log_softmax(x, 1), t),
        (2, 5, 4, 3),
        index((2, 4, 3), 5),
        fixed=(5,),
    ),
    loss("mse", F.mse_loss, X, X, dtypes=WITH_BF16),
    loss("mse_none", lambda x, y: F.mse_loss(x, y, reduction="none"), X, X),
    loss("l1", F.l1_loss, X, X),
    loss("smooth_l1", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), X, X),
    loss("huber", lambda x, y: F.huber_loss(x, y, delta=0.7), X, X),
    loss("bce", F.binary_cross_entropy, PROBABILITY, TARGET),
    loss("bce_logits", F.binary_cross_entropy_with_logits, X, TARGET),
    loss(
        "bce_logits_weighted",
        lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w),
        X,
        TARGET,
        T((11,), 0.5, 2, grad=False),
    ),
    loss("kl_div", lambda x, t: F.kl_div(F.log_softmax(x, 1), t, reduction="batchmean"), X, TARGET),
    loss(
        "hinge_embedding",
        F.hinge_embedding_loss,
        X,
        torch.tensor([1.0] * 5 + [-1.0] * 6),
        fixed=(11,),
    ),
    loss(
        "margin_ranking",
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(x.shape)),
        X,
        X,
        dtypes=F32_F64[:1],
    ),
    loss("triplet", F.triplet_margin_loss, X, X, X),
    loss(
        "cosine_embedding", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(x.shape[0])), X, X
    ),
    loss("poisson_nll", F.poisson_nll_loss, X, TARGET),
    loss("gaussian_nll", F.gaussian_nll_loss, X, X, T(X, 0.5, 2), fullgraph=False, graphs=6),
    loss("soft_margin", F.soft_margin_loss, X, T(X, 0.5, 1, grad=False)),
    loss("multi_margin", F.multi_margin_loss, X, index((6,), 11), layouts=("contiguous",)),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_at_nan(dtype: torch.dtype, backend: Any) -> None:
    """NaN has no gradient of zero, and infinity none of NaN."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(x, x.detach().nan_to_num(1, 2, 3) / 2)

    numbers = [math.nan, math.inf, -math.inf, 0.3, 0.05, -2.0] * 7
    x = torch.tensor(numbers, dtype=dtype, device=backend.device).requires_grad_()
    run = torch.compile(fn, backend=backend)
    (mine,), (theirs,) = (torch.autograd.grad(f(x), x) for f in (run, fn))
    torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_small_gradients_of_soft_margins(reduction: str, backend: Any) -> None:
    """Beyond large margins the gradient is a small number, not a difference of large ones."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.soft_margin_loss(x, x.detach().sign(), reduction=reduction).sum()

    x = torch.linspace(-30, 30, 18, device=backend.device).requires_grad_()
    run = torch.compile(fn, backend=backend)
    (mine,), (theirs,) = (torch.autograd.grad(f(x), x) for f in (run, fn))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)


MARGIN_LOSSES = {
    "multi": lambda x, i: F.multi_margin_loss(x, i[:, 0], reduction="sum"),
    "multi_squared": lambda x, i: F.multi_margin_loss(x, i[:, 0], 2, 0.5, x.detach()[0].abs()),
    "multi_each": lambda x, i: F.multi_margin_loss(x, i[:, 0], margin=2, reduction="none"),
    "multi_of_a_row": lambda x, i: F.multi_margin_loss(x[0], i[0, 0], reduction="none"),
    "multilabel": lambda x, i: F.multilabel_margin_loss(x, i),
}


@pytest.mark.parametrize("name", MARGIN_LOSSES)
@pytest.mark.parametrize("special", [0.0, math.nan, math.inf])
def test_margins_of_zero_and_nan(name: str, special: float, backend: Any) -> None:
    """Eager skips margins that are not positive, NaN included."""
    loss = MARGIN_LOSSES[name]
    labels = torch.tensor([[0, 2, -1], [1, 0, 2], [2, -1, 0]])
    results = []
    for function in (torch.compile(loss, backend=backend), loss):
        x = torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.5, -1.0], [0.0, 3.0, -0.0]])
        x[1, 2] = special
        x.requires_grad_()
        value = function(x, labels)
        results.append((value, *torch.autograd.grad(value.sum(), x)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", MARGIN_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_margins_under_autocast(name: str, dtype: torch.dtype, backend: Any) -> None:
    """Autocast computes these losses of 16-bit values in float32."""
    loss = MARGIN_LOSSES[name]
    labels = torch.tensor([[0, 2, -1], [1, 0, 2]])
    results = []
    for function in (torch.compile(loss, backend=backend), loss):
        x = torch.linspace(-2, 1, 6, dtype=dtype).view(2, 3).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = function(x, labels)
        results.append((value, *torch.autograd.grad(value.sum(), x)))
    torch.testing.assert_close(*results)


EMPTY_LOSSES = F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss


def test_losses_of_nothing(backend_name: str) -> None:
    def losses(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        return [
            fn(x, target, reduction=reduction)
            for fn in EMPTY_LOSSES
            for reduction in ("mean", "sum")
        ]

    x, target = torch.ones(0, 3, requires_grad=True), torch.ones(0, 3)
    got = torch.compile(losses, backend=backend_name, fullgraph=True)(x, target)
    torch.testing.assert_close(got, losses(x, target), equal_nan=True)
    assert torch.autograd.grad(sum(got), x)[0].shape == x.shape  # type: ignore[arg-type]
