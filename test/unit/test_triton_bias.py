"""A learned bias of positions (T5's), added to the scores: its gradient is the fused operator's.

A GPU's memory-efficient attention is the one operator of PyTorch that gives it. Without a GPU
its place is taken by kernels for the host that keep its contract: which bias it takes, where its
results lie, that the gradient of the bias is one value per score, its rows padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compare import Rule, check_tensor
from dicp.dynamo_bridge.backend import Backend
from dicp.fused_attention import FusedAttention
from dicp.gpu.library import GPU_ATTENTION
from dicp.vendor.triton.target import TritonTarget

pytestmark = pytest.mark.sweep

aten = torch.ops.aten
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
NAMES = [str(EFFICIENT), str(aten._scaled_dot_product_efficient_attention_backward.default)]


# ---- the operator, on the host -------------------------------------------------------------------


def scores(q: Tensor, k: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    assert bias.dtype == q.dtype and bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.stride(-1) == 1 and all(s % 8 == 0 for s in bias.stride()[:-1])
    assert scale is not None
    return q.float() @ k.float().transpose(-2, -1) * scale + bias.float()


DROPPED = 0.25


def kept(like: Tensor) -> Tensor:
    """Which probabilities stay where some are dropped, with the factor for those."""
    draw = torch.rand(like.shape, generator=torch.Generator().manual_seed(5))
    return (draw >= DROPPED) / (1 - DROPPED)


def laid_out(x: Tensor) -> Tensor:
    """As the operator's results lie: (batch, rows, heads, size) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert not is_causal and dropout_p in (0.0, DROPPED)
    s = scores(q, k, bias, scale)
    sums = s.logsumexp(-1)
    partitions = s.softmax(-1).nan_to_num(0.0)  # no keys: a row of zeros
    partitions = partitions * kept(partitions) if dropout_p else partitions
    rows = -(-q.shape[2] // 32) * 32
    seed = torch.zeros((), dtype=torch.long)
    out = laid_out((partitions @ v.float()).to(q.dtype))
    return out, F.pad(sums, (0, rows - q.shape[2])), seed, seed.clone()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, dropout_p: float, wanted: list[bool], is_causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    partitions = (scores(q, k, bias, scale) - sums[..., : q.shape[2], None]).exp()
    wide = grad.float()
    delta = (wide * out.float()).sum(-1, keepdim=True)
    left = kept(partitions) if dropout_p else torch.ones(())
    ds = partitions * (wide @ v.float().transpose(-2, -1) * left - delta)
    dq, dk = ds @ k.float() * scale, ds.transpose(-2, -1) @ q.float() * scale
    dv = (partitions * left).transpose(-2, -1) @ wide
    padded = F.pad(ds.to(q.dtype), (0, -ds.shape[-1] % 16), value=float("nan"))
    dbias = padded[..., : ds.shape[-1]] if wanted[3] else None
    return *(laid_out(x.to(q.dtype)) for x in (dq, dk, dv)), dbias


def as_a_gpu_chooses(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """What PyTorch does with a mask before it calls the operator."""
    mask = options["attn_mask"]
    if mask.stride(-1) != 1:
        return aten._scaled_dot_product_attention_math(q, k, v, mask, scale=options["scale"])[0]
    columns = mask.shape[-1]
    if columns % 8:
        mask = F.pad(mask, (0, -columns % 8))[..., :columns]
    mask = mask.expand(*q.shape[:3], k.shape[2])
    dropout_p = options["dropout_p"]
    return EFFICIENT(q, k, v, mask, False, dropout_p, scale=options["scale"])[0]


ON_HOST = replace(GPU_ATTENTION, widest_trained_head=None)
"""The kernels above take heads of any size, also of one known at run time alone."""


def set_attention(monkeypatch: pytest.MonkeyPatch, attention: FusedAttention) -> None:
    """Has the target state `attention` for CPU tensors, too."""
    facts = replace(TritonTarget.facts, attention={"cpu": attention})
    monkeypatch.setattr(TritonTarget, "facts", facts)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(F, "scaled_dot_product_attention", as_a_gpu_chooses)
    set_attention(monkeypatch, ON_HOST)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield


# ---- what is written out -------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, factor: float = 1.0) -> Tensor:
    s = q @ k.transpose(-2, -1)
    s = s * factor + bias if factor != 1.0 else s + bias
    return weights(s) @ v


def weights(s: Tensor) -> Tensor:
    """In 32 bits at least, as models write it."""
    wide = s if s.dtype == torch.float64 else s.float()
    return F.softmax(wide, dim=-1).type_as(s)


def scaled(*inputs: Tensor) -> Tensor:
    return attend(*inputs, factor=0.25)


def twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Two layers that share their bias."""
    return attend(attend(q, k, v, bias).sin(), k, v, bias)


def looked_up(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """One number for every head and distance, as T5 has them."""
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    distance = (columns[None, :] - rows[:, None]).clamp(-3, 3) + 3
    return attend(q, k, v, F.embedding(distance, table).permute(2, 0, 1).unsqueeze(0))


def hidden(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The mask of padding is added after the bias, which lies with the heads last."""
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    none, low = (torch.full((), x, dtype=q.dtype) for x in (0.0, torch.finfo(q.dtype).min))
    padding = torch.where(columns < torch.tensor([[5], [k.shape[2]]]), none, low)
    bias = F.embedding((columns[None, :] - rows[:, None]).clamp(-3, 3) + 3, table)
    s = q @ k.transpose(-2, -1) + bias.permute(2, 0, 1).unsqueeze(0) + padding[:, None, None, :]
    return weights(s) @ v


def in_three_dimensions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) + bias
    return torch.bmm(torch.softmax(s, -1), v.flatten(0, 1))


def inputs(bias: tuple[int, ...], dtype: torch.dtype, columns: int = 13) -> list[Tensor]:
    """Scores of a size at which 32 bits of a row's sum tell its shares as well as eager does."""
    torch.manual_seed(3)
    shapes = [(2, 4, 9, 16), (2, 4, columns, 16), (2, 4, columns, 16), bias]
    return [(torch.randn(s) / 2).to(dtype).requires_grad_() for s in shapes]


def with_gradients(fn: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    out = fn(*args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    learned = [x for x in args if x.requires_grad]
    return [out, *(torch.autograd.grad((out * weights).sum(), learned) if learned else [])]


def check(fn: Callable[..., Tensor], args: list[Tensor], dynamic: bool = False) -> list[str]:
    """The attentions that were called; results and gradients are right."""
    backend = Backend("triton", cache=False)
    torch._dynamo.reset()
    got = with_gradients(torch.compile(fn, backend=backend, dynamic=dynamic), args)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in args]
    truth = with_gradients(fn, exact)
    for mine, eager, real in zip(got, with_gradients(fn, args), truth, strict=True):
        assert check_tensor(mine, eager, real, Rule(floor=4.0, strides=False)) == []
    return [n.op for r in backend.reports for n in r.nodes if "attention" in n.op]


@pytest.mark.parametrize(
    ("fn", "bias"),
    [(attend, (1, 4, 9, 13)), (scaled, (9, 13)), (attend, (2, 1, 1, 13)), (scaled, (2, 4, 9, 13)),
     (looked_up, (7, 4)), (hidden, (7, 4)), (twice, (1, 4, 9, 13))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_is_the_operators(
    fn: Any, bias: Any, dtype: torch.dtype, on_host: None
) -> None:
    found = check(fn, inputs(bias, dtype))
    assert sorted(found) == sorted(NAMES * (2 if fn is twice else 1))


# ---- dropout -------------------------------------------------------------------------------------


def dropping(s: Tensor) -> Tensor:
    return F.dropout(weights(s), DROPPED)


def with_dropout(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return dropping(q @ k.transpose(-2, -1) * 0.25 + bias) @ v


def in_three_dimensions_with_dropout(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) + bias
    return torch.bmm(dropping(s), v.flatten(0, 1))


def shows_what_it_dropped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    left = dropping(q @ k.transpose(-2, -1) + bias)
    return left @ v + left.sum()


def drops_everything(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(weights(q @ k.transpose(-2, -1) + bias), 1.0) @ v


def drops_twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(dropping(q @ k.transpose(-2, -1) + bias), DROPPED) @ v


@pytest.mark.parametrize(
    ("fn", "bias"),
    [(with_dropout, (1, 4, 9, 13)), (with_dropout, (13,)),
     (in_three_dimensions_with_dropout, (8, 9, 13))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_dropped_in_forward_is_dropped_in_backward(
    fn: Any, bias: Any, dtype: torch.dtype, on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = inputs(bias, dtype)
    backend = Backend("triton", cache=False)
    torch._dynamo.reset()
    got = with_gradients(torch.compile(fn, backend=backend), args)
    assert [n.op for r in backend.reports for n in r.nodes if "attention" in n.op] == NAMES
    # The operator draws other numbers than eager: eager is given what the operator drew.
    monkeypatch.setattr(F, "dropout", lambda x, p: x * kept(x).to(x.dtype))
    exact = [x.detach().double().requires_grad_() for x in args]
    truth = with_gradients(fn, exact)
    for mine, eager, real in zip(got, with_gradients(fn, args), truth, strict=True):
        assert check_tensor(mine, eager, real, Rule(floor=4.0, strides=False)) == []


@pytest.mark.parametrize("fn", [shows_what_it_dropped, drops_everything, drops_twice])
def test_dropout_that_the_operator_does_not_know_stays(fn: Any, on_host: None) -> None:
    backend = Backend("triton", cache=False)
    torch._dynamo.reset()
    with_gradients(torch.compile(fn, backend=backend), inputs((4, 9, 13), torch.float32))
    assert not [n.op for r in backend.reports for n in r.nodes if "attention" in n.op]


@pytest.mark.parametrize(("own", "names"), [(False, NAMES), (True, [])])
def test_eagers_own_numbers_are_left_to_eager(own: bool, names: list[str], on_host: None) -> None:
    backend = Backend("triton", cache=False, fallback_random=own)
    torch._dynamo.reset()
    args = inputs((4, 9, 13), torch.float32)
    torch.manual_seed(1)
    got = with_gradients(torch.compile(with_dropout, backend=backend), args)
    assert [n.op for r in backend.reports for n in r.nodes if "attention" in n.op] == names
    torch.manual_seed(1)
    want = with_gradients(with_dropout, args)
    near = [torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True)]
    assert all(near) is own


def test_dropout_without_a_gradient_is_the_operators_too(on_host: None) -> None:
    backend = Backend("triton", cache=False)
    torch._dynamo.reset()
    args = [x.detach() for x in inputs((1, 4, 9, 13), torch.float32)]
    with torch.no_grad():
        got = torch.compile(with_dropout, backend=backend)(*args)
        assert [n.op for r in backend.reports for n in r.nodes if "attention" in n.op] == NAMES[:1]
        q, k, v, bias = args
        s = weights(q @ k.transpose(-2, -1) * 0.25 + bias)
        torch.testing.assert_close(got, (s * kept(s)) @ v)


# ---- what stays written out ----------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "names"), [(8, NAMES), (13, [])])
def test_sizes_that_change(columns: int, names: list[str], on_host: None) -> None:
    """Rows that would be padded by a number known at run time alone stay written out."""
    assert check(scaled, inputs((4, 9, columns), torch.float32, columns), dynamic=True) == names


def test_heads_and_batch_in_one_dimension(on_host: None) -> None:
    assert check(in_three_dimensions, inputs((8, 9, 13), torch.float32)) == NAMES


def test_rows_without_keys_and_keys_without_weight(on_host: None) -> None:
    args = inputs((4, 9, 13), torch.float32)
    with torch.no_grad():
        args[3][:, 1] = float("-inf")
        args[3][2, :, 5] = float("-inf")
    assert check(attend, args) == NAMES


def test_a_batch_that_the_operator_cuts_stays_written_out(
    on_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attention(monkeypatch, replace(ON_HOST, largest_batch=1))
    assert check(attend, inputs((4, 9, 13), torch.float32)) == []


def test_where_only_the_bias_learns(on_host: None) -> None:
    *heads, bias = inputs((4, 9, 13), torch.float32)
    assert check(attend, [*(x.detach() for x in heads), bias]) == NAMES


def test_a_wider_bias_keeps_the_gradient_that_it_has(on_host: None) -> None:
    """The operator would round every score's gradient before they are summed over the batch."""
    q, k, v, bias = inputs((1, 4, 9, 13), torch.bfloat16)
    wide = bias.detach().float().requires_grad_()

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) + bias, -1).to(q.dtype) @ v

    assert check(fn, [q, k, v, wide]) == []


def test_an_operator_without_that_gradient_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own flash attention takes a bias, and gives nothing for it."""
    host = TritonTarget.facts.attention["cpu"]
    set_attention(monkeypatch, replace(host, marks_hidden_rows=lambda q, k, v: True))
    assert check(attend, inputs((1, 4, 9, 13), torch.float32)) == []
    *heads, bias = inputs((1, 4, 9, 13), torch.float32)
    assert len(check(attend, [*heads, bias.detach()])) == 2


def test_the_host_adds_one_mask_after_the_other() -> None:
    *heads, table = inputs((7, 4), torch.float32)
    assert check(hidden, [*heads, table.detach()]) == []


# ---- masks in a wider type -----------------------------------------------------------------------


LEAST = torch.finfo(torch.float32).min


def wide(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = (q @ k.transpose(-2, -1)) * 0.25 + bias
    return torch.softmax(s, -1).to(q.dtype) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, low: float = LEAST) -> Tensor:
    none, hidden = (torch.full((), x) for x in (0.0, low))
    return wide(q, k, v, torch.where(keep != 0, none, hidden))


def multiplied(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return wide(q, k, v, (1.0 - keep.long()) * LEAST)


def softly(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return chosen(q, k, v, keep, low=-1.3)


def infinitely(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return chosen(q, k, v, keep, low=float("-inf"))


@pytest.mark.parametrize("fn", [chosen, multiplied, infinitely])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("train", [False, True])
def test_a_wider_mask_that_only_hides_goes_along(
    fn: Any, dtype: torch.dtype, train: bool, on_host: None
) -> None:
    *heads, keep = inputs((4, 9, 13), dtype)
    keep = keep.detach() > 0
    keep[2, 3] = train  # nothing: every score is as low, and eager's shares are equal
    fits = dtype == torch.bfloat16 or fn is infinitely
    heads = [x.requires_grad_(train) for x in heads]
    assert check(fn, [*heads, keep.float()]) == (NAMES[: 1 + train] if fits else [])


@pytest.mark.parametrize("fn", [wide, softly])
@pytest.mark.parametrize("train", [False, True])
def test_a_wider_bias_is_not_rounded(fn: Any, train: bool, on_host: None) -> None:
    *heads, bias = inputs((4, 9, 13), torch.bfloat16)
    heads = [x.requires_grad_(train) for x in heads]
    assert check(fn, [*heads, bias.detach().float() + 16.01]) == []
