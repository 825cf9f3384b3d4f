"""What rules call: tensors, computes and library calls of the loop IR's graph.

In: a rule's operands as `Value`s. Out: nodes of the graph, in the order of the calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import sympy
import torch
from sympy.logic.boolalg import BooleanAtom
from torch import fx

from dicp.dtypes import converted
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref
from dicp.loop.ir.graph import Call, Compute, Graph, Node, Requirement, Routine
from dicp.loop.ir.index import (
    ZERO,
    Index,
    Size,
    Var,
    contiguous_strides,
    domain,
    flatten,
    is_positive,
    normal,
)
from dicp.loop.ir.reshape import reshape_coords
from dicp.loop.lowering.layout import (
    as_size,
    broadcast_shapes,
    is_injective,
    normalized_strides,
    same_layout,
    sizes_of,
    strides_of,
)
from dicp.loop.lowering.value import Body, Coordinates, Value, single, symbolic_float
from dicp.origin import Origin
from dicp.rules import NoRule
from dicp.target import LowerContext
from dicp.torch_private import expression_of, first_sizes, is_proved, shape_env_of


class GraphBuilder:
    """Builds the `Graph` of one FX graph; its methods are the API of rules."""

    rounds_sums = False
    """Whether sums of rows into zeros are rounded as they are stored: they need no copy in float32.
    """
    overwrites = False
    """Whether few elements are replaced by a copy and stores over it: selecting each element costs
    more than that where memory is read and written by vectors."""
    gathers_windows = False
    """Whether a max-pooling gradient is a gather: the colliding stores of a scatter are slow and in
    no fixed order."""
    wide_variance = False
    """Whether `var` and `std` accumulate in float64, as eager does on the CPU: in float32, squares
    of deviations below 1e-19 are 0, and those above 1e19 infinite."""
    atomic_dtypes: frozenset[torch.dtype] = frozenset(
        {torch.float32, torch.float64, torch.int32, torch.int64}
    )
    """Dtypes in which a kernel combines colliding stores with the result that PyTorch defines. In
    C, a 16-bit float is stored as an integer, which an atomic addition would add as one."""

    def __init__(self, gm: fx.GraphModule, context: LowerContext) -> None:
        self.gm = gm
        self.context = context
        self.graph = Graph()
        self.node: fx.Node
        """The node being lowered."""
        self.shape_env = shape_env_of(gm)
        self._origins: tuple[Origin, ...] = ()
        self._count = 0
        self._seed: Ref | None = None
        self._random_sites = 0
        self._written: dict[Ref, Any] = {}
        self._readers: dict[Ref, list[Node]] = {}
        self.indices_in_bounds: dict[tuple[Value, Size], Value] = {}
        """Computed indices and the size they index: the same, clamped to it."""

    # ---- tensors --------------------------------------------------------------------------

    def _name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _tensor_ref(self, name: str, val: torch.Tensor, role: ir.Role) -> Ref:
        strided = val.layout == torch.strided
        strides = strides_of(val) if strided else ()
        return Ref(name, sizes_of(val.shape), val.dtype, strides, role)

    def value_of(self, ref: Ref) -> Value:
        return Value(ref, ref.shape, domain(ref.shape))

    def constant(self, tensor: torch.Tensor) -> Value:
        """A tensor that every run of the graph reads."""
        name = f"const{len(self.graph.constants)}"
        self.graph.constants[name] = tensor
        return self.value_of(self._tensor_ref(name, tensor, "constant"))

    def meta(self, output: int | None = None) -> torch.Tensor:
        """The FakeTensor of the node being lowered (or of one of its outputs)."""
        val = self.node.meta["val"]
        return val if output is None else val[output]  # type: ignore[no-any-return]

    def temp(
        self, shape: Sequence[Size], dtype: torch.dtype, strides: Sequence[Size] | None = None
    ) -> Ref:
        shape = tuple(shape)
        if strides is None:
            strides = self.strides_of_result(shape) or contiguous_strides(shape)
        return Ref(self._name("t"), shape, dtype, tuple(strides), "temp")

    def is_made_contiguous(self, output: int) -> bool:
        """Whether an output of the node being lowered is only copied, to a row-major tensor."""
        readers = _readers_of(self.node, output)
        if len(readers) != 1 or readers[0].target is not torch.ops.aten.clone.default:
            return False
        val = readers[0].meta["val"]
        return all(isinstance(n, int) for n in val.shape) and val.is_contiguous()

    def is_only_copied(self, value: Value) -> bool:
        """Whether `value`, which the node being lowered copies, is a call's result that nothing
        else reads, with the strides of the copy."""
        source, ref = self.node.args[0], value.ref
        if not isinstance(source, fx.Node) or not isinstance(ref.producer, Call):
            return False
        maker, output = source, None
        if source.target is operator.getitem:
            maker, output = source.args  # type: ignore[assignment]
        if ref.base is not None or ref not in ref.producer.outs or ref.producer.kind == "eager":
            return False
        if ref.producer.op is not maker.target or len(_readers_of(maker, output)) != 1:
            return False
        same = value.shape == ref.shape and value.coords == domain(ref.shape)
        return same and same_layout(ref.shape, ref.strides, strides_of(self.meta()))

    def strides_of_result(self, shape: Sequence[Size]) -> tuple[Size, ...] | None:
        """Eager's strides of the node's result that has this shape, if any, without overlap."""
        val = self.node.meta.get("val")
        for item in val if isinstance(val, (tuple, list)) else [val]:
            if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
                continue
            if item.ndim != len(shape) or sizes_of(item.shape) != tuple(shape):
                continue
            strides = strides_of(item)
            if is_injective(tuple(shape), strides):
                return strides
        return None

    @property
    def origin(self) -> Origin:
        """The node being lowered, as messages name it."""
        return self._origins[-1]

    def add(self, compute: Compute) -> Compute:
        compute.origins = self._origins
        if self._origins:
            compute.body = ir.with_origin(compute.body, self.origin)
        if compute.out.producer is None:
            compute.out.producer = compute
        extra = {id(w): w for r in compute.reads() if (w := self._written.get(r.root)) is not None}
        if extra:
            compute.after = (*compute.after, *extra.values())
        self._append(compute)
        return compute

    def _append(self, node: Node) -> None:
        self.graph.nodes.append(node)
        for ref in node.reads():
            self._readers.setdefault(ref.root, []).append(node)

    # ---- API for rules --------------------------------------------------------------------

    def pointwise(
        self,
        shape: Sequence[Size],
        dtype: torch.dtype,
        body: Body,
        strides: Sequence[Size] | None = None,
    ) -> Value:
        """A tensor of `shape` whose element at `idx` is `body(idx)`."""
        out = self.temp(shape, dtype, strides)
        self.add(Compute(out, out.shape, body(domain(out.shape))))
        return self.value_of(out)

    def map(
        self, fn: Callable[..., Expr], *values: Value, dtype: torch.dtype | None = None
    ) -> Value:
        """`fn` of the broadcast elements; `dtype` defaults to the first value's."""
        shape = broadcast_shapes(*(v.shape for v in values))
        return self.pointwise(
            shape,
            values[0].dtype if dtype is None else dtype,
            lambda idx: fn(*(v.broadcast_at(idx) for v in values)),
        )

    def copy(self, value: Value) -> Value:
        """A tensor of the same elements that shares no memory with `value`."""
        return self.pointwise(value.shape, value.dtype, value.at)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        return self.map(lambda x: ir.cast(x, dtype), value, dtype=dtype)

    def reduce(
        self,
        op: str,
        shape: Sequence[Size],
        axes: Sequence[int],
        dtype: torch.dtype,
        body: Body,
        keepdim: bool = True,
    ) -> Value:
        """The reduction of `body` over `shape` by `op` along `axes`."""
        shape = tuple(shape)
        kept = tuple(1 if i in axes else s for i, s in enumerate(shape))
        if not axes or all(shape[a] == 1 for a in axes):
            value = self.pointwise(kept, dtype, lambda idx: single(op, body(idx), dtype))
            return value if keepdim else self.squeeze(value, axes)
        squeezed = tuple(s for i, s in enumerate(shape) if i not in axes)
        strides = None if keepdim else self.strides_of_result(squeezed)
        if strides is not None:
            rest = iter(strides)
            strides = tuple(1 if i in axes else next(rest) for i in range(len(shape)))
        out = self.temp(kept, dtype, strides)
        self.add(Compute(out, shape, body(domain(shape)), "reduce", tuple(axes), op))
        value = self.value_of(out)
        return value if keepdim else self.squeeze(value, axes)

    def view(
        self,
        value: Value,
        shape: Sequence[Size],
        coords: Coordinates,
    ) -> Value:
        """A view of `value` with another shape: `coords` maps new coordinates to old ones."""
        shape = tuple(shape)
        return Value(value.ref, shape, value.place(coords(domain(shape))))

    def reshape(self, value: Value, shape: Sequence[Size]) -> Value:
        shape = tuple(shape)
        if shape == value.shape:
            return value
        return self.view(value, shape, lambda idx: reshape_coords(idx, value.shape, shape))

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        order = [d % value.ndim for d in order]
        shape = [value.shape[d] for d in order]
        return self.view(value, shape, lambda idx: [idx[order.index(d)] for d in range(value.ndim)])

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        kept = [i for i in range(value.ndim) if i not in axes]
        return self.view(
            value,
            [value.shape[i] for i in kept],
            lambda idx: [idx[kept.index(i)] if i in kept else ZERO for i in range(value.ndim)],
        )

    def unsqueeze(self, value: Value, axis: int) -> Value:
        shape = list(value.shape)
        shape.insert(axis, 1)
        return self.view(value, shape, lambda idx: [*idx[:axis], *idx[axis + 1 :]])

    def expand(self, value: Value, shape: Sequence[Size]) -> Value:
        lead = len(shape) - value.ndim
        full = tuple(value.shape[i - lead] if s == -1 else s for i, s in enumerate(shape))
        return self.view(
            value,
            full,
            lambda idx: [ZERO if s == 1 else idx[i + lead] for i, s in enumerate(value.shape)],
        )

    def element(self, value: Any, dtype: torch.dtype) -> Expr:
        """A number, or a symbolic size, rounded as when stored in a tensor of `dtype`."""
        return ir.as_stored(self.scalar(value, dtype))

    def proves(self, relation: Any) -> bool:
        """Whether the guards taken so far prove a relation between numbers and symbolic integers;
        adds no guard."""
        if isinstance(relation, (bool, BooleanAtom)):
            return bool(relation)
        return self.shape_env is not None and is_proved(relation, self.shape_env)

    @cached_property
    def _first_sizes(self) -> dict[str, int]:
        return {symbol.name: size for symbol, size in first_sizes(self.gm).items()}

    def first_sizes(self, sizes: Sequence[Size]) -> tuple[Size, ...]:
        """Sizes as in the call that the graph was traced for, where they depend on no data.

        They tell which kernel is likely faster, never which one is correct.
        """
        return tuple(size if isinstance(size, int) else self._first_size(size) for size in sizes)

    def _first_size(self, size: sympy.Expr) -> Size:
        first = self._first_sizes
        return normal(size.xreplace({s: first.get(s.name, s) for s in size.free_symbols}))

    def require(self, relation: Any, otherwise: str) -> None:
        """Leave the node to eager, which checks its arguments, unless `relation` is proved."""
        if not self.proves(relation):
            raise NoRule(otherwise)

    def scalar(self, value: Any, dtype: torch.dtype) -> Expr:
        """A number, or a symbolic size, as a constant expression."""
        if isinstance(value, torch.SymInt):
            value = as_size(value)
        elif isinstance(value, (torch.SymFloat, torch.SymBool)):
            value = expression_of(value)
        if isinstance(value, sympy.Basic):
            if not value.is_number:
                if value.is_integer:
                    return ir.opmath(ir.index_value(Index(normal(value))), dtype)
                return ir.cast(symbolic_float(value), dtype)
            value = int(value) if value.is_Integer else float(value)
        if isinstance(value, complex) or converted(value, dtype) is None:
            raise NoRule(f"the conversion of {value} to {dtype} is undefined")
        return ir.const(value, dtype)

    def real(self, value: Any, dtype: torch.dtype) -> Expr:
        """A number, which may be symbolic, as a constant of a floating-point type."""
        return self.scalar(float(value) if isinstance(value, (bool, int)) else value, dtype)

    # ---- calls that eager rejects ---------------------------------------------------------

    def require_equal(
        self, left: Sequence[Size], right: Sequence[Size], detail: str, *, eager: bool = True
    ) -> None:
        """Require equal sizes; a call whose sizes differ is left to eager, which raises its error.

        Symbolic sizes are checked at each run. So are those of calls that eager does not check
        (`eager` is False), where it reads out of bounds.
        """
        if len(left) != len(right):
            raise NoRule(f"{detail}: {len(left)} and {len(right)} axes")
        for a, b in zip(left, right, strict=True):
            rest = normal(a - b)
            if rest != 0 and isinstance(rest, int) and eager:
                raise NoRule(f"{detail}: {a} and {b}")
            if rest != 0:
                self._require("equal", a, b, detail)

    def require_indexable(self, size: Size, count: Size) -> None:
        """Leave indices into an empty dimension to eager, which raises its error.

        Symbolic sizes are checked at each run.
        """
        if is_positive(size) or count == 0:
            return
        if size == 0 and is_positive(count):
            raise NoRule("an index into an empty dimension")
        self._require("indexable", size, count, "an index into a dimension of size 0")

    def _require(
        self, kind: Literal["equal", "indexable"], left: Size, right: Size, detail: str
    ) -> None:
        self.graph.requirements.append(Requirement(kind, left, right, detail, self.origin))

    # ---- memory ---------------------------------------------------------------------------

    def realize(self, value: Value, strides: Sequence[Size] | None = None) -> Ref:
        """A Ref in memory holding `value`, with exactly `strides` where given."""
        if value.ref.opaque:
            return value.ref
        found = self._in_memory(value, strides)
        if found is not None:
            return found
        shape = value.shape
        if strides is None or not is_injective(shape, tuple(strides)):
            strides = contiguous_strides(shape)
        out = self.pointwise(shape, value.dtype, value.at, strides)
        self.mark_realized(out.ref)
        return out.ref

    def realize_to_read(self, value: Value, strides: Sequence[Size]) -> Ref:
        """The same for a call that only reads: the original of a copy where it has `strides`."""
        found = self.in_memory_to_read(value, strides)
        return self.realize(value, strides) if found is None else found

    def in_memory_to_read(self, value: Value, strides: Sequence[Size]) -> Ref | None:
        """The same where it is in memory already; None if it is not."""
        found, original = self._in_memory(value, strides), self._before_copy(value)
        if found is None and original is not None:
            found = self._in_memory(original, strides)
        return found

    def _in_memory(self, value: Value, strides: Sequence[Size] | None) -> Ref | None:
        """A Ref of the elements where they are in memory; None if they have other strides, or
        none."""
        shape, ref = value.shape, value.ref
        flat = flatten(value.coords, ref.strides, 0) if ref.strides or not ref.shape else None
        if flat is None or not flat.is_affine:
            return None
        own = tuple(flat.coefficient(Var(i, s)) if s != 1 else 1 for i, s in enumerate(shape))
        if strides is not None and not same_layout(shape, own, tuple(strides)):
            return None
        self.mark_realized(ref)
        # Libraries distinguish layouts by the strides of axes of size 1, too.
        asked = ref.strides if strides is None else tuple(strides)
        same = shape == ref.shape and same_layout(shape, own, ref.strides)
        if same and flat.const == 0 and asked == ref.strides:
            return ref
        exact = tuple(strides) if strides is not None else normalized_strides(shape, own)
        return Ref(self._name("v"), shape, ref.dtype, exact, "alias", flat.const, base=ref)

    def _before_copy(self, value: Value) -> Value | None:
        """The same elements in the tensor of which `value`'s is a copy, if that is unchanged."""
        copy = value.ref.producer
        if not isinstance(copy, Compute) or copy.kind != "pointwise":
            return None
        body = copy.body
        if not isinstance(body, ir.Load) or body.ref.root in self._written:
            return None
        source = Value(body.ref, value.ref.shape, body.coords)
        return Value(body.ref, value.shape, source.place(value.coords))

    def round_elements(self, value: Value) -> None:
        """Have every reader of `value` see 16-bit floats rounded, as they are in memory, also those
        that `value` is converted from.

        For an operator whose result jumps, such as a comparison or a maximum: arithmetic with the
        result and `value`, such as sqrt(max(x) - x), must read the numbers that it was found from.
        """
        node = value.ref.root.producer
        if isinstance(node, Compute) and node.kind == "pointwise":
            node.body = self._rounded(node.body)

    def _rounded(self, body: Expr) -> Expr:
        """An expression as it is in memory, and so what it copies or converts."""
        if isinstance(body, ir.Load):
            self.round_elements(self.value_of(body.ref))
            return body
        if body.op in ("where", "masked"):
            return body.with_args((body.args[0], *map(self._rounded, body.args[1:])))
        if body.op == "cast":
            return body.with_args(tuple(map(self._rounded, body.args)))
        return ir.as_stored(body)

    def mark_realized(self, ref: Ref) -> None:
        """Have the compute of `ref` stored, rather than repeated by its readers."""
        if isinstance(ref.root.producer, Compute):
            ref.root.producer.realize = True

    def combined_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which colliding stores of `dtype` are combined; 32 bits for short types.

        Floats are then rounded once. Integers wrap around when they are stored, with the same
        result as wrapping at every step.
        """
        if dtype in self.atomic_dtypes:
            return dtype
        return torch.float32 if dtype.is_floating_point else torch.int32

    def combinable(self, op: str, value: Expr) -> Expr:
        """`value` converted so that the target's atomic `op` combines it correctly."""
        return value

    def call(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        out_variant: Any = None,
        outs: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Value, ...]:
        """A library call; tensor arguments are realized, and strided views are passed as such."""
        refs = self.results() if outs is None else tuple(map(self.result, outs))
        node = Call(
            op,
            tuple(self.realized(a) for a in args),
            {k: self.realized(v) for k, v in (kwargs or {}).items()},
            refs,
            out_variant,
            origins=self._origins,
        )
        self._finish_call(node)
        return tuple(self.value_of(r) for r in refs)

    def routine(
        self, name: str, body: str, args: Sequence[Ref], outs: Sequence[Ref], sizes: Sequence[Size]
    ) -> tuple[Value, ...]:
        """A call of a handwritten kernel of the target, which reads `args` and writes `outs`."""
        node = Call(
            self.node.target, tuple(args), {}, tuple(outs),
            routine=Routine(name, body, tuple(sizes)), origins=self._origins,
        )  # fmt: skip
        self._finish_call(node)
        return tuple(self.value_of(r) for r in outs)

    def results(self) -> tuple[Ref, ...]:
        """A fresh buffer for each tensor the node returns, with eager's strides."""
        val = self.node.meta["val"]
        return tuple(map(self.result, val if isinstance(val, (tuple, list)) else [val]))

    def result(self, meta: torch.Tensor) -> Ref:
        """A fresh buffer with the shape and strides of `meta`."""
        return self._tensor_ref(self._name("c"), meta, "temp")

    def _finish_call(self, node: Call) -> None:
        for ref in node.outs:
            ref.producer = node
        node.after = tuple(w for r in node.reads() if (w := self._written.get(r.root)) is not None)
        self._append(node)

    def realized(self, value: Any) -> Any:
        if isinstance(value, Value):
            return self.realize(value)
        if isinstance(value, (list, tuple)):
            return [self.realized(v) for v in value]
        if isinstance(value, dict):
            return {k: self.realized(v) for k, v in value.items()}
        return value

    def write(self, target: Value, value: Value) -> None:
        """Store `value` into an input's memory (a mutation that AOTAutograd left in the graph)."""
        root = target.ref.root
        readers = tuple(self._readers.get(root, ()))
        alias = Ref(
            self._name("w"), target.ref.shape, target.dtype, target.ref.strides, "alias",
            target.ref.offset, base=target.ref,
        )  # fmt: skip
        body = ir.cast(value.broadcast_at(domain(target.shape)), target.dtype)
        compute = Compute(alias, target.shape, body, after=readers, realize=True)
        self.add(compute)
        self._written[root] = compute

    # ---- random numbers -------------------------------------------------------------------

    def seed(self) -> tuple[Ref, int]:
        """The run's seed (one int64 drawn from the default generator) and a site number."""
        if self._seed is None:
            self._seed = Ref("seed", (1,), torch.int64, (1,), "seed")
        self._random_sites += 1
        return self._seed, self._random_sites


def _readers_of(node: fx.Node, output: int | None) -> list[fx.Node]:
    """The nodes that read an output of a node; of one with a single output, `output` is None."""
    if output is None:
        return list(node.users)
    return [user for got in node.users if got.args[1:] == (output,) for user in got.users]
