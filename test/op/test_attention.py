"""Attention: the fused operator and the forms models write by hand, masks, grouped heads, RoPE."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compare import Rule, check_tensor
from dicp.config import Config
from dicp.testing import T, op

Q, KV = (2, 4, 9, 16), (2, 4, 13, 16)
HEADS = (4, 2, 16)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
WITH_BF16 = (torch.float32, torch.float64, torch.bfloat16)
ONE = ("contiguous",)
aten = torch.ops.aten


LARGE_SCORES = 4.0
"""The floor where scores reach 100: exp makes a rounding of the last bit a hundred times larger,
and float64 has no finer reference than eager, whose products add up in another order. With AVX2
gradients on topsgraph are 3.8 times a floor of 1."""


def attend(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ONE)
    options.setdefault("fixed", HEADS)
    return op(name, fn, *specs, strides=False, **options)


def by_hand(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v


def hidden_rows(q: Any, k: Any) -> Any:
    """Of three rows one is hidden as a whole, one but for its first keys, by the lowest number."""
    rows, keys = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    rows = rows[:, None] % 3
    hidden = (rows == 1) | (rows == 2) & (keys > 4)
    return torch.where(hidden, torch.finfo(torch.float32).min, 0.0)[None, None].to(q.dtype)


def by_hand_scaled_query(q: Any, k: Any, v: Any) -> Any:
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


def in_float(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def repeat_heads(x: Any, count: int) -> Any:
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, count, n, d).reshape(b, h * count, n, d)


def distances(q: Any) -> Any:
    rows = torch.arange(q.shape[2], device=q.device)
    return rows[:, None] - rows


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(q: Any, k: Any, positions: Any) -> Any:
    steps = torch.arange(0, q.shape[-1], 2, device=q.device)
    frequencies = 1.0 / (10000 ** (steps / q.shape[-1]))
    angles = positions[:, None].to(torch.float32) * frequencies
    table = torch.cat((angles, angles), -1)
    cos, sin = table.cos().to(q.dtype), table.sin().to(q.dtype)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rope_complex(x: Any) -> Any:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turn = torch.polar(
        torch.ones(x.shape[-2], x.shape[-1] // 2),
        torch.arange(x.shape[-2], device=x.device)[:, None] * torch.ones(x.shape[-1] // 2),
    )
    return torch.view_as_real(pairs * turn).flatten(-2)


def self_attention(x: Any, w: Any, out: Any) -> Any:
    q, k, v = (F.linear(x, w)).chunk(3, -1)
    split = [t.view(*t.shape[:-1], 4, -1).transpose(1, 2) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*split, is_causal=True)
    return F.linear(y.transpose(1, 2).flatten(2), out)


SDPA = F.scaled_dot_product_attention
CASES = [
    attend(
        "sdpa", SDPA, Q, KV, KV, dtypes=WITH_BF16, layouts=("contiguous", "transposed", "expanded")
    ),
    attend("sdpa_causal", lambda q, k, v: SDPA(q, k, v, is_causal=True), Q, Q, Q, dtypes=WITH_BF16),
    attend(
        "sdpa_bool_mask",
        lambda q, k, v, m: SDPA(q, k, v, m),
        Q,
        KV,
        KV,
        torch.ones(9, 13, dtype=torch.bool).tril(4),
        fixed=(*HEADS, 9, 13),
    ),
    attend(
        "sdpa_float_mask",
        lambda q, k, v, m: SDPA(q, k, v, m),
        Q,
        KV,
        KV,
        T((1, 4, 9, 13)),
        grad=False,
    ),
    attend(
        "sdpa_fully_masked_row",
        lambda q, k, v, m: SDPA(q, k, v, m),
        Q,
        KV,
        KV,
        torch.arange(9)[:, None].expand(9, 13) > 0,
        fixed=(*HEADS, 9, 13),
        grad=False,
    ),
    attend("sdpa_scale", lambda q, k, v: SDPA(q, k, v, scale=0.7), Q, KV, KV),
    attend(
        "sdpa_gqa",
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        Q,
        (2, 2, 13, 16),
        (2, 2, 13, 16),
    ),
    attend(
        "sdpa_scores_beyond_float16",
        lambda q, k, v: (SDPA(q * 300, k * 300, v), SDPA(q * 30, k, v)),
        Q,
        KV,
        KV,
        dtypes=(torch.float16, torch.bfloat16),
        grad=False,
    ),
    attend("sdpa_3d", SDPA, (4, 9, 16), (4, 13, 16), (4, 13, 16)),
    attend("sdpa_value_size", SDPA, Q, KV, (2, 4, 13, 24), fixed=(*HEADS, 24)),
    attend("sdpa_one_query", SDPA, (2, 4, 1, 16), KV, KV, grad=False),
    attend("by_hand", by_hand, Q, KV, KV, dtypes=WITH_BF16, layouts=("contiguous", "transposed")),
    attend("by_hand_mask", by_hand, Q, KV, KV, T((1, 1, 9, 13)), dtypes=F32_F64),
    attend("by_hand_scaled_query", by_hand_scaled_query, Q, KV, KV),
    attend("softmax_in_float", in_float, Q, KV, KV, dtypes=(torch.float32, torch.bfloat16)),
    attend(
        "gqa_by_hand",
        lambda q, k, v: by_hand(q, repeat_heads(k, 2), repeat_heads(v, 2)),
        Q,
        (2, 2, 13, 16),
        (2, 2, 13, 16),
    ),
    attend(
        "rope",
        rope,
        Q,
        Q,
        T((9,), 0, 50, dtype=torch.int64, grad=False, layout=False),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    attend("rope_complex", rope_complex, Q, dtypes=F32, expect="native"),
    attend(
        "self_attention",
        self_attention,
        (2, 9, 32),
        (96, 32),
        (32, 32),
        dtypes=F32_F64,
        fixed=(32, 96),
        floor=LARGE_SCORES,
    ),
    attend(
        "multi_head_attention",
        lambda x, w, b, o, c: F.multi_head_attention_forward(
            x, x, x, 32, 4, w, b, None, None, False, 0.0, o, c, training=False, need_weights=False
        )[0],
        (9, 2, 32),
        (96, 32),
        (96,),
        (32, 32),
        (32,),
        fixed=(32, 96),
        floor=LARGE_SCORES,
    ),
    attend(
        "sliding_window",
        lambda q, k, v: by_hand(q, k, v, torch.where(distances(q).abs() < 3, 0.0, float("-inf"))),
        Q,
        Q,
        Q,
    ),
    attend("hidden_rows", lambda q, k, v: by_hand(q, k, v, hidden_rows(q, k)), Q, KV, KV),
    attend(
        "alibi",
        lambda q, k, v: by_hand(q, k, v, -torch.arange(k.shape[2], device=k.device).flip(0) * 0.1),
        Q,
        KV,
        KV,
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


EXACT = ("cpugraph", "topsgraph", "ascendgraph")
"""Targets whose backward does not read the rounded log-sum-exp of a row of large scores."""
SANITIZED = any(flag.startswith("-fsanitize") for flag in Config.from_env().cxx_flags)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (2, 2), (64, 1), (64, 64), (64, 400)])
def test_gradients_of_large_scores(rows: int, keys: int, backend_name: str) -> None:
    # A fused backward that reads a log-sum-exp, which float32 rounds, is off by that rounding.
    # Sanitizers keep g++ from vectorizing sums: one accumulator adds up all keys.
    floor = 4.0 if SANITIZED else 1.0
    rule = Rule(floor=floor if backend_name in EXACT else 16.0)
    check_gradients(rows, keys, (1.0, 30.0, 1000.0), backend_name, rule)


@pytest.mark.parametrize(("keys", "largest"), [(64, (1e5,)), (1000, (60.0, 1e3, 1e5))])
def test_gradients_of_many_keys_and_huge_scores(
    keys: int, largest: tuple[float, ...], backend_name: str
) -> None:
    if backend_name not in EXACT:
        pytest.skip("reads a log-sum-exp that is rounded to float32")
    check_gradients(64, keys, largest, backend_name, Rule())


def test_gradients_of_huge_scores_with_symbolic_heads(backend_name: str) -> None:
    """The library, which takes heads of symbolic sizes, reads a rounded log-sum-exp; the root mean
    square shows it over many heads."""
    if backend_name not in EXACT:
        pytest.skip("reads a log-sum-exp that is rounded to float32")
    run = torch.compile(by_hand_divided, backend=backend_name, dynamic=True)
    for mine, theirs, real in gradients_of(run, 16, 16, 1e3, heads=(64, 4)):
        assert (mine - real).square().mean() < 2 * (theirs - real).square().mean()


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_rows_of_infinite_scores(infinite: float, backend_name: str) -> None:
    """A row with a score of +inf is NaN; one of which all are -inf is hidden."""

    def both(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in given]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, towards.to(dtype))]

    torch.manual_seed(0)
    given = [torch.rand(2, 2, 9, 16), torch.randn(2, 2, 13, 16), torch.randn(2, 2, 13, 16)]
    given[1][1, :, 4 if infinite > 0 else slice(None), 0] = infinite
    towards = torch.randn(2, 2, 9, 16)
    eager, exact = both(SDPA, torch.float32), both(SDPA, torch.float64)
    got = both(torch.compile(SDPA, backend=backend_name), torch.float32)
    for mine, theirs, real in zip(got, eager, exact, strict=True):
        assert not check_tensor(mine, theirs, real, Rule(strides=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_unfused_rows_of_infinite_scores_are_nan(
    dtype: torch.dtype, backend_name: str, dynamic: bool
) -> None:
    """Softmax of -inf alone is NaN, also where infinite queries, not a mask, made the scores."""
    torch.manual_seed(0)
    q, k, v = (torch.rand(2, 4, 32, 32).to(dtype) for _ in range(3))
    q[0, 0, 3, 0] = -math.inf
    got = torch.compile(by_hand, backend=backend_name, dynamic=dynamic)(q, k, v)
    exact = by_hand(*(x.double() for x in (q, k, v)))
    assert not check_tensor(got, by_hand(q, k, v), exact, Rule(strides=False))


def filled(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return (q @ k.mT / 4.0).masked_fill(~visible, -math.inf).softmax(-1) @ v


def added(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return by_hand(q, k, v, torch.where(visible, 0.0, -math.inf).to(q.dtype))


def causal_filled(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return filled(q, k, v, torch.ones(visible.shape, dtype=torch.bool).tril())


def causal_added(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return added(q, k, v, torch.ones(visible.shape, dtype=torch.bool).tril())


def filled_lowest(q: Any, k: Any, v: Any, visible: Any) -> Any:
    lowest = torch.finfo(q.dtype).min
    return (q @ k.mT / 4.0).masked_fill(~visible, lowest).softmax(-1) @ v


def causal_lowest(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return filled_lowest(q, k, v, torch.ones(visible.shape, dtype=torch.bool).tril())


def sdpa_lower_triangle(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return SDPA(q, k, v, torch.ones(visible.shape, dtype=torch.bool).tril())


def sdpa_causal(q: Any, k: Any, v: Any, visible: Any) -> Any:
    return SDPA(q, k, v, is_causal=True)


def check_training(
    fn: Any, compiled: Any, given: list[Any], rest: Sequence[Any], dtype: torch.dtype, case: str
) -> None:
    """Attention and its gradients, compiled, in eager and in float64.

    given: queries, keys and values, that have gradients. rest: further arguments."""

    def both(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in given]
        out = call(*leaves, *rest)
        towards = torch.arange(out.numel()).reshape(out.shape).to(dtype).sin()
        return [out.detach(), *torch.autograd.grad(out, leaves, towards)]

    results = zip(both(compiled, dtype), both(fn, dtype), both(fn, torch.float64), strict=True)
    for mine, theirs, real in results:
        assert not check_tensor(mine, theirs, real, Rule(strides=False)), case


@pytest.mark.parametrize("fn", [SDPA, filled, added], ids=["sdpa", "filled", "added"])
def test_gradients_of_rows_without_a_score(fn: Any, backend_name: str) -> None:
    """Rows whose scores are all -inf, by a mask, by a query or by the keys."""
    compiled = torch.compile(fn, backend=backend_name, dynamic=False)
    for infinite in ("none", "query", "keys"):
        torch.manual_seed(0)
        given = [torch.rand(2, 2, 33, 16), torch.rand(2, 2, 35, 16), torch.randn(2, 2, 35, 16)]
        if infinite == "query":
            given[0][0, 0, 3, 0] = -math.inf
        if infinite == "keys":
            given[1][1, :, :, 0] = -math.inf
        visible = (torch.arange(33)[:, None] % 3 != 1).expand(33, 35)
        check_training(fn, compiled, given, [visible], torch.float32, infinite)


WITHOUT_A_NUMBER = {
    "hidden_nan": (1, (..., 33, 0), math.nan),
    "hidden_inf": (1, (..., 33, 0), math.inf),
    "key_nan": (1, (0, slice(None), 3, 0), math.nan),
    "query_nan": (0, (0, 0, 3, 0), math.nan),
    "query_-inf": (0, (0, 0, 3, 0), -math.inf),
    "keys_-inf": (1, (1, ..., 0), -math.inf),
}
"""Which of queries and keys, where, and what is not a number there."""

MASKS = [filled, causal_filled, added, causal_added, filled_lowest, causal_lowest, SDPA,
         sdpa_lower_triangle, sdpa_causal]  # fmt: skip
FLAGGED = ("tritongraph", "macagraph")
"""Backends that set the causal flag in place of a mask of the lower triangle, which eager adds:
what it hides leaks nothing."""
EXACT_IN_16_BITS = [filled, added, causal_added, filled_lowest, causal_lowest]
"""Ascend's fused operators for 16 bits define rows without a number otherwise for the others."""


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [(fn, torch.float32) for fn in MASKS] + [(fn, torch.bfloat16) for fn in EXACT_IN_16_BITS],
    ids=lambda x: x.__name__ if callable(x) else str(x).removeprefix("torch."),
)
def test_masks_of_scores_that_are_no_numbers(
    fn: Any, dtype: torch.dtype, backend_name: str
) -> None:
    """A score that a mask replaces may be anything, and no gradient flows to it; one to which the
    mask is added stays NaN, as does its row."""
    visible = (torch.arange(34) != 33).expand(34, 34)
    compiled = torch.compile(fn, backend=backend_name, dynamic=False)
    flagged = fn is sdpa_lower_triangle and backend_name in FLAGGED
    reference = sdpa_causal if flagged else fn
    for place, (which, at, number) in WITHOUT_A_NUMBER.items():
        torch.manual_seed(0)
        given = [x.to(dtype).double() for x in (
            torch.rand(2, 2, 34, 16), torch.rand(2, 2, 34, 16), torch.randn(2, 2, 34, 16)
        )]  # fmt: skip
        given[which][at] = number
        plain = [each.to(dtype) for each in given]
        exact = reference(*given, visible)
        assert not check_tensor(
            compiled(*plain, visible), reference(*plain, visible), exact, Rule(strides=False)
        ), place
        if not flagged:
            check_training(fn, compiled, given, [visible], dtype, place)


HIDES_BLOCKS = {
    "window": lambda i, j: (i >= j) & (i - j < 20),
    "keys_after": lambda i, j: j >= i + 40,  # the last queries see no key
    "padded": lambda i, j: (j >= 37) & (j < 101) & (i >= 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [SDPA, filled, added], ids=["sdpa", "filled", "added"])
def test_gradients_of_masks_that_hide_blocks(
    fn: Any, dtype: torch.dtype, backend_name: str
) -> None:
    compiled = torch.compile(fn, backend=backend_name, dynamic=False)
    for name, mask in HIDES_BLOCKS.items():
        torch.manual_seed(0)
        given = [torch.randn(2, 2, 150, 16).to(dtype).double() for _ in range(3)]
        rows, keys = torch.arange(150)[:, None].expand(150, 150), torch.arange(150)
        check_training(fn, compiled, given, [mask(rows, keys)], dtype, name)


@pytest.mark.parametrize("fn", [SDPA, filled, added], ids=["sdpa", "filled", "added"])
def test_gradients_of_hidden_numbers(fn: Any, backend_name: str) -> None:
    """Infinite, large and no numbers, beside which some keys are hidden."""

    def scaled(q: Any, k: Any, v: Any, visible: Any, factor: Any) -> Any:
        return fn(q, k, v, visible) * factor.to(q.dtype)

    compiled = torch.compile(scaled, backend=backend_name, dynamic=False)
    visible = HIDES_BLOCKS["window"](torch.arange(150)[:, None], torch.arange(150))
    for number in (math.nan, math.inf, 1e30):
        for place in ("query", "key", "value", "gradient"):
            torch.manual_seed(0)
            given = [torch.randn(2, 2, 150, 16) for _ in range(3)]
            factor = torch.ones(150, 1)
            numbers = {"query": given[0][:, 1], "key": given[1][:, 1], "value": given[2][:, 1]}
            numbers.get(place, factor)[..., 70, :] = number
            case = f"{number} in {place}"
            check_training(scaled, compiled, given, [visible, factor], torch.float32, case)


@pytest.mark.parametrize("fn", [filled, added], ids=["filled", "added"])
def test_attention_of_float64_written_out(fn: Any, backend_name: str) -> None:
    """Targets without products of float64 leave it unfused: a hidden row is NaN."""
    torch.manual_seed(0)
    given = [torch.randn(2, 2, 5, 16, dtype=torch.float64) for _ in range(3)]
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    visible[2] = False
    compiled = torch.compile(fn, backend=backend_name, dynamic=False)
    mine, theirs = compiled(*given, visible), fn(*given, visible)
    assert theirs[:, :, 2].isnan().all()
    assert not check_tensor(mine, theirs, None, Rule(strides=False))


def by_hand_divided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.mT / 4.0, -1) @ v


def check_gradients(
    rows: int, keys: int, largest: Iterable[float], backend_name: str, rule: Rule
) -> None:
    run = torch.compile(by_hand_divided, backend=backend_name)
    for score in largest:
        for mine, theirs, real in gradients_of(run, rows, keys, score):
            assert not check_tensor(mine, theirs, real, rule), score


def gradients_of(
    compiled: Any, rows: int, keys: int, largest: float, heads: tuple[int, int] = (2, 2)
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each gradient of `by_hand_divided` compiled, in eager, in float64.

    Probabilities that are recomputed from a log-sum-exp are off by its rounding error.
    """

    def gradients(call: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [each.to(dtype).requires_grad_() for each in given]
        return torch.autograd.grad(call(*leaves), leaves, towards.to(dtype))

    torch.manual_seed(0)
    q, k, v = (torch.randn(*heads, n, 16) for n in (rows, keys, keys))
    given = [q * largest / (q @ k.mT / 4.0).abs().max(), k, v]
    towards = torch.randn(*heads, rows, 16)
    kinds = (
        (compiled, torch.float32),
        (by_hand_divided, torch.float32),
        (by_hand_divided, torch.float64),
    )
    return zip(*(gradients(call, dtype) for call, dtype in kinds), strict=True)
