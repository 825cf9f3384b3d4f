"""Matrix products, single and in batches, with bias and activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from dicp import operators
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.vendor.cpu import library
from dicp.vendor.cpu.calibration import ShapeClass, has_kernels, shape_class
from dicp.vendor.cpu.routines.common import are_supported, call, call_biased, is_few
from dicp.vendor.cpu.thresholds import (
    FEW_BATCH_COLUMNS,
    MAX_AXPYS,
    MAX_BYTES_DOTS,
    MAX_BYTES_ROWS,
    MAX_DOTS,
    MAX_FUSED_DEPTH,
    MAX_NARROW_AXPYS,
    MAX_NARROW_DOTS,
    MAX_OWN_BYTES_ROWS,
    MAX_PACKING,
    MAX_TILE_BYTES_DOTS,
    MAX_TILE_BYTES_ROWS,
    MAX_TRANSPOSED,
    MAX_TRANSPOSED_ROWS,
    MAX_TRANSPOSED_TILE_ROWS,
    MIN_SPLIT_DEPTH,
    SPLIT_PANELS,
    TRANSPOSED_FILL,
    TRANSPOSED_VECTOR,
)
from dicp.vendor.cpu.toolchain import has_feature, has_tiles

aten = torch.ops.aten

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""In the order of `d_activation`."""
CONVERSIONS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
Variant = Literal["dots", "axpys", "product", "product_any_rows", "product_transposed"]


def variant(
    dtype: torch.dtype, rows: Size, columns: Size, right: Sequence[Any],
    first: Callable[[Sequence[Size]], Sequence[Size]] = tuple,
) -> Variant:  # fmt: skip
    """The group of routines for a product; `right`: its right operand's (row, column) strides.

    `first` gives sizes as in the first call, by which kernels for symbolic rows are selected.
    """
    (known,) = first((rows,))
    if not isinstance(known, int):
        return "product"
    kind = _variant(dtype, known, columns, right)
    if isinstance(rows, int) or kind == "product_transposed":
        return kind
    dots = right[0] == 1 and not (dtype == torch.bfloat16 and has_tiles())
    return "product_any_rows" if dots else "product"


def _variant(dtype: torch.dtype, rows: int, columns: Size, right: Sequence[Any]) -> Variant:
    if right[0] != 1:
        few = rows <= (MAX_AXPYS if dtype == torch.float32 else MAX_NARROW_AXPYS)
        return "axpys" if right[1] == 1 and few else "product"
    if dtype == torch.bfloat16 and has_tiles():
        if rows == 1:
            return "dots"
        return "product_transposed" if rows <= MAX_TRANSPOSED_TILE_ROWS else "product"
    if rows <= (MAX_DOTS if has_feature("avx512f") else MAX_NARROW_DOTS):
        return "dots"
    vectors = -(-rows // TRANSPOSED_VECTOR)
    filled = rows >= TRANSPOSED_FILL * TRANSPOSED_VECTOR * vectors
    filled |= dtype == torch.float32 and vectors == 1
    wide = isinstance(columns, int) and rows < columns
    pairs = dtype == torch.float32 or has_feature("avx512_bf16")  # cells are read in place
    in_place = rows <= MAX_TRANSPOSED_ROWS and filled and wide and pairs
    return "product_transposed" if in_place else "product"


def has_split_products(dtype: torch.dtype) -> bool:
    """Whether matrices of `dtype` are multiplied by tile registers, their numbers split into sums
    of bfloat16 numbers: float32."""
    return dtype == torch.float32 and has_tiles()


def is_split(dtype: torch.dtype, rows: Size, depth: Size, columns: Size) -> bool:
    """Whether a product of two matrices is computed by splitting their numbers.

    Each thread computes a part of the longer side and splits the whole other operand.
    """
    if not has_split_products(dtype):
        return False
    if not (isinstance(rows, int) and isinstance(depth, int) and isinstance(columns, int)):
        return False
    short, part = min(rows, columns), max(rows, columns) / torch.get_num_threads()
    return depth >= MIN_SPLIT_DEPTH and short * part >= SPLIT_PANELS * (short + part)


def _is_better(rows: Size, columns: Size, depth: Size, transposed: bool, kind: str) -> bool:
    """Whether our kernel is faster than oneDNN's.

    Measured in float32 on shapes from 2x512x512 to 2048x2048x2048: 0.9 to 2.5 times as fast, 1.3 in
    the geometric mean; in bfloat16 1.0 to 2.7 times. `transposed`: the left operand is
    bfloat16 and column-major. `kind`: the product's `variant`. With few rows the right operand is
    read as it lies: a column-major one at 2 to 3 times the rate of oneDNN and BLAS, which pack it
    or stream it slowly (measured for 1 to 12 rows, 1.1 to 1.2 for 16 to 64).
    """
    if kind != "product":
        return True
    if rows == 1:
        return False
    if not (isinstance(rows, int) and isinstance(columns, int) and isinstance(depth, int)):
        return True
    light = not transposed or rows * columns * depth <= MAX_TRANSPOSED
    return light and columns * depth <= rows * MAX_PACKING


def _product(
    lw: Lowering, a: Value, b: Value, out: Ref, bias: Value | None = None, activation: str = "none"
) -> Value:
    """activation(a @ b + bias) of two matrices, or of two batches of them."""
    refs = [lw.realize(a), lw.realize(b)]
    batch, step = (out.shape[0], out.strides[0]) if len(out.shape) == 3 else (1, 0)
    counts = (batch, *out.shape[-2:], a.shape[-1])
    return multiplied(lw, refs, out, counts, (step, out.strides[-2]), bias, activation)


def multiplied(
    lw: Lowering, refs: list[Ref], out: Ref, counts: Sequence[Size], steps: Sequence[Size],
    bias: Value | None = None, activation: str = "none", by_row: bool = False,
) -> Value:  # fmt: skip
    """The product of matrices in memory; `steps`: the strides of a batch and of a row of `out`.

    `by_row`: the bias has an element for each row of the result, else for each column.
    """
    left, right = (r.strides if len(r.shape) == 3 else (0, *r.strides) for r in refs)
    rows, columns, depth = counts[1:]
    split = counts[0] == 1 and not by_row and is_split(out.dtype, rows, depth, columns)
    kind = "split" if split else variant(out.dtype, rows, columns, right[1:], lw.first_sizes)
    sizes = [*counts, ACTIVATIONS.index(activation), *left, *right, *steps, int(by_row)]
    return call_biased(lw, f"dicp_{kind}", refs, bias, out, sizes)


@dataclass(frozen=True)
class Products:
    """Rules of products by the fastest of BLAS, oneDNN and our kernel.

    `past_blas`: the classes of shapes whose float32 products oneDNN computes faster than BLAS by
    the margin of `calibration`; our kernel is at least as fast as oneDNN's. `own_tiles`: those in
    bfloat16 that we compute faster than oneDNN, where the processor has tile registers.
    """

    past_blas: frozenset[ShapeClass]
    own_tiles: frozenset[ShapeClass] = frozenset()

    def rules(self) -> RuleTable:
        table = RuleTable()
        table.add(aten.bmm.default, self.bmm, "library")
        table.add(aten.mm.default, self.mm, "library")
        table.add(aten.addmm.default, self.addmm, "library")
        table.add(operators.linear, self.linear, "library")
        return table

    def is_past_blas(self, a: Value, b: Value) -> bool:
        """Whether BLAS is the slower library for a @ b; in bfloat16 both are oneDNN."""
        wide = a.dtype != torch.float32
        return wide or shape_class(a.shape[0], a.shape[1], b.shape[1]) in self.past_blas

    def takes(self, which: ShapeClass, *values: Value | None) -> bool:
        """Whether our kernel multiplies these tensors, as operands of a product of this class."""
        narrow = any(v is not None and v.dtype == torch.bfloat16 for v in values)
        return are_supported(*values) and (which in self.own_tiles or not (narrow and has_tiles()))

    def splits(self, out: Ref, a: Value, b: Value, *more: Value | None) -> bool:
        """Whether our kernel computes the product a @ b of float32 matrices on tile registers."""
        sizes = a.shape[0], a.shape[1], b.shape[1]
        return is_split(out.dtype, *sizes) and are_supported(a, b, *more) and out.strides[-1] == 1

    def fits(
        self, lw: Lowering, out: Ref, a: Value, b: Value, *more: Value | None, past_blas: bool
    ) -> bool:
        """Whether our kernel computes the product a @ b of matrices, faster than the libraries.

        `past_blas`: whether BLAS is the slower one of them.
        """
        if self.splits(out, a, b, *more):
            return True
        if not past_blas:
            return False
        which = shape_class(a.shape[0], a.shape[1], b.shape[1])
        if not self.takes(which, a, b, *more) or out.strides[-1] != 1:
            return False
        if not has_kernels(a.dtype):
            return True
        transposed = a.dtype == torch.bfloat16 and lw.realize(a).strides[-1] != 1
        right = lw.realize(b).strides
        kind = variant(a.dtype, a.shape[0], b.shape[1], right, lw.first_sizes)
        return _is_better(a.shape[0], b.shape[1], a.shape[1], transposed, kind)

    def bmm(self, lw: Lowering, a: Value, b: Value) -> Value:
        (out,) = lw.results()
        right = lw.realize(b).strides[1:]
        kind = variant(a.dtype, a.shape[1], b.shape[2], right, lw.first_sizes)
        few = kind == "product" and (is_few(a.shape[1]) or self.is_narrow_batch(out))
        few = few and has_kernels(a.dtype)
        # On processors with tile registers, BLAS is faster with one thread: 49x32x49 to 512x64x512
        # take us 0.95 to 1.74 of its time on an Intel Xeon (Emerald Rapids), one row by dot
        # products 0.74. With two threads 49x32x49 to 512x64x512 take 0.76 to 0.99.
        single = has_split_products(a.dtype) and torch.get_num_threads() == 1
        by_blas = few or (single and a.shape[1] != 1)
        if not self.takes("medium", a, b) or out.strides[-1] != 1 or by_blas:
            return lw.call(aten.bmm.default, (a, b), out_variant=aten.bmm.out)[0]
        return _product(lw, a, b, out)

    def is_narrow_batch(self, out: Ref) -> bool:
        """Whether BLAS, if it is the faster library, multiplies these few columns faster."""
        columns, by_blas = out.shape[-1], "medium" not in self.past_blas
        few = isinstance(columns, int) and columns <= FEW_BATCH_COLUMNS
        return few and by_blas and out.dtype == torch.float32

    def mm(self, lw: Lowering, a: Value, b: Value) -> Value:
        (out,) = lw.results()
        past_blas = self.is_past_blas(a, b)
        weights = _bytes_of(lw, a, out, MAX_OWN_BYTES_ROWS if past_blas else MAX_BYTES_ROWS)
        if weights is not None:
            return _by_bytes(lw, a, weights, out)
        own = self.fits(lw, out, a, b, past_blas=past_blas)
        return _product(lw, a, b, out) if own else library.mm(lw, a, b, past_blas)

    def addmm(
        self, lw: Lowering, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1
    ) -> Value:
        (out,) = lw.results()
        past_blas = self.is_past_blas(a, b)
        adds_row = library.adds_row(bias, b, beta, alpha)
        if not (adds_row and self.fits(lw, out, a, b, bias, past_blas=past_blas)):
            return library.addmm(lw, bias, a, b, beta, alpha, past_blas)
        return _product(lw, a, b, out, bias)

    def linear(
        self, lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str
    ) -> Value:
        (out,) = lw.results()
        if x.ndim != 2 or activation not in ACTIVATIONS:
            return library.linear(lw, x, w, bias, activation)
        transposed = lw.permute(w, [1, 0])
        shallow = isinstance(x.shape[1], int) and x.shape[1] <= MAX_FUSED_DEPTH
        past_blas = shallow or self.is_past_blas(x, transposed)
        if not self.fits(lw, out, x, transposed, bias, past_blas=past_blas):
            return library.linear(lw, x, w, bias, activation)
        return _product(lw, x, transposed, out, bias, activation)


def product_sizes(
    node: fx.Node, dtype: torch.dtype = torch.float32
) -> tuple[Size, Size, Size] | None:
    """Rows, depth and columns of a product of two matrices of `dtype`; None for other nodes."""
    if node.target not in (aten.mm.default, aten.addmm.default, operators.linear):
        return None
    out, left = node.meta["val"], node.args[node.target is aten.addmm.default]
    assert isinstance(left, fx.Node)
    if out.dtype != dtype or out.ndim != 2:
        return None
    return out.shape[0], left.meta["val"].shape[1], out.shape[1]


def _bytes_of(lw: Lowering, a: Value, out: Ref, most: int) -> Ref | None:
    """The int8 matrix that the right operand of a product is converted from.

    Quantized weights are so read as they lie, and not converted in memory at every run. None where
    the product has more than `most` rows, or the matrix is not column-major.
    """
    cast = lw.node.args[1]
    few = isinstance(a.shape[0], int) and a.shape[0] <= most
    if not (few and are_supported(a) and out.dtype == a.dtype and out.strides[-1] == 1):
        return None
    if not isinstance(cast, fx.Node) or cast.target not in CONVERSIONS:
        return None
    weights = lw.env.get(cast.args[0])
    if not isinstance(weights, Value) or weights.dtype != torch.int8 or weights.ndim != 2:
        return None
    ref = lw.realize(weights)
    return ref if ref.strides[0] == 1 else None


def _by_bytes(lw: Lowering, a: Value, weights: Ref, out: Ref) -> Value:
    left = lw.realize(a)
    sizes = [*out.shape, a.shape[1], *left.strides, weights.strides[1], out.strides[0]]
    name = f"dicp_{bytes_variant(a.dtype, a.shape[0])}_of_bytes"
    return call(lw, name, (left, weights), (out,), sizes)[0]


def bytes_variant(dtype: torch.dtype, rows: Size) -> str:
    """The group of routines for a product with int8 weights."""
    tiles = dtype == torch.bfloat16 and has_tiles()
    if not isinstance(rows, int):
        return "product"
    if rows <= (MAX_TILE_BYTES_DOTS if tiles else MAX_BYTES_DOTS):
        return "dots"
    return "product_on_tiles" if tiles and rows <= MAX_TILE_BYTES_ROWS else "product"
