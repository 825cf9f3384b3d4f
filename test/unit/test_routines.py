"""Our own kernels for products and attention: taken where they fit, and right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dicp.compare import assert_matches
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.loop.lowering import RuleTable
from dicp.target import LowerContext
from dicp.vendor.cpu import CpuTarget
from dicp.vendor.cpu.calibration import PROBLEMS
from dicp.vendor.cpu.routines import choice, product
from dicp.vendor.cpu.routines.product import variant
from dicp.vendor.cpu.target import rules_by
from dicp.vendor.cpu.thresholds import WIDE_CONVOLUTIONS
from dicp.vendor.cpu.toolchain import has_feature

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("shared_builds")]

DTYPES = {"float32": "", "bfloat16": "_bf16"}
"""Element types of the routines -> how names of their kernels end."""
by_dtype = pytest.mark.parametrize("dtype", [getattr(torch, n) for n in DTYPES], ids=list(DTYPES))


def named(routine: str, dtype: torch.dtype) -> str:
    return routine + DTYPES[str(dtype).removeprefix("torch.")]


class PastBlas(CpuTarget):
    """The host where BLAS is the slower library, oneDNN has kernels for bfloat16, and convolutions
    are chosen as with AVX-512, whatever this one is."""

    facts = replace(CpuTarget.facts, in_float32={})

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        return rules_by(frozenset(PROBLEMS), frozenset(PROBLEMS))

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        with (
            mock.patch.object(choice, "limits", lambda: WIDE_CONVOLUTIONS),
            mock.patch.object(product, "has_kernels", lambda dtype: True),
        ):
            program = super().lower(gm, context)
        self.steps += [str(s.get("kernel", s.get("call"))) for s in program.serialized["steps"]]
        return program


@pytest.fixture
def by_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The routine of a product is chosen as without tile registers."""
    monkeypatch.setattr(product, "has_tiles", lambda: False)


@pytest.fixture(autouse=True)
def without_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 products as on processors without tile registers."""
    monkeypatch.setattr(product, "has_split_products", lambda dtype: False)


def check(
    tmp_path: Path, fn: Callable[..., Tensor], *inputs: Any, dynamic: bool | None = False,
    config: Config | None = None, later: Sequence[Any] = (),
) -> list[str]:  # fmt: skip
    """The steps of the compiled `fn`, whose result and gradients are as good as eager's.

    `later`: the inputs of a second call.
    """
    target, config = PastBlas(), config or Config(cache_dir=tmp_path)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, example_inputs, target, config, lambda report: None)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    for given in filter(len, (inputs, later)):
        seen = [_run(f, xs) for f, xs in (
            (compiled, given), (fn, given), (fn, [_wide(x) for x in given])
        )]  # fmt: skip
        for k, (got, eager, wide) in enumerate(zip(*seen, strict=True)):
            assert_matches(got, eager, wide, name="output" if k == 0 else f"gradient {k}")
    return target.steps


def _wide(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def _run(fn: Callable[..., Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    result = fn(*inputs)
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(result.square().sum(), wanted) if wanted else ()
    return [result.detach(), *grads]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@by_dtype
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(2, 3, 5), (48, 32, 64), (100, 1101, 33), (13, 1, 300), (30, 3100, 17)],
)
def test_products(
    tmp_path: Path, rows: int, depth: int, columns: int, symbolic: bool, dtype: torch.dtype
) -> None:
    """Whole and partial tiles, sums longer than one sweep, transposed operands in the backward."""
    kinds = ("product", "product_any_rows", "product_transposed", "dots", "axpys")
    names = [named(f"dicp_{kind}", dtype) for kind in kinds]
    weight = torch.nn.Parameter(leaf(depth, columns, dtype=dtype))
    steps = check(tmp_path, torch.mm, leaf(rows, depth, dtype=dtype), weight, dynamic=symbolic)
    assert sum(map(steps.count, names)) == 3, steps
    batches = leaf(3, rows, depth, dtype=dtype), leaf(3, depth, columns, dtype=dtype)
    steps = check(tmp_path, torch.bmm, *batches, dynamic=symbolic)
    most = 2 if dtype == torch.float32 else 1
    ours = [n == 1 or symbolic or n <= most or n >= 4 for n in (rows, depth)]
    in_place = 1  # the gradient of the left operand reads the right one, however few its rows are
    assert sum(map(steps.count, names)) == sum(ours) + in_place, steps


@by_dtype
def test_operands_are_read_as_they_lie(tmp_path: Path, dtype: torch.dtype) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a[::2, 1:].t() @ b[:, ::3]

    def transposed(a: Tensor, b: Tensor) -> Tensor:
        return a[:, 1:].t() @ b[:, 1:].t()

    in_place = variant(dtype, 59, 75, (1, 41))
    for function, kind in ((product, "product"), (transposed, in_place)):
        a, b = torch.randn(20, 31).to(dtype), torch.randn(10, 40).to(dtype)
        if function is transposed:
            a, b = torch.randn(41, 60).to(dtype), torch.randn(75, 42).to(dtype)
        assert check(tmp_path, function, a, b) == [named(f"dicp_{kind}", dtype)], "no copy is made"
    expanded = torch.randn(1, 7, 9).to(dtype).expand(5, 7, 9)
    steps = check(tmp_path, torch.bmm, expanded, torch.randn(5, 9, 4).to(dtype))
    assert steps == [named("dicp_product", dtype)]


def test_products_of_any_size_but_in_halves_of_heavy_turned_operands(tmp_path: Path) -> None:
    def transposed(a: Tensor, b: Tensor) -> Tensor:
        return a.t() @ b

    x, w = leaf(530, 600), torch.nn.Parameter(leaf(600, 530))
    steps = check(tmp_path, torch.mm, x, w)
    assert steps.count("dicp_product") == 3, steps
    split_k = [leaf(1100, 1000, dtype=torch.bfloat16).detach() for _ in range(2)]
    assert not any("dicp" in s for s in check(tmp_path, transposed, *split_k))
    split_k = [leaf(300, 1000, dtype=torch.bfloat16).detach() for _ in range(2)]
    assert check(tmp_path, transposed, *split_k) == ["dicp_product_bf16"]


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "neither": lambda x: torch.stack([x, x], -1)[..., 0],
}
"""How a matrix may lie in memory."""


@by_dtype
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_operands_however_they_lie(
    tmp_path: Path, left: str, right: str, dtype: torch.dtype
) -> None:
    """Rows at the end of a short tile, few and many of them; sums that are copied in parts."""
    for rows, depth, columns in ((12, 66, 64), (45, 34, 33), (61, 521, 96), (401, 1100, 160)):
        a = LAYOUTS[left](torch.randn(rows, depth).to(dtype))
        b = LAYOUTS[right](torch.randn(depth, columns).to(dtype))
        kind = variant(dtype, rows, columns, b.stride())
        assert check(tmp_path, torch.mm, a, b) == [named(f"dicp_{kind}", dtype)]


@pytest.mark.usefixtures("by_vectors")
def test_few_rows_of_a_window(tmp_path: Path) -> None:
    """Nothing is read past the last row, and halves may begin at any of them."""
    x, w = torch.randn(70, 131), torch.randn(64, 131)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype)[3:, 1:], w.to(dtype)[:, 1:]
        steps = check(tmp_path, lambda a, b: a @ b.t(), a, b)
        assert steps == [named("dicp_product", dtype)]


@pytest.mark.usefixtures("by_vectors")
@by_dtype
@pytest.mark.parametrize("level", ["native", "x86-64-v3", "x86-64"])
def test_few_rows_read_weights_in_place(tmp_path: Path, level: str, dtype: torch.dtype) -> None:
    """Dot products of few rows, the transposed product of up to 64, and rows that fit neither.

    Depths that end within a vector, columns within a strip; every epilogue.
    """
    flags = Config(cache_dir=tmp_path, cxx_flags=(f"-march={level}",))
    for rows in (1, 2, 3, 4, 5, 8, 12, 13, 16, 31, 61, 64):
        depth, columns = 66 + 2 * rows, 130 + rows
        x, w, b = (torch.randn(*n).to(dtype) for n in ((rows, depth), (columns, depth), (columns,)))
        plain = check(tmp_path, lambda x, w: x @ w.t(), x, w, config=flags)
        fused = check(tmp_path, lambda *o: F.gelu(F.linear(*o)), x, w, b, config=flags)
        kind = "product"
        if rows <= (8 if has_feature("avx512f") else 4):
            kind = "dots"
        elif dtype == torch.float32 or (rows > 12 and has_feature("avx512_bf16")):
            kind = "product_transposed"
        assert plain == [named(f"dicp_{kind}", dtype)], rows
        assert fused == [named(f"dicp_{kind}_biased", dtype)], rows
    x, w = torch.randn(3, 2, 40).to(dtype), torch.randn(3, 9, 40).to(dtype)
    steps = check(tmp_path, lambda x, w: x @ w.mT, x, w, config=flags)
    assert steps == [named("dicp_dots", dtype)], "batches"


@pytest.mark.usefixtures("by_vectors")
@by_dtype
@pytest.mark.parametrize("level", ["native", "x86-64-v3"])
def test_rows_that_share_a_cache_set_are_copied(
    tmp_path: Path, level: str, dtype: torch.dtype
) -> None:
    """Rows 4096 bytes apart, beside panels enough for a copy and too few; blocks and parts that end
    within a tile; every epilogue."""
    flags = Config(cache_dir=tmp_path, cxx_flags=(f"-march={level}",))
    page = 4096 // dtype.itemsize
    for rows, depth, columns in ((67, page, 130), (110, page - 3, 129), (131, 2 * page, 60)):
        x, w, b = torch.randn(rows, 2 * page), torch.randn(columns, depth), torch.randn(columns)
        x, w, b = x.to(dtype)[:, :depth], w.to(dtype), b.to(dtype)
        plain = check(tmp_path, lambda x, w: x @ w.t(), x, w, config=flags)
        assert plain == [named("dicp_product", dtype)], (rows, depth, columns)
        fused = check(tmp_path, lambda *o: F.gelu(F.linear(*o)), x, w, b, config=flags)
        assert fused == [named("dicp_product_biased", dtype)], (rows, depth, columns)


@pytest.mark.usefixtures("by_vectors")
@by_dtype
@pytest.mark.parametrize(("first", "later"), [(3, 40), (70, 5), (2, 4)])
def test_symbolic_rows_are_few_or_many(
    tmp_path: Path, first: int, later: int, dtype: torch.dtype
) -> None:
    """Dot products or tiles, as the rows of each call are."""

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b)) @ w

    w, b = torch.randn(33, 66).to(dtype), torch.randn(33).to(dtype)
    inputs = [(torch.randn(rows, 66).to(dtype), w, b) for rows in (first, later)]
    torch._dynamo.mark_dynamic(inputs[0][0], 0)
    steps = check(tmp_path, layer, *inputs[0], dynamic=None, later=inputs[1])
    names = ("dicp_product_any_rows_biased", "dicp_product")
    assert steps == [named(name, dtype) for name in names]


@by_dtype
@pytest.mark.parametrize("level", ["native", "x86-64-v3", "x86-64"])
def test_few_rows_add_rows_of_weights(tmp_path: Path, level: str, dtype: torch.dtype) -> None:
    """Depths and columns that end within a block and within a vector; every epilogue."""
    flags = Config(cache_dir=tmp_path, cxx_flags=(f"-march={level}",))
    for rows in (1, 2) if dtype == torch.float32 else (1,):
        for depth, columns in ((1, 5), (127, 16), (130, 33), (700, 1100)):
            x, w, b = (torch.randn(n).to(dtype) for n in ((rows, depth), (depth, columns), columns))
            plain = check(tmp_path, torch.mm, x, w, config=flags)
            assert plain == [named("dicp_axpys", dtype)], (rows, depth, columns)
            fused = check(
                tmp_path, lambda b, x, w: F.gelu(torch.addmm(b, x, w)), b, x, w, config=flags
            )
            assert fused == [named("dicp_axpys_biased", dtype)], (rows, depth, columns)
        x, w = torch.randn(40, rows + 1).to(dtype), torch.randn(40, 70).to(dtype)
        apart = check(tmp_path, lambda x, w: x[:, 1:].t() @ w[:, 3:], x, w, config=flags)
        assert apart == [named("dicp_axpys", dtype)]
        x, w = torch.randn(3, rows, 40).to(dtype), torch.randn(3, 40, 20).to(dtype)
        batches = check(tmp_path, torch.bmm, x, w, config=flags)
        assert batches == [named("dicp_axpys", dtype)]


@by_dtype
@pytest.mark.usefixtures("by_vectors")
@pytest.mark.parametrize("level", ["native", "x86-64-v3"])
def test_quantized_weights_are_read_as_bytes(
    tmp_path: Path, level: str, dtype: torch.dtype
) -> None:
    """Weight-only int8 as torchao writes it: the weights are never converted in memory.

    Depths of whole and of odd numbers of cells, columns that end within a panel, several parts of
    the depth.
    """

    def quantized(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        y = torch.mm(x.reshape(-1, x.shape[-1]), w.t().to(x.dtype))
        return (y * scale).reshape(*x.shape[:-1], -1) + bias

    flags = Config(cache_dir=tmp_path, cxx_flags=(f"-march={level}",))
    shapes = ((1, 67, 130), (2, 64, 7), (6, 33, 65), (12, 200, 64), (14, 64, 32), (26, 1131, 67),
              (64, 130, 129))  # fmt: skip
    for rows, depth, columns in shapes:
        name = named(f"dicp_{'dots' if rows <= 12 else 'product'}_of_bytes", dtype)
        x, scale, bias = (
            torch.randn(*n).to(dtype) for n in ((2, rows // 2 or 1, depth), (columns,), (columns,))
        )
        x = x if rows > 1 else x[:1]
        w = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
        steps = check(tmp_path, quantized, x, w, scale, bias, config=flags)
        assert [s for s in steps if "dicp" in s] == [name], steps
        assert sum("pointwise" in s or "_to_copy" in s for s in steps) <= 1, "only the scale"
    many = torch.randn(513, 1, 67).to(dtype), torch.randint(-9, 9, (130, 67), dtype=torch.int8)
    wide = torch.randn(130).to(dtype)
    beyond = check(tmp_path, quantized, *many, wide, wide, config=flags)
    assert not any("bytes" in s for s in beyond)
    row_major = check(
        tmp_path, lambda x, w: x @ w.to(x.dtype), x[0], w[:, : x.shape[2]].t().contiguous(),
        config=flags,
    )  # fmt: skip
    assert not any("bytes" in s for s in row_major)


def test_many_columns_are_multiplied_in_stripes(tmp_path: Path) -> None:
    x, w, b = torch.randn(20, 600), torch.randn(2100, 600), torch.randn(2100)
    assert check(tmp_path, lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b) == [
        "dicp_product_biased"
    ]


@pytest.mark.usefixtures("by_vectors")
@by_dtype
@pytest.mark.parametrize(
    "activation",
    [F.relu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.tanh, torch.sigmoid],
    ids=["relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid"],
)
def test_bias_and_activation_are_part_of_the_product(
    tmp_path: Path, activation: Any, dtype: torch.dtype
) -> None:
    x, w, b = torch.randn(50, 20) * 3, torch.randn(70, 20), torch.randn(70)
    x[0, 0] = float("nan")
    x[1, 0] = float("inf")
    operands = [t.to(dtype) for t in (x, w, b)]
    steps = check(tmp_path, lambda x, w, b: activation(F.linear(x, w, b)), *operands)
    assert steps == [named("dicp_product_biased", dtype)]


@by_dtype
def test_nan_and_infinity_in_sums_of_any_length(tmp_path: Path, dtype: torch.dtype) -> None:
    for depth in (7, 300):
        a, b = torch.randn(20, depth), torch.randn(depth, 40)
        a[3, depth - 1], b[depth - 1, 5], b[2, 6] = torch.nan, torch.inf, -torch.inf
        steps = check(tmp_path, torch.mm, a.to(dtype), b.to(dtype))
        assert steps == [named("dicp_product", dtype)]


@pytest.mark.usefixtures("by_vectors")
def test_halves_where_the_processor_does_not_multiply_them(tmp_path: Path) -> None:
    """Compiled for a lesser machine, bfloat16 is widened where it is packed."""
    flags = Config(cache_dir=tmp_path, cxx_flags=("-mno-avx512bf16",))
    half = torch.bfloat16
    for depth in (33, 700):
        a, b, bias = leaf(50, depth, dtype=half), leaf(70, depth, dtype=half), leaf(70, dtype=half)
        steps = check(tmp_path, lambda a, b, c: F.linear(a, b, c), a, b, bias, config=flags)
        assert "dicp_product_biased_bf16" in steps
        assert "dicp_product_bf16" in steps
    q, k, v = (heads(1, 2, rows, 16, half) for rows in (53, 90, 90))
    steps = check(
        tmp_path, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v, config=flags
    )
    assert "dicp_attention_bf16" in steps
    assert "dicp_attention_gradients_bf16" in steps


def test_what_does_not_fit_goes_to_the_library(tmp_path: Path) -> None:
    mixed = check(tmp_path, torch.mm, torch.randn(4, 4).double(), torch.randn(4, 4).double())
    split_k = check(tmp_path, torch.mm, torch.randn(4, 4).half(), torch.randn(4, 4).half())
    empty = check(tmp_path, torch.mm, torch.randn(4, 0), torch.randn(0, 4))
    apart = check(tmp_path, torch.mm, torch.randn(1, 64), torch.randn(64, 64, 2)[..., 0])
    wide = check(tmp_path, torch.mm, torch.randn(3, 1024), torch.randn(1024, 1600))
    few = check(tmp_path, torch.bmm, torch.randn(5, 3, 64), torch.randn(5, 64, 64))
    assert not any("dicp" in s for s in (*mixed, *split_k, *empty, *apart, *wide, *few))


@by_dtype
def test_a_dimension_that_turns_out_empty(tmp_path: Path, dtype: torch.dtype) -> None:
    target, config = PastBlas(), Config(cache_dir=tmp_path)
    compiled = torch.compile(
        torch.bmm,
        dynamic=True,
        backend=lambda gm, xs: compile_fx(gm, xs, target, config, lambda r: None),
    )
    for rows, depth in ((5, 7), (4, 6), (3, 0), (0, 3)):
        a, b = torch.randn(2, rows, depth).to(dtype), torch.randn(2, depth, 9).to(dtype)
        for right in (b, b.mT.contiguous().mT):
            got, wide = compiled(a, right), torch.bmm(a.double(), b.double())
            assert_matches(got, torch.bmm(a, right), wide)


# ---- attention ------------------------------------------------------------------------------


def heads(batch: int, count: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """(batch, heads, rows, size) as models have it: the heads of a row lie side by side."""
    return torch.randn(batch, rows, count, size).to(dtype).transpose(1, 2).requires_grad_()


SHAPES = [(5, 7, 15), (48, 48, 64), (49, 130, 40), (100, 1000, 8), (700, 520, 24)]


@by_dtype
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(("rows", "keys", "size"), SHAPES)
def test_attention(
    tmp_path: Path, rows: int, keys: int, size: int, masked: bool, dtype: torch.dtype
) -> None:
    q, k, v = (heads(2, 3, n, size, dtype) for n in (rows, keys, keys))
    mask = torch.randn(2, 1, rows, keys).masked_fill(torch.rand(rows, keys) < 0.3, -torch.inf)
    mask[..., 0] = 0
    mask, tag = mask.to(dtype), "_masked" if masked else ""
    steps = check(
        tmp_path, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        q, k, v, mask if masked else None,
    )  # fmt: skip
    assert named(f"dicp_attention{tag}", dtype) in steps
    assert named(f"dicp_attention_gradients{tag}", dtype) in steps


@by_dtype
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
def test_causal_attention(tmp_path: Path, symbolic: bool, dtype: torch.dtype) -> None:
    def attend(*rows: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, 32)).transpose(1, 2) for x in rows)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    operands = [leaf(2, 601, 64, dtype=dtype) for _ in range(3)]
    steps = check(tmp_path, attend, *operands, dynamic=symbolic)
    assert named("dicp_attention", dtype) in steps


@by_dtype
def test_fewer_heads_of_keys(tmp_path: Path, dtype: torch.dtype) -> None:
    q, k, v = (heads(2, count, rows, 16, dtype) for count, rows in ((6, 70), (2, 90), (2, 90)))
    steps = check(
        tmp_path, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v
    )
    assert named("dicp_attention", dtype) in steps


MASKS = {
    "none": lambda keys: None,
    "keys": lambda keys: torch.rand(2, 1, 1, keys) < 0.7,
    "heads": lambda keys: torch.randn(1, 8, 1, keys),
    "all": lambda keys: torch.randn(2, 8, 1, keys).masked_fill(torch.rand(keys) < 0.5, -torch.inf),
}
"""Masks of two batches of eight heads with one query each, by the number of keys."""


@by_dtype
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", [7, 90, 520])
def test_a_single_query_of_heads_that_share_keys(
    tmp_path: Path, keys: int, mask: str, dtype: torch.dtype
) -> None:
    """As in decoding: four heads are rows of one product."""
    q, k, v = (heads(2, *n, 16, dtype) for n in ((8, 1), (2, keys), (2, keys)))
    added = MASKS[mask](keys)
    if added is not None and added.is_floating_point():
        added = added.to(dtype)
    steps = check(
        tmp_path,
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True),
        q, k, v, added,
    )  # fmt: skip
    tag = "" if added is None else "_masked"
    assert named(f"dicp_attention{tag}", dtype) in steps
    assert named(f"dicp_attention_gradients{tag}", dtype) in steps


@by_dtype
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_queries(tmp_path: Path, rows: int, dtype: torch.dtype) -> None:
    """In bfloat16 the library is slower for any number of them."""
    for causal, groups in ((False, 3), (True, 3), (True, 1)):
        q, k, v = (heads(2, *n, 24, dtype) for n in ((3, rows), (groups, 50), (groups, 50)))
        attend = functools.partial(
            F.scaled_dot_product_attention, is_causal=causal, enable_gqa=groups != 3
        )
        steps = check(tmp_path, lambda q, k, v: attend(q, k, v), q, k, v)  # noqa: B023
        ours = dtype == torch.bfloat16
        assert any(step.startswith("dicp_attention") for step in steps) is ours


@by_dtype
def test_a_scale_of_its_own(tmp_path: Path, dtype: torch.dtype) -> None:
    q, k, v = (heads(1, 2, 60, 24, dtype) for _ in range(3))
    for scale in (0.3, -1.0):
        attend = functools.partial(F.scaled_dot_product_attention, scale=scale)
        steps = check(tmp_path, lambda q, k, v: attend(q, k, v), q, k, v)  # noqa: B023
        assert named("dicp_attention_gradients", dtype) in steps


def test_a_mask_wider_than_the_heads(tmp_path: Path) -> None:
    """Its values are not rounded to the heads' type."""
    q, k, v = (heads(1, 2, 60, 24, torch.bfloat16) for _ in range(3))
    mask = torch.randn(60, 60) + 100
    steps = check(
        tmp_path, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        q, k, v, mask,
    )  # fmt: skip
    assert "dicp_attention_masked_bf16" in steps
    assert "dicp_attention_gradients_masked_bf16" in steps


@by_dtype
def test_rows_without_a_key(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library gives zeros, and so do we; NaN in a value stays NaN."""
    q, k, v = (heads(1, 1, rows, 8, dtype) for rows in (20, 30, 30))
    mask = torch.zeros(20, 30, dtype=dtype)
    mask[3] = -torch.inf
    attend = F.scaled_dot_product_attention
    steps = check(tmp_path, lambda q, k, v, m: attend(q, k, v, attn_mask=m), q, k, v, mask)
    assert named("dicp_attention_masked", dtype) in steps
    with torch.no_grad():
        q[0, 0, 4, 0] = torch.nan
    check(tmp_path, lambda q, k, v: attend(q, k, v), q.detach(), k.detach(), v.detach())


def test_large_heads_and_wide_floats_go_to_the_library(tmp_path: Path) -> None:
    large = [torch.randn(1, 1, 4, 300) for _ in range(3)]
    wide = [torch.randn(1, 1, 4, 8).double() for _ in range(3)]
    for operands in (large, wide):
        steps = check(tmp_path, F.scaled_dot_product_attention, *operands)
        assert not any("dicp" in s for s in steps)


# ---- groups of rows -------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_groups_of_rows(tmp_path: Path, kind: torch.dtype, dtype: torch.dtype) -> None:
    """Experts without rows, and rows that belong to none."""
    moe = pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([60, 60, 61, 100], dtype=kind)
    assert moe._grouped_mm_fallback is not None

    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, w, ends)

    rows, weights = leaf(103, 40, dtype=dtype), leaf(4, 40, 70, dtype=dtype)
    steps = check(tmp_path, product, rows, weights, ends)
    assert steps.count(named("dicp_product_grouped", dtype)) == 2
    assert steps.count(named("dicp_product_grouped_weights", dtype)) == 1
    transposed = leaf(4, 70, 40, dtype=dtype)
    steps = check(
        tmp_path, lambda x, w, e: product(x, w.transpose(1, 2), e), rows, transposed, ends
    )
    assert steps.count(named("dicp_product_grouped_weights", dtype)) == 1, (
        "a gradient that is transposed"
    )
    wide = [torch.randn(9, 4).double(), torch.randn(4, 4, 3).double(), ends // 20]
    assert not any("dicp" in step for step in check(tmp_path, product, *wide))


def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """ATen's product of groups, and in float64, which it does not take, the same by hand."""
    if a.dtype != torch.float64:
        return torch.ops.aten._grouped_mm(a, b, ends)
    limits = [0, *ends.tolist()]
    parts = [slice(x, y) for x, y in pairwise(limits)]
    if b.ndim == 3:
        return torch.cat([a[part] @ b[k] for k, part in enumerate(parts)])
    return torch.stack([a[:, part] @ b[part] for part in parts])


def test_groups_of_the_framework(tmp_path: Path) -> None:
    half, ends = torch.bfloat16, torch.tensor([60, 60, 61, 104], dtype=torch.int32)
    steps = check(tmp_path, _grouped, leaf(104, 40, dtype=half), leaf(4, 40, 72, dtype=half), ends)
    assert steps.count("dicp_product_grouped_bf16") == 2
    assert steps.count("dicp_product_grouped_weights_bf16") == 1
    batches = leaf(3, 8, 40, dtype=half).detach(), leaf(3, 40, 72, dtype=half).detach()
    steps = check(tmp_path, lambda a, b: torch.ops.aten._grouped_mm(a, b) if a.dtype == half
                  else a @ b, *batches)  # fmt: skip
    assert not any("dicp" in step for step in steps)
