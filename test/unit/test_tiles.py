"""Routines on AMX's tile registers: their source against a model of the instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_routines import LAYOUTS, SHAPES, check, heads, leaf
from torch import Tensor

from dicp.config import Config
from dicp.toolchain import OUTPUT
from dicp.vendor.cpu.routines import Group, choice, int8, nhwc, product
from dicp.vendor.cpu.routines.product import variant
from dicp.vendor.cpu.toolchain import compile_shared, find_toolchain
from dicp.vendor.cpu.units import header_texts, unit_text

SUPPORT = Path(__file__).parents[1] / "support"
MODEL = ("-DDICP_TILE_MODEL", f"-I{SUPPORT}")
HALF = torch.bfloat16
GROUPS = ("product_bf16", "product_transposed_bf16", "attention_bf16", "attention_gradients_bf16",
          "nhwc_bf16", "nhwc_filters_bf16", "product_bytes_on_tiles_bf16", "int8",
          "split")  # fmt: skip
"""The groups of routines that multiply tiles, with the ending of their dtype."""

pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="vectors beside the tiles"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache: the routines are compiled once."""
    return tmp_path_factory.mktemp("tiles")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_tiles(folder: Path, fn: Callable[..., Tensor], *inputs: Any) -> list[str]:
    """The steps of `fn`, whose results through the model are as good as eager's."""
    return check(folder, fn, *inputs, config=Config(cache_dir=folder, cxx_flags=MODEL))


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(6, 4, 5), (48, 32, 64), (100, 1101, 33), (17, 31, 15), (30, 3100, 17), (65, 2048, 100)],
)
def test_products(folder: Path, rows: int, depth: int, columns: int) -> None:
    """Whole and partial tiles of every operand, in depth too; gradients transpose the operands."""
    operands = leaf(rows, depth, dtype=HALF), leaf(depth, columns, dtype=HALF)
    kinds = [
        variant(HALF, rows, columns, (columns, 1)), variant(HALF, rows, depth, (1, columns)),
        variant(HALF, depth, columns, (columns, 1)),
    ]  # fmt: skip
    steps = on_tiles(folder, torch.mm, *operands)
    assert sorted(steps) == sorted(f"dicp_{kind}_bf16" for kind in kinds)
    batches = leaf(3, rows, depth, dtype=HALF), leaf(3, depth, columns, dtype=HALF)
    assert "dicp_product_bf16" in on_tiles(folder, torch.bmm, *batches)


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_layouts(folder: Path, left: str, right: str) -> None:
    for rows, depth, columns in ((12, 66, 64), (45, 34, 33), (61, 521, 96)):
        a = LAYOUTS[left](torch.randn(rows, depth).to(HALF))
        b = LAYOUTS[right](torch.randn(depth, columns).to(HALF))
        kind = variant(HALF, rows, columns, b.stride())
        assert on_tiles(folder, torch.mm, a, b) == [f"dicp_{kind}_bf16"]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(1, "dots"), *((n, "product_transposed") for n in (2, 17, 33, 192)), (193, "product")],
)
def test_rows_beside_weights(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int, kind: str
) -> None:
    """Tiles whose epilogue runs beside the next one's products; sums in one part and in several."""
    monkeypatch.setattr(product, "has_tiles", lambda: True)
    for depth, columns in ((66, 130), (2304, 70)):
        x, w, b = (torch.randn(*n).to(HALF) for n in ((rows, depth), (columns, depth), (columns,)))
        x[0, 0] = torch.inf
        assert on_tiles(folder, lambda x, w: x @ w.t(), x, w) == [f"dicp_{kind}_bf16"]
        fused = on_tiles(folder, lambda *o: F.gelu(F.linear(*o)), x, w, b)
        assert fused == [f"dicp_{kind}_biased_bf16"]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(1, "dots"), (4, "dots"), *((n, "product_on_tiles") for n in (5, 16, 33, 192)),
     (193, "product")],
)  # fmt: skip
def test_weights_of_bytes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int, kind: str
) -> None:
    """Depths of one block and of several, odd ones; columns that end within a tile."""
    monkeypatch.setattr(product, "has_tiles", lambda: True)
    for depth, columns in ((3, 5), (67, 33), (64, 32), (1101, 70)):
        x = torch.randn(rows, depth).to(HALF)
        w = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
        steps = on_tiles(folder, lambda x, w: x @ w.t().to(x.dtype), x, w)
        assert steps == [f"dicp_{kind}_of_bytes_bf16"]
    apart = torch.randn(rows, 2, 66).to(HALF)[:, 1]
    wide = torch.randint(-128, 128, (40, 90), dtype=torch.int8)[:, 5:71]
    steps = on_tiles(folder, lambda x, w: x @ w.t().to(x.dtype), apart, wide)
    assert steps == [f"dicp_{kind}_of_bytes_bf16"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("rows", [1, 17, 33, 100])
def test_bytes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int, dtype: torch.dtype
) -> None:
    """Sizes that end within a group, a tile and a step; rows in several blocks; rows apart."""
    monkeypatch.setattr(int8, "has_int8_tiles", lambda: True)

    def drawn(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        return torch.randint(low, high, shape, dtype=dtype)

    for depth, columns in ((2, 5), (64, 32), (67, 33), (9000, 40)):  # with depth 1 eager is wrong
        x, w = drawn(rows, depth + 3, dtype=dtype)[:, 3:], drawn(columns, depth)
        x[0], w[0] = torch.iinfo(dtype).min, -128
        assert on_tiles(folder, lambda x, w: torch._int_mm(x, w.t()), x, w) == [
            int8.ROUTINES_BY_DTYPE[dtype]
        ]
    row_major = drawn(rows, 64, dtype=dtype), drawn(64, 32)
    steps = on_tiles(folder, torch._int_mm, *row_major)
    assert not any("dicp" in step for step in steps)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 are split, whatever the processor and the number of threads."""
    monkeypatch.setattr(product, "has_tiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_products_of_parts(folder: Path, left: str, right: str) -> None:
    """Float32 in all layouts: whole and partial tiles, sums in several parts, more rows than are
    packed at once."""
    for rows, depth, columns in ((128, 64, 96), (101, 49, 113), (130, 1030, 85), (530, 50, 80)):
        a = LAYOUTS[left](torch.randn(rows, depth))
        b = LAYOUTS[right](torch.randn(depth, columns))
        assert on_tiles(folder, torch.mm, a, b) == ["dicp_split"]


def test_long_sums_of_parts(tmp_path: Path) -> None:
    """Positive numbers, whose rounding errors add up: blocks of the depth are summed apart."""
    group = Group.of("split", torch.float32)
    library = loaded(unit_text(group.header, group.bodies(), {}), tmp_path)
    a, b, result = torch.rand(40, 8192), torch.rand(8192, 50), torch.empty(40, 50)
    sizes = [1, 40, 50, 8192, 0, 0, 8192, 1, 0, 50, 1, 0, 50, 0]
    operands = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (a, b, result)))
    library.dicp_split(operands, (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_int64 * 4)())
    exact = a.double() @ b.double()
    assert (result - exact).square().mean() <= 4 * (a @ b - exact).square().mean()


def test_splits_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread splits one operand whole: with many threads, that takes longer than it saves."""
    monkeypatch.setattr(product, "has_tiles", lambda: True)
    for threads, expected in ((1, True), (2, True), (64, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert product.is_split(torch.float32, 512, 512, 3072) == expected
        assert not product.is_split(torch.bfloat16, 512, 512, 3072)


@pytest.mark.usefixtures("splits")
def test_gradients_of_parts(folder: Path) -> None:
    x, w, b = leaf(120, 130), leaf(110, 130), leaf(110)
    steps = on_tiles(folder, lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    routines = [step for step in steps if step.startswith("dicp")]
    assert routines == ["dicp_split_biased", "dicp_split", "dicp_split"]
    inference = [t.detach() for t in (x, w, b)]
    fused = on_tiles(folder, lambda x, w, b: F.gelu(F.linear(x, w, b)), *inference)
    assert fused == ["dicp_split_biased"]


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38, 1e20, 1e-40], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["one", "all"])
def test_parts_out_of_range(folder: Path, value: float, whole: bool) -> None:
    """Infinite numbers, and those whose parts or products of parts bfloat16 cannot hold."""
    x, w = torch.randn(110, 128), torch.randn(128, 100)
    for changed in (x, w):
        kept = changed.clone()
        changed[slice(None) if whole else 3] *= value
        changed[0, :2] = torch.tensor([value, -value])
        steps = on_tiles(folder, torch.mm, x, w)
        assert steps in (["dicp_split"], []), "compiled, or found in the cache"
        changed.copy_(kept)


def test_epilogue_and_groups(folder: Path) -> None:
    x, w, b = (torch.randn(*s).to(HALF) for s in ((50, 20), (70, 20), (70,)))
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    fused = on_tiles(folder, lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    assert fused == [f"dicp_{variant(HALF, 50, 70, (1, 20))}_biased_bf16"]
    pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([60, 60, 61, 100])
    steps = on_tiles(
        folder, lambda x, w, e: torch.ops.transformers.grouped_mm_fallback(x, w, e),
        leaf(103, 40, dtype=HALF), leaf(4, 40, 70, dtype=HALF), ends,
    )  # fmt: skip
    assert steps.count("dicp_product_grouped_bf16") == 2
    assert steps.count("dicp_product_grouped_weights_bf16") == 1


CONVOLUTIONS = {
    "patches in place": ((2, 64, 9, 9), (40, 64, 3, 3), {"padding": 1}),
    "several strips of rows": ((1, 96, 40, 47), (33, 96, 3, 5), {"padding": (0, 2)}),
    "rows of taps apart": ((1, 32, 9, 8), (64, 32, 3, 3), {"dilation": (2, 1), "padding": (2, 1)}),
    "no padding": ((3, 64, 12, 10), (96, 64, 2, 4), {}),
    "copied patches": ((1, 48, 9, 8), (70, 48, 3, 3), {"stride": 2, "padding": 1}),
    "many taps": ((2, 32, 11, 9), (32, 32, 5, 5), {"padding": 2}),
    "filters in place": ((2, 320, 4, 5), (380, 320, 3, 3), {"padding": 1, "stride": (1, 2)}),
}
"""Images, filters and options."""


@pytest.mark.parametrize("what", CONVOLUTIONS)
def test_convolutions(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> None:
    """Row-major filters: their gradient is not copied, nor are they for that of images."""
    image, filters, options = CONVOLUTIONS[what]
    for module in (choice, nhwc):
        monkeypatch.setattr(module, "has_tiles", lambda: True)
    monkeypatch.setattr(choice, "NHWC_FILTERS_PIXELS", 1 << 40)
    last = {"memory_format": torch.channels_last}
    x, w = torch.randn(image).to(HALF).contiguous(**last), torch.randn(filters).to(HALF)
    for bias in (torch.randn(filters[0]).to(HALF), None):
        steps = on_tiles(folder, lambda *given: F.conv2d(*given, **options), x, w, bias)
        assert steps == [f"dicp_nhwc{'' if bias is None else '_biased'}_bf16"]
    grad = torch.randn_like(F.conv2d(x, w, **options))
    pairs = [options.get(n, d) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1))]
    rest = [None, *map(torch.nn.modules.utils._pair, pairs), False, (0, 0), 1, (True, True, False)]

    def gradients(*given: Tensor) -> Tensor:
        images, of_filters, _ = torch.ops.aten.convolution_backward(*given, *rest)
        return torch.cat([images.flatten(), of_filters.contiguous().flatten()])

    strided = "_strided" if "stride" in options else ""
    steps = on_tiles(folder, gradients, grad, x, w)
    assert steps[:2] == [f"dicp_nhwc{strided}_bf16", "dicp_nhwc_filters_bf16"], steps
    assert len(steps) == 3 and steps[2].startswith("cat"), steps


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize(("rows", "keys", "size"), SHAPES)
def test_attention(folder: Path, rows: int, keys: int, size: int, masked: bool) -> None:
    q, k, v = (heads(2, 2, n, size, HALF) for n in (rows, keys, keys))
    mask = torch.randn(2, 1, rows, keys).masked_fill(torch.rand(rows, keys) < 0.3, -torch.inf)
    mask[..., 0] = 0
    steps = on_tiles(
        folder,
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k, v, attn_mask=m, is_causal=m is None
        ),
        q, k, v, mask.to(HALF) if masked else None,
    )  # fmt: skip
    tag = "_masked" if masked else ""
    assert steps == [f"dicp_attention{tag}_bf16", f"dicp_attention_gradients{tag}_bf16"]


def build(source: str, *flags: str) -> bytes:
    files = {"unit.cpp": source, **header_texts()}
    return compile_shared(find_toolchain(Config(cxx_flags=flags)), files, "unit.cpp")


ROUNDING = """
#include "tile.h"
extern "C" void run(const void* a, const void* b, float* c) {
  const d_tile_scope held;
  d_tile_load<0>(c, 64);
  d_tile_load<1>(a, 64);
  d_tile_load<2>(b, 64);
  d_tile_multiply_add<0, 1, 2>();
  d_tile_store<0>(c, 64);
}
"""


def loaded(source: str, folder: Path) -> ctypes.CDLL:
    path = folder / OUTPUT
    path.write_bytes(build(source, *MODEL))
    return ctypes.CDLL(str(path))


def tile_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c + a @ b of one tile each by the manual's order of rounding,.

    a (16, 32), b (16, 32) in pairs of rows, bfloat16; c (16, 16), float32.
    """
    a, b, sums = a.double(), b.double().reshape(16, 16, 2), torch.zeros(16, 16, 2)
    for k in range(16):
        for odd in range(2):
            exact = sums[:, :, odd].double() + a[:, None, 2 * k + odd] * b[None, k, :, odd]
            sums[:, :, odd] = exact.float()
    return c + (sums[:, :, 0] + sums[:, :, 1])


def test_the_model_rounds_as_the_instruction_does(tmp_path: Path) -> None:
    """Even and odd products are summed apart, in order, each step rounded to float32."""
    library = loaded(ROUNDING, tmp_path)
    a, b = torch.randn(16, 32).to(HALF), torch.randn(16, 32).to(HALF)
    c = torch.randn(16, 16)
    expected = tile_product(a, b, c)
    library.run(*(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)))
    assert torch.equal(c, expected)
    a.fill_(1e-30), b.fill_(1e-30), c.fill_(1e-40)
    library.run(*(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)))
    assert torch.equal(c, torch.zeros(16, 16)), "denormals are zeros"


def test_tiles_that_no_thread_configured_are_an_error(tmp_path: Path) -> None:
    """So a routine that forgets them fails here as it would on the processor."""
    text = ROUNDING.replace("  const d_tile_scope held;\n", "")
    (tmp_path / OUTPUT).write_bytes(build(text, *MODEL))
    code = f"import ctypes; ctypes.CDLL({str(tmp_path / OUTPUT)!r}).run(*3*[b'0' * 1024])"
    done = subprocess.run([shutil.which("python3") or "python3", "-c", code], check=False)
    assert done.returncode < 0


@pytest.mark.sweep
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_instructions(tmp_path: Path, compiler: str) -> None:
    """What the processor will run: the operands of every product, and the release."""
    if not shutil.which(compiler) or not shutil.which("objdump"):
        pytest.skip(f"needs {compiler} and objdump")
    flags = ("-DDICP_TILES", "-mamx-tile", "-mamx-bf16", "-O1")
    for name in GROUPS:
        group = Group(name.removesuffix("_bf16"), "_bf16" if name.endswith("_bf16") else "")
        files = {"unit.cpp": unit_text(group.header, group.bodies(), {}), **header_texts()}
        toolchain = find_toolchain(Config(cxx=compiler, cxx_flags=flags))
        (tmp_path / OUTPUT).write_bytes(compile_shared(toolchain, files, "unit.cpp"))
        text = subprocess.run(
            ["objdump", "-d", str(tmp_path / OUTPUT)], capture_output=True, text=True, check=True
        ).stdout
        kinds = ("tdpbssd", "tdpbsud") if name == "int8" else ("tdpbf16ps",)
        for kind in kinds:
            for operands in ("6,%tmm4,%tmm0", "7,%tmm4,%tmm1", "6,%tmm5,%tmm2", "7,%tmm5,%tmm3"):
                assert f"{kind} %tmm{operands}" in text, "Intel's order is reversed: b, a, c"
        assert "ldtilecfg" in text and "tilerelease" in text
        assert "vdpbf16ps" not in text
