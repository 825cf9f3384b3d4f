"""How matrices are multiplied fastest on this machine: measured per dtype and class of shapes.

In float32 the libraries BLAS and oneDNN are compared; in bfloat16, where the processor has tile
registers, oneDNN and our own kernel. Measured pairwise: both take turns, and each turn gives one
ratio of their times. Turns are added until the confidence interval of the median ratio lies on one
side of the margin. Where it never does, the choice comes from a table and the next process measures
again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dicp.cache import Cache, key_of
from dicp.loop.ir.index import Size
from dicp.torch_private import disable_current_modes
from dicp.vendor.cpu.thresholds import (
    FEW_PRODUCT_ROWS,
    LARGE_PRODUCT,
    LIBRARY_MARGIN,
    MAX_TURNS,
    MIN_SAMPLE_SECONDS,
    TILE_MARGIN,
    TURNS,
)
from dicp.vendor.cpu.toolchain import cpu_model

Library: TypeAlias = Literal["blas", "onednn", "own"]
ShapeClass: TypeAlias = Literal["few rows", "medium", "large"]

PROBLEMS: Mapping[ShapeClass, tuple[int, int, int]] = {
    "few rows": (8, 1024, 1024),
    "medium": (384, 512, 512),
    "large": (768, 768, 1024),
}
"""Class of shapes -> rows, depth and columns of the product that stands for it."""
SLOW_BLAS_VENDORS = ("AuthenticAMD", "HygonGenuine")
"""Vendors on whose processors MKL multiplies with AVX2 although they have AVX-512, so that oneDNN
is faster in float32. On an AMD EPYC with AVX2 only (Zen 3) it is 0.84 to 0.90 as fast as MKL."""
FASTER_ON_TILES: Library = "own"
"""Who multiplies faster on tile registers: on an Intel Xeon (Emerald Rapids), the one processor of
the kind that was measured, we have 0.93 to 2.3 of oneDNN's speed, by class of products."""


TILE_NAMES = ("oneDNN", "our kernel")


@dataclass(frozen=True)
class Verdict:
    """What is taken, and the median of the first's time over the second's with its bounds."""

    library: Library
    low: float
    median: float
    high: float
    stable: bool = True
    names: Sequence[str] = ("BLAS", "oneDNN")

    def __str__(self) -> str:
        if not self.median:
            return f"{self.library}: the only one in this build of PyTorch"
        first, second = self.names
        ratio = f"{second} {self.median:.2f} times as fast as {first}"
        found = f"{ratio} ({self.low:.2f} to {self.high:.2f}"
        source = "measured" if self.stable else "unstable, so by the table of processors"
        return f"{self.library}: {found}, {source})"


Measure: TypeAlias = Callable[[], Verdict]


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for a float `dtype` on this processor.

    PyTorch multiplies 16-bit floats one after another where it has none.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def has_onednn_linear(dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN's linear layer is in this build of PyTorch, and has a `dtype` on this
    processor."""
    return has_kernels(dtype) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def by_blas(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.t() by BLAS."""
    return torch.mm(x, w.t())


def by_onednn(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.t() by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # type: ignore[no-any-return]


def shape_class(rows: Size, depth: Size, columns: Size) -> ShapeClass:
    """The class of a product; one of symbolic size is of medium size."""
    if isinstance(rows, int) and rows < FEW_PRODUCT_ROWS:
        return "few rows"
    if not (isinstance(rows, int) and isinstance(depth, int) and isinstance(columns, int)):
        return "medium"
    return "large" if rows * depth * columns >= LARGE_PRODUCT else "medium"


def verdict(cache: Cache, which: ShapeClass) -> Verdict:
    """The library for float32 products of a class; measured once per machine and thread count."""
    if not has_onednn_linear():
        return Verdict("blas", 0.0, 0.0, 0.0)
    key = _key("products", which, str(LIBRARY_MARGIN))
    return kept(cache, key, lambda: _measured(which, key))


def tiles_key(which: ShapeClass, code: str) -> str:
    """The key of a verdict on our kernel for tiles of bfloat16, compiled from `code`."""
    return _key("tiles", which, f"{TILE_MARGIN} {code}")


def _key(kind: str, which: ShapeClass, rule: str) -> str:
    """The key of a verdict: what is compared, by which rule, and on what machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} of {cpus}"
    stored = " ".join(field.name for field in fields(Verdict))
    problem = str(PROBLEMS[which])
    return key_of(kind, problem, rule, stored, cpu_model(), torch.__version__, threads)


def kept(cache: Cache, key: str, measure: Measure) -> Verdict:
    """The verdict in the cache, or what `measure` finds, which is stored if it is stable."""
    with contextlib.suppress(LookupError):
        return _stored(cache, key)
    found = measure()
    if found.stable:
        text = json.dumps(asdict(found)).encode()
        cache.get_or_build("calibration", key, lambda: {"verdict.json": text})
    return found


@lru_cache(maxsize=16)
def _stored(cache: Cache, key: str) -> Verdict:
    """The verdict kept under `key`, read once: lowering asks for it at every product.

    Raises LookupError, which is not remembered, where there is none.
    """
    entry = cache.get("calibration", key)
    if entry is None:
        raise LookupError(key)
    return Verdict(**json.loads(entry.read("verdict.json")))


@lru_cache(maxsize=16)
def _measured(which: ShapeClass, key: str) -> Verdict:
    """What is measured for `key`, once in a process, as an unstable verdict is not stored.

    Raises nothing: an unstable measurement gives the table's library.
    """
    # Lowering runs while PyTorch traces with fake tensors, which compute nothing.
    with disable_current_modes(), torch.no_grad():
        x, w = operands(which, torch.float32)
        return decide(lambda: by_blas(x, w), lambda: by_onednn(x, w))


def operands(which: ShapeClass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors x and w of a product x @ w.T; the program's random numbers stay what they are."""
    rows, depth, columns = PROBLEMS[which]
    own = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, depth, dtype=torch.float32, generator=own) for n in (rows, columns))
    return x.to(dtype), w.to(dtype)


def decide(blas: Callable[[], object], onednn: Callable[[], object]) -> Verdict:
    """The verdict on two functions that compute one product in float32."""
    known = _faster_by_table()
    return compare(blas, onednn, ("blas", "onednn"), known, margin=LIBRARY_MARGIN[known])


def compare(
    first: Callable[[], object], second: Callable[[], object], libraries: tuple[Library, Library],
    otherwise: Library, names: Sequence[str] = ("BLAS", "oneDNN"), *, margin: float,
) -> Verdict:  # fmt: skip
    """The second of two functions if faster by the margin; `otherwise` if that is unstable."""
    repeats = _repeats(first, second)
    ratios: list[float] = []
    while len(ratios) < MAX_TURNS:
        ratios += [_seconds(first, repeats) / _seconds(second, repeats) for _ in range(TURNS)]
        low, median, high = _interval(ratios)
        if low > margin or high < margin:
            return Verdict(libraries[low > margin], low, median, high, names=names)
    return Verdict(otherwise, low, median, high, stable=False, names=names)


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median between the bounds of its 99% confidence interval: order statistics, of any
    distribution (binomial with p = 1/2, normal approximation)."""
    ordered = sorted(ratios)
    rank = math.floor(len(ordered) / 2 - 1.3 * math.sqrt(len(ordered)))
    return ordered[rank], statistics.median(ordered), ordered[-1 - rank]


def _repeats(*functions: Callable[[], object]) -> int:
    """Calls per sample; each function's first call, which sets the library up, does not count."""
    for function in functions:
        function()
    return max(1, round(MIN_SAMPLE_SECONDS / max(min(_seconds(f, 1) for f in functions), 1e-6)))


def _seconds(function: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return time.perf_counter() - start


def _faster_by_table() -> Library:
    """The faster library in float32 by the processor's vendor and features."""
    features = cpu_model().rpartition("|")[2].split()
    slow_blas = _vendor() in SLOW_BLAS_VENDORS and "avx512f" in features
    return "onednn" if slow_blas else "blas"


def _vendor() -> str:
    """The processor's vendor as Linux names it; elsewhere its name or architecture."""
    return cpu_model().partition("|")[0]
