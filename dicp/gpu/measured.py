"""Products measured on a GPU: the library's time, and that of the fastest generated kernel.

Only a measurement writes such a table (`python -m benchmarks gpu --sections products`): a row is
valid only for the chip, compiler version, type, layout and sizes that it was measured with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from dicp.gpu.products import Product
from dicp.gpu.tiling import Tiling
from dicp.loop.ir.expr import Ref


@dataclass(frozen=True)
class Platform:
    """What the time of any product depends on."""

    chip: str
    compiler: str
    """The version of the compiler of generated kernels."""
    libraries: str
    """The version of the device's libraries that PyTorch was built for."""
    tf32: bool
    """Whether float32 operands may be rounded to TF32."""


@dataclass(frozen=True)
class Problem:
    """The properties of a product that its time depends on."""

    chip: str
    compiler: str
    dtype: str
    tf32: bool
    """Whether float32 operands are rounded to TF32."""
    layout: str
    """One letter per operand: "n" rows are contiguous, "t" columns are, "s" neither."""
    shape: tuple[int, int, int, int]
    """Batch, rows, columns, depth."""

    @classmethod
    def of(cls, product: Product, platform: Platform) -> Problem | None:
        """The problem of `product`; None if sizes are dynamic."""
        shape = tuple(size for size in product.shape if isinstance(size, int))
        if len(shape) != 4:
            return None
        dtype = product.a.dtype
        tf32 = dtype == torch.float32 and platform.tf32
        layout = _layout(product.a) + _layout(product.b)
        name = str(dtype).removeprefix("torch.")
        return cls(platform.chip, platform.compiler, name, tf32, layout, shape)


def _layout(factor: Ref) -> str:
    if factor.strides[-1] == 1:
        return "n"
    return "t" if factor.strides[-2] == 1 else "s"


@dataclass(frozen=True)
class Row:
    """One problem's measurement."""

    problem: Problem
    tiling: Tiling | None
    """The tiling that was chosen; None: the library was."""
    library: float
    """Seconds of the library; `kernel` has those of the fastest generated kernel, chosen or not, or
    None if none could run."""
    kernel: float | None


Table = Mapping[Problem, Row]


def by_table(table: Table, product: Product, platform: Platform) -> Tiling | None:
    """The tiling that beat the library when measured on such a chip; None if none did."""
    problem = Problem.of(product, platform)
    row = None if problem is None else table.get(problem)
    return None if row is None else row.tiling


def table_of(rows: Iterable[Row]) -> Table:
    """The rows by problem; the last row of a problem counts."""
    return {row.problem: row for row in rows}


def read(file: Path) -> Table:
    """The table in a file that `write` wrote."""
    return table_of(map(row_of, json.loads(file.read_text())["rows"]))


def write(file: Path, table: Table) -> None:
    """Writes one row per line, sorted by problem."""
    rows = sorted(table.values(), key=lambda row: astuple(row.problem))
    lines = ",\n".join(f"  {json.dumps(plain(row))}" for row in rows)
    file.write_text(f'{{"rows": [\n{lines}\n]}}\n' if rows else '{"rows": []}\n')


def plain(row: Row) -> dict[str, Any]:
    """A row as JSON values."""
    tiling = None if row.tiling is None else astuple(row.tiling)
    return {**asdict(row.problem), "tiling": tiling, "library": row.library, "kernel": row.kernel}


def row_of(fields: dict[str, Any]) -> Row:
    """The row that `plain` gave as JSON values."""
    problem = {name: fields[name] for name in Problem.__dataclass_fields__}
    problem["shape"] = tuple(problem["shape"])
    tiling = None if fields["tiling"] is None else Tiling(*fields["tiling"])
    return Row(Problem(**problem), tiling, fields["library"], fields["kernel"])
