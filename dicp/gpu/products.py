"""Matrix products that one generated kernel computes together with a pointwise epilogue.

After scheduling, a library call for a product and the pointwise kernel that reads its result
elementwise may be replaced by one kernel, whose epilogue reads the product's tile from registers.
The caller's `Chooser` decides whether to do so (`autotuner.chooser`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from dicp.gpu.precision import variants
from dicp.gpu.random_groups import limited_stores, words
from dicp.gpu.thresholds import MIN_TILE_SIDE, TILE_GROUP
from dicp.gpu.tiling import Tiling
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Named, Read, Ref, Rewriter
from dicp.loop.ir.graph import Call, refs_in
from dicp.loop.ir.index import (
    ZERO,
    Index,
    Size,
    Var,
    combine,
    contiguous_strides,
    flatten,
    indirect_exprs,
    normal,
    product,
    quotient,
    variable,
)
from dicp.loop.ir.kernel import Form, Kernel, Let, Phase, Store
from dicp.loop.schedule.form import FormChooser
from dicp.loop.schedule.kernels import Step
from dicp.origin import Origin, merged_origins

aten = torch.ops.aten

FORMS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Matrix product operators, and the number of arguments before their two operands."""

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
TOTAL = "total"
"""The accumulator's name in the kernel: the sum of products over the depth (K)."""
RESULT = "product"
"""The name of the product's result in the kernel, which the epilogue reads."""


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product with its loops: `z` over the batch, `y` over rows, `x` over columns."""

    call: Call
    a: Ref
    b: Ref
    out: Ref
    depth: Size
    z: tuple[Var, ...]
    y: tuple[Var, ...]
    x: tuple[Var, ...]
    value: Expr
    """The result as an expression of the accumulator TOTAL."""
    stores: tuple[Store, ...]
    epilogue: Kernel | None = None
    parts: int = 1
    """Split-K factor; if above 1, `z` begins with the loop over the parts."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The graph nodes that the product and its epilogue compute."""
        return merged_origins(self.call.origins, self.epilogue.origins if self.epilogue else ())

    @property
    def loops(self) -> tuple[Var, ...]:
        return (*self.z, *self.y, *self.x)

    @property
    def shape(self) -> tuple[Size, Size, Size, Size]:
        """Batch, rows, columns, depth."""
        batch, rows, columns = (
            product(v.size for v in loops) for loops in (self.z, self.y, self.x)
        )
        return batch, rows, columns, self.depth


@dataclass(frozen=True, eq=False)
class ProductTile(Form):
    """A program computes one tile of a product, then the kernel's statements on it."""

    product: Product
    tiling: Tiling
    tf32: bool
    """Whether float32 operands may be rounded to TF32."""
    limited: Mapping[Store, int]
    """Stores, and the most adjacent elements of one that a thread may store at once."""
    group: int = TILE_GROUP
    """Rows of tiles that consecutive programs cover together."""
    least: int = MIN_TILE_SIDE
    """The smallest side of a tile."""


def tiled(matrix: Product, tiling: Tiling, tf32: bool) -> Kernel:
    """The product as a kernel: its statements are the work on the finished accumulator."""
    result = Let(RESULT, matrix.value.dtype, matrix.value)
    phases = (Phase("parallel", (result, *matrix.stores)),)
    kernel = Kernel("pointwise", matrix.loops, (), phases, matrix.origins)
    form = ProductTile(matrix, tiling, tf32, limited_stores(kernel, matrix.x))
    return replace(kernel, form=form, variants={**variants(kernel), **words(kernel)})


Loops = tuple[tuple[Var, ...], tuple[Var, ...], tuple[Var, ...]]
"""Loops over the batch, the rows and the columns of a result; of each the last runs fastest."""

Chooser = Callable[[Product], Tiling | None]


def place_products(
    steps: Sequence[Step], outputs: Sequence[Any], choose: Chooser, with_form: FormChooser,
    tf32: bool,
) -> list[Step]:  # fmt: skip
    """The steps with every chosen product in the place of its library call or of its epilogue.

    `with_form` sets the forms of kernels that split-K adds; `tf32`: products may round float32
    operands to TF32.
    """
    placed: list[Sequence[Step]] = [(step,) for step in steps]
    returned = {r.root for r in refs_in(outputs)}
    for at in range(len(steps) - 1, -1, -1):
        call = steps[at]
        if not isinstance(call, Call) or call.op not in FORMS:
            continue
        found = _with_epilogue(steps, placed, at, returned) or (_product(call), at)
        matrix, place = found
        tiling = choose(matrix) if matrix is not None else None
        if matrix is not None and tiling is not None:
            placed[at] = ()
            placed[place] = kernels_of(matrix, tiling, tf32, with_form)
    return [step for group in placed for step in group]


# ---- split-K -------------------------------------------------------------------------------------


def kernels_of(
    matrix: Product, tiling: Tiling, tf32: bool, with_form: FormChooser
) -> tuple[Kernel, ...]:
    """One kernel, or with split-K two: the first stores partial sums, the second adds them up."""
    parts = tiling.parts
    if parts == 1 or not can_split_k(matrix):
        return (tiled(matrix, tiling, tf32),)
    count = product(matrix.out.shape)
    kept = Ref(f"{matrix.out.name}_sums", (parts, count), torch.float32, (count, 1), "temp")
    part = Var(1 + max((v.position for v in matrix.loops), default=-1), parts)
    flat = _joined(matrix.loops)
    total = ir.result(TOTAL, torch.float32)
    store = Store(kept, variable(part) * count + flat, ir.result(RESULT, torch.float32))
    first = replace(
        matrix, z=(part, *matrix.z), value=total, stores=(store,), epilogue=None, parts=parts
    )
    sums: list[Expr] = [ir.read(kept, flat + normal(k * count)) for k in range(parts)]
    known = {TOTAL: reduce(operator.add, sums)}
    known[RESULT] = _with(matrix.value, known)
    stores = tuple(Store(s.ref, s.index, _with(s.value, known)) for s in matrix.stores)
    phases = (Phase("reduction", stores),)
    rest = Kernel("pointwise", matrix.loops, (), phases, matrix.origins)
    return tiled(first, tiling, tf32), with_form(rest)


def _with(value: Expr, known: Mapping[str, Expr]) -> Expr:
    """`value` with the named results replaced."""
    done: dict[Expr, Expr] = {}

    def visit(e: Expr) -> Expr:
        if e.op == "reduction_result" and isinstance(e, Named) and e.name in known:
            return known[e.name]
        if e not in done:
            done[e] = e.with_args(tuple(visit(a) for a in e.args)) if e.args else e
        return done[e]

    return visit(value)


def can_split_k(matrix: Product) -> bool:
    """Whether no index of a load or store depends on the product's result."""
    places = [s.index for s in matrix.stores]
    places += [i for s in matrix.stores for e in ir.walk(s.value) for i in ir.indices_of(e)]
    inside = (e for i in places for inner in indirect_exprs(i) for e in ir.walk(inner))
    return not any(e.op == "reduction_result" for e in inside)


# ---- the product itself --------------------------------------------------------------------------


def _operands(call: Call) -> tuple[Ref, Ref] | None:
    """The two operands; None if the generated kernel does not support the call."""
    before = FORMS[call.op]
    a, b = call.args[before : before + 2]
    refs = isinstance(a, Ref) and isinstance(b, Ref) and not (a.opaque or b.opaque)
    out = call.outs[0]
    if not refs or a.dtype not in DTYPES or not a.dtype == b.dtype == out.dtype:
        return None
    factors = [call.kwargs.get(name, 1) for name in ("beta", "alpha")]
    plain = all(isinstance(f, (int, float)) for f in factors)
    contiguous = out.strides == contiguous_strides(out.shape)
    return (a, b) if plain and contiguous and 0 not in (*a.shape, *b.shape) else None


def _product(call: Call) -> Product | None:
    """The call as a product without an epilogue; None if the kernel does not support it."""
    out = call.outs[0]
    *batch, rows, columns = out.shape
    loops = [Var(k, s) for k, s in enumerate((*batch, rows, columns))]
    *z, y, x = ((v,) if v.size != 1 else () for v in loops)
    return _made(call, z[0] if z else (), y, x, {}, None, keep=True)


def _made(
    call: Call, z: tuple[Var, ...], y: tuple[Var, ...], x: tuple[Var, ...],
    mapping: dict[Var, Index], epilogue: Kernel | None, keep: bool,
) -> Product | None:  # fmt: skip
    operands = _operands(call)
    if operands is None:
        return None
    out = call.outs[0]
    place = [_joined(loops) for loops in (z, y, x)][-len(out.shape) :]
    stores: list[Store] = []
    result = ir.result(RESULT, out.dtype)
    if keep:
        stores.append(Store(out, flatten(place, out.strides), result))
    if epilogue is not None:
        stores += _rewritten(epilogue, out, mapping, result)
    a, b = operands
    value = _value(call, place)
    return Product(call, a, b, out, a.shape[-1], z, y, x, value, tuple(stores), epilogue)


def _value(call: Call, place: Sequence[Index]) -> Expr:
    """alpha * (sum of products) + beta * (the added tensor)."""
    value: Expr = ir.result(TOTAL, torch.float32)
    alpha, beta = (float(call.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    if alpha != 1:
        value = value * alpha
    if not FORMS[call.op] or beta == 0:
        return value
    added: Ref = call.args[0]
    own = place[len(place) - len(added.shape) :] if added.shape else []
    coords = [ZERO if s == 1 else i for s, i in zip(added.shape, own, strict=True)]
    read = ir.read(added, flatten(coords, added.strides))
    term = ir.opmath(read, torch.float32)
    return value + (term if beta == 1 else term * beta)


def _joined(loops: Sequence[Var]) -> Index:
    """The linear index over `loops`, of which the last runs fastest."""
    strides = contiguous_strides([v.size for v in loops])
    return combine([(variable(v), s) for v, s in zip(loops, strides, strict=True)])


# ---- the epilogue --------------------------------------------------------------------------------


def _with_epilogue(
    steps: Sequence[Step], placed: Sequence[Sequence[Step]], at: int, returned: set[Ref]
) -> tuple[Product, int] | None:
    """The product fused with the first kernel that reads it, and that kernel's position.

    None if they cannot be fused.
    """
    call = steps[at]
    assert isinstance(call, Call)
    out = call.outs[0]
    readers = [k for k in range(at + 1, len(steps)) if out.root in steps[k].read_buffers()]
    if not readers or _operands(call) is None:
        return None
    place = readers[0]
    if placed[place] != (steps[place],):
        return None  # it is the epilogue of another product
    epilogue = steps[place]
    sources = call.read_buffers()
    later = steps[at + 1 : place + 1]
    if not isinstance(epilogue, Kernel) or any(sources & s.written_buffers() for s in later):
        return None
    found = _split(epilogue, call)
    if found is None:
        return None
    loops, mapping = found
    keep = len(readers) > 1 or out.root in returned
    matrix = _made(call, *loops, mapping, epilogue, keep)
    return None if matrix is None else (matrix, place)


def _split(epilogue: Kernel, call: Call) -> tuple[Loops, dict[Var, Index]] | None:
    """Loops (z, y, x) for product and epilogue, and each epilogue loop as an index over them.

    None if the epilogue does not read the whole result elementwise and in order.
    """
    out = call.outs[0]
    stores = epilogue.stores()
    if epilogue.kind != "pointwise" or len(stores) != sum(len(p.stmts) for p in epilogue.phases):
        return None
    seen: set[Expr] = set()
    reads = [e for v in epilogue.exprs() for e in ir.walk(v, seen)
             if isinstance(e, Read) and e.ref.root is out.root]  # fmt: skip
    if any(item.ref is not out or item.index != reads[0].index for item in reads):
        return None
    if not reads or any(s.op or s.ref.root is out.root for s in stores):
        return None
    chain = _chain(reads[0].index, epilogue.parallel)
    if chain is None or product(v.size for v in chain) != product(out.shape):
        return None
    return _axis_split(chain, [*reversed(out.shape)])


def _chain(index: Index, rows: Sequence[Var]) -> list[Var] | None:
    """The loops that form `index` as a mixed-radix number, the fastest first.

    None if they are not exactly `rows`.
    """
    left = dict(index.terms)
    chain: list[Var] = []
    step: Size = 1
    while left:
        digit = next((v for v, c in left.items() if isinstance(v, Var) and c == step), None)
        if digit is None:
            return None
        del left[digit]
        chain.append(digit)
        step = normal(step * digit.size)
    return chain if index.const == 0 and set(chain) == {v for v in rows if v.size != 1} else None


def _axis_split(
    chain: Sequence[Var], sizes: Sequence[Size]
) -> tuple[Loops, dict[Var, Index]] | None:
    """The loops of `chain`, split at the boundaries between `sizes` (columns, rows, batch).

    None if a loop's size does not divide at a boundary.
    """
    axes: list[list[Var]] = [[], [], []]
    mapping: dict[Var, Index] = {}
    level, room, count = 0, sizes[0], 0
    for digit in chain:
        left, step, value = digit.size, 1, ZERO
        while left != 1:
            while room == 1:
                level, room = level + 1, sizes[level + 1]
            if quotient(room, left) is not None:
                part = left
            elif quotient(left, room) is not None:
                part = room
            else:
                return None
            var = Var(count, part)
            count += 1
            axes[level].append(var)
            value = value + variable(var) * step
            step = normal(step * part)
            left, room = quotient(left, part), quotient(room, part)  # type: ignore[assignment]
        mapping[digit] = value
    x, y, z = (tuple(reversed(axis)) for axis in axes)
    return (z, y, x), mapping


def _rewritten(
    epilogue: Kernel, out: Ref, mapping: dict[Var, Index], result: Expr
) -> Iterator[Store]:
    """The epilogue's stores over the product's loops, reading its result from registers."""

    def from_registers(item: Read) -> Expr | None:
        return result if item.ref is out else None

    rewrite = Rewriter(mapping, on_read=from_registers)
    for store in epilogue.stores():
        yield Store(store.ref, rewrite.index(store.index), rewrite(store.value))
