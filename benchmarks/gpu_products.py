"""Matrix products on a GPU: the library against every tiling of the generated kernel.

python -m benchmarks gpu --sections products --device cuda --out FOLDER

A separate command, since it takes minutes. FOLDER/products.json is the table of
`dicp/vendor/triton` with its rows replaced by those measured here; copied there, the compiler
chooses by it. On a CPU the interpreter runs small products to test the command: their times mean
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.gpu import measured
from dicp.gpu.autotuner import Autotuner, Program
from dicp.gpu.products import Product
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.host_memory import HostMemory
from dicp.target import LowerContext
from dicp.vendor.triton import TritonTarget, choice
from dicp.vendor.triton.builder import Builder, Workers

SQUARES = (512, 1024, 2048, 4096, 8192)
TYPES = ("bfloat16", "float16", "float32")
LAYERS = (
    (8192, 2048, 2048), (8192, 6144, 2048), (8192, 2048, 6144), (8192, 16384, 2048),
    (16384, 1024, 1024), (16384, 4096, 1024), (16384, 1024, 4096), (12608, 1024, 1024),
    (12608, 4096, 1024), (1, 4096, 4096), (16, 4096, 4096), (128, 4096, 4096),
)  # fmt: skip
"""Rows, columns and depth of the linear layers of the models that are timed, and of decoding."""


def items(full: bool) -> list[str]:
    """Each "type layout ROWSxCOLUMNSxDEPTH"; of a layer also the products of its gradients."""
    if not full:
        return ["float32 nn 32x32x16", "bfloat16 nt 16x32x16"]
    found = [f"{t} nt {n}x{n}x{n}" for n in SQUARES for t in TYPES]
    for rows, columns, depth in LAYERS:
        found.append(f"bfloat16 nt {rows}x{columns}x{depth}")
        if rows > 128:
            found.append(f"bfloat16 nn {rows}x{depth}x{columns}")
            found.append(f"bfloat16 tn {columns}x{depth}x{rows}")
    return list(dict.fromkeys(found))


def measure(item: str, device: str) -> dict[str, Any]:
    """Compare library and kernel for one product: the table's row, and the seconds of both."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    product = product_of(item, device)
    row = autotuner(device).row(product)
    assert row is not None  # its sizes are numbers
    name = "library" if row.tiling is None else str(row.tiling)
    return {"row": measured.plain(row), "chosen": name}


def product_of(item: str, device: str) -> Product:
    dtype, layout, sizes = item.split()
    rows, columns, depth = map(int, sizes.split("x"))
    a = _matrix(rows, depth, layout[0], dtype, device)
    b = _matrix(depth, columns, layout[1], dtype, device)
    graph = fx.Graph()
    values = {"a": a, "b": b}
    inputs = [graph.placeholder(name) for name in values]
    for node, value in zip(inputs, values.values(), strict=True):
        node.meta["val"] = value
    result = graph.call_function(torch.ops.aten.mm.default, tuple(inputs))
    result.meta["val"] = a.new_empty(rows, columns)
    graph.output((result,))
    target = _Listing()
    target.lower(fx.GraphModule({}, graph), LowerContext(Config(), "inference"))
    (product,) = target.products
    return product


def _matrix(rows: int, columns: int, layout: str, dtype: str, device: str) -> Tensor:
    sizes, kind = (rows, columns), getattr(torch, dtype)
    if layout == "t":
        return torch.empty(sizes[::-1], dtype=kind, device=device).t()
    return torch.empty(sizes, dtype=kind, device=device)


class _Listing(TritonTarget):
    """Makes the library compute every product, and records each product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def chooser(self, name: str, config: Config) -> Callable[[Product], None]:
        return self.products.append


@cache
def autotuner(name: str) -> Autotuner:
    """One per process: its compiler's processes are used for all products."""
    device, config = torch.device(name), Config()
    if device.type == "cuda":
        return TritonTarget().autotuner(device, config)
    from dicp.vendor.triton.simulator import Simulator  # it imports Triton

    store = Cache.open(config)

    def load(program: Program) -> LoopExecutable:
        plain, texts = program
        return LoopExecutable(plain, Simulator(texts, plain["buffers"]), HostMemory())

    on, builder = choice.platform("interpreter"), Builder(store, Workers(), config.jobs)
    kernels = choice.TritonProducts(90, builder, load)
    return Autotuner(device, on, store, kernels, _seconds)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def keep(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The table with these rows in place of those for the same products."""
    table = {**choice.TABLE, **measured.table_of(map(measured.row_of, rows))}
    fresh = folder / "products.part"  # a kill while it is written leaves the previous file
    measured.write(fresh, table)
    fresh.replace(folder / "products.json")
