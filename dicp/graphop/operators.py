"""The API of rules: operators as methods, with dtypes and sizes converted to match."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dicp.dtypes import converted, opmath_dtype
from dicp.errors.text import did_you_mean, nearest
from dicp.graphop.builder import Builder, Dialect
from dicp.graphop.program import Value
from dicp.graphop.prototype import Port
from dicp.graphop.vocabulary import VOCABULARY
from dicp.rules import NoRule
from dicp.torch_private import FakeTensorMode

WIDER: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bool: (torch.uint8, torch.int8, torch.int32),
    torch.uint8: (torch.int32, torch.int64),
    torch.int8: (torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.float16: (torch.float32,),
    torch.bfloat16: (torch.float32,),
}
"""The dtypes that hold all numbers of another one."""
SAME_BITS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float64: (torch.int64,),
    torch.uint64: (torch.int64,),
    torch.uint32: (torch.int32,),
    torch.uint16: (torch.int16,),
}
Operand = Any
"""A value, or a number (which may be symbolic)."""


class Ops(Builder):
    """Builds operators of the vocabulary (`dicp.graphop.vocabulary`) from a vendor's own.

    A vendor's operator of the same form differs in name at most (`names`); an operator of another
    form, or composed of several, is a function of the builder and the vocabulary operator's
    operands and attributes (`forms`). Operators that a vendor lacks raise NoRule, and the call runs
    eagerly. Sizes are integers or symbolic integers throughout.
    """

    names: Mapping[str, str] = {}
    """Operator of the vocabulary -> the vendor's name, where they differ."""
    forms: Mapping[str, Callable[..., Any]] = {}
    """Operator of the vocabulary -> the function that composes it from the vendor's operators."""
    moves: frozenset[str] = frozenset()
    """The vendor's operators that only move the bits of their operands."""
    exact: frozenset[str] = frozenset()
    """The vendor's operators whose integer results are in the range of their operands' dtype."""
    constant_sizes = False
    """Whether sizes of gradients of convolutions have to be constants."""
    bias_apart: frozenset[torch.dtype] = frozenset()
    """The dtypes in which the vendor's convolutions take no bias."""
    largest_window: float = math.inf
    """The most elements of a window that the vendor's pooling takes."""
    largest_step: float = math.inf
    """The largest stride that the vendor's pooling takes."""

    random_bits = 53
    """The bits of a random float64 number in [0, 1)."""

    def __init_subclass__(cls) -> None:
        """Raises ValueError for names and forms of what is no operator of the vocabulary."""
        _check_known(cls, {"names": cls.names, "forms": cls.forms}, "the vocabulary", VOCABULARY)

    def __init__(self, dialect: Dialect, fake_mode: FakeTensorMode | None) -> None:
        """Raises ValueError for operators in its tables that the dialect lacks."""
        tables = {"names": self.names.values(), "moves": self.moves, "exact": self.exact}
        _check_known(type(self), tables, dialect.name, dialect.prototypes)
        super().__init__(dialect, fake_mode)
        self._once: dict[Any, Any] = {}

    def takes(self, kind: str, port: str, dtype: torch.dtype) -> bool:
        """Whether the vendor has an operator and takes this dtype at this input."""
        kind = self.names.get(kind, kind)
        prototype = self.dialect.prototypes.get(kind)
        found = None if prototype is None else prototype.input(port)
        if prototype is not None and found is not None and found.same_as:
            found = prototype.input(found.same_as)
        return found is not None and self._takes(kind, found, dtype)

    def _takes(self, kind: str, port: Port, dtype: torch.dtype) -> bool:
        return dtype in port.dtypes

    def ops(self, kind: str, *operands: Operand | None, **attrs: Any) -> list[Value]:
        """One operator of the vocabulary, or one of the vendor's own, and all its results."""
        form = self.forms.get(kind)
        if form is not None:
            made = form(self, *operands, **attrs)
            return [made] if isinstance(made, Value) else list(made)
        return self.own(self.names.get(kind, kind), *operands, **attrs)

    def own(self, kind: str, *operands: Operand | None, **attrs: Any) -> list[Value]:
        """One operator of the vendor's. Operands in dtypes that it does not take are converted to a
        wider dtype without loss (or, for an operator that only moves bits, to one of the same
        size), and the results converted back."""
        prototype = self.dialect.prototypes.get(kind)
        if prototype is None:
            if kind in VOCABULARY:
                raise NoRule(f"{self.dialect.name} has no {kind}")
            return super().ops(kind, *operands, **attrs)  # which raises PrototypeError
        given = dict(enumerate(operands))
        changed: dict[str, torch.dtype] = {}
        for position, port in enumerate(prototype.inputs):
            leader = port.same_as or port.name
            dtype = _dtype_of(given.get(position))
            if dtype is None or self._takes(kind, port, dtype):
                continue
            if not port.same_as and not prototype.written:
                stand_in = self._stand_in(kind, port, dtype)
                changed |= {} if stand_in is None else {leader: dtype}
                given |= self._converted(prototype.inputs, given, leader, stand_in)
        results = super().ops(kind, *given.values(), **attrs)
        if not changed:
            return results
        many = prototype.outputs[0].arity == "many"
        ports = prototype.outputs[:1] * len(results) if many else prototype.outputs
        return [
            self._like(value, changed[port.same_as]) if port.same_as in changed else value
            for port, value in zip(ports, results, strict=True)
        ]

    def _stand_in(self, kind: str, port: Port, dtype: torch.dtype) -> torch.dtype | None:
        """A dtype that an operator takes instead of `dtype`, without loss."""
        candidates = WIDER.get(dtype, ())
        if kind in self.moves:
            candidates = (*SAME_BITS.get(dtype, ()), *candidates)
        elif not dtype.is_floating_point and kind not in self.exact:
            return None
        return next((d for d in candidates if self._takes(kind, port, d)), None)

    def _converted(
        self, ports: Sequence[Port], given: Mapping[int, Any], leader: str,
        dtype: torch.dtype | None,
    ) -> dict[int, Any]:  # fmt: skip
        """The operands that share the dtype of the port `leader`, in `dtype`."""
        found: dict[int, Any] = {}
        for position, port in enumerate(ports):
            operand = given.get(position)
            if dtype is None or operand is None or leader not in (port.name, port.same_as):
                continue
            if isinstance(operand, (tuple, list)):
                found[position] = tuple(self._like(value, dtype) for value in operand)
            else:
                found[position] = self._like(operand, dtype)
        return found

    def _like(self, value: Value, dtype: torch.dtype) -> Value:
        """`value` converted to the dtype that replaces its own, or back."""
        if dtype in SAME_BITS.get(value.dtype, ()) or value.dtype in SAME_BITS.get(dtype, ()):
            return self.op("Bitcast", value, type=dtype)
        return self.cast(value, dtype)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value that several rules share, such as a mask: built at its first use."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    # ---- dtypes ---------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        return x if x.dtype == dtype else self.op("Cast", x, dst_type=dtype)

    def as_type(self, x: Operand, dtype: torch.dtype) -> Value:
        """A value of `dtype`: a cast tensor, or a number as a 0-dim constant."""
        return self.cast(x, dtype) if isinstance(x, Value) else self.number(x, dtype)

    def compute_dtype(self, dtype: torch.dtype, *operands: Operand) -> torch.dtype:
        """float32 in place of a narrow type that cannot hold one of the numbers exactly."""
        inexact = any(not isinstance(x, Value) and not holds(dtype, x) for x in operands)
        return opmath_dtype(dtype) if inexact else dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype eager gives the (first) result."""
        return self._first_result().dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes eager gives the (first) result."""
        return tuple(self._first_result().shape)

    def _first_result(self) -> torch.Tensor:
        meta: Any = self.meta
        return meta[0] if isinstance(meta, (tuple, list)) else meta

    def binary(self, kind: str, x: Operand, y: Operand, dtype: torch.dtype | None = None) -> Value:
        """`kind` on both operands in `dtype` (the result's), wider where a number needs it."""
        dtype = dtype or self.dtype
        wide = self.compute_dtype(dtype, x, y)
        result = self.op(kind, self.as_type(x, wide), self.as_type(y, wide))
        return self.cast(result, dtype) if result.dtype == wide else result

    # ---- shapes ---------------------------------------------------------------------------------

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        if list(order) == list(range(x.ndim)):
            return x
        return self.op("Transpose", x, self.ints([int(d) for d in order]))

    def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
        if self.same_shape(x.shape, shape):
            return x
        return self.op("Reshape", x, self.ints(list(shape)))

    def broadcast(self, x: Value, shape: Sequence[Any]) -> Value:
        if self.same_shape(x.shape, shape):
            return x
        return self.op("BroadcastTo", x, self.ints(list(shape)))

    def along(self, x: Value, axis: int, shape: Sequence[Any]) -> Value:
        """A vector's elements along `axis`, the same for all places of the other dimensions."""
        sizes = [size if d == axis else 1 for d, size in enumerate(shape)]
        return self.broadcast(self.reshape(x, sizes), shape)

    def squeeze(self, x: Value, axes: Sequence[int]) -> Value:
        gone = {axis % x.ndim for axis in axes}
        return self.reshape(x, [s for d, s in enumerate(x.shape) if d not in gone])

    def unsqueeze(self, x: Value, axis: int) -> Value:
        axis %= x.ndim + 1
        return self.reshape(x, [*x.shape[:axis], 1, *x.shape[axis:]])

    def slice(self, x: Value, axis: int, start: Any, end: Any, step: int = 1) -> Value:
        """Elements start, start + step, ... before end; both within the dimension."""
        begin: list[Any] = [0] * x.ndim
        ends, steps = list(x.shape), [1] * x.ndim
        begin[axis], ends[axis], steps[axis] = start, end, step
        return self.op("StridedSlice", x, self.ints(begin), self.ints(ends), self.ints(steps))

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        return self.op("Concat", tuple(parts), concat_dim=axis, N=len(parts))

    def unpack(self, x: Value, axis: int, count: int) -> list[Value]:
        """The slices along `axis`, without it."""
        return self.ops("Unstack", x, num=count, axis=axis)

    def full(self, shape: Sequence[Any], value: Operand, dtype: torch.dtype) -> Value:
        return self.op("Fill", self.ints(list(shape)), self.as_type(value, dtype))

    def arange(self, size: Any, dtype: torch.dtype = torch.int64) -> Value:
        """0, 1, ... size - 1."""
        zero, one = self.const(0, torch.int64), self.const(1, torch.int64)
        return self.cast(self.op("Range", zero, self.number(size, torch.int64), one), dtype)

    def iota(self, shape: Sequence[Any], dimension: int) -> Value:
        """Each element's place along a dimension, int64."""
        line = self.arange(shape[dimension])
        return self.broadcast(
            self.reshape(line, [-1, *[1] * (len(shape) - dimension - 1)]), list(shape)
        )

    # ---- arithmetic -----------------------------------------------------------------------------

    def add(self, x: Operand, y: Operand) -> Value:
        return self.plain("Add", x, y)

    def sub(self, x: Operand, y: Operand) -> Value:
        return self.plain("Sub", x, y)

    def mul(self, x: Operand, y: Operand) -> Value:
        return self.plain("Mul", x, y)

    def div(self, x: Operand, y: Operand) -> Value:
        return self.plain("Div", x, y)

    def plain(self, kind: str, x: Operand, y: Operand) -> Value:
        """`kind` in the dtype of the operand that is a tensor."""
        dtype = x.dtype if isinstance(x, Value) else y.dtype
        return self.op(kind, self.as_type(x, dtype), self.as_type(y, dtype))

    def where(self, condition: Value, x: Operand, y: Operand, dtype: torch.dtype) -> Value:
        return self.op("Select", condition, self.as_type(x, dtype), self.as_type(y, dtype))

    def truth(self, x: Value) -> Value:
        """Whether each element is not zero."""
        if x.dtype == torch.bool:
            return x
        return self.op("NotEqual", x, self.number(0, x.dtype))

    def reduce(self, kind: str, x: Value, axes: Sequence[int], keep: bool) -> Value:
        """`kind` along `axes`; none of them leaves `x` as it is."""
        if not axes:
            return x
        return self.op(kind, x, self.ints([a % x.ndim for a in axes]), keep_dims=keep)

    def wide(self, x: Value) -> Value:
        """`x` in float32 where it is narrower: for intermediate results that must not round."""
        return self.cast(x, opmath_dtype(x.dtype))


def _check_known(
    cls: type, tables: Mapping[str, Iterable[str]], language: str, known: Iterable[str]
) -> None:
    kinds = sorted(known)
    for table, listed in tables.items():
        for kind in sorted(set(listed).difference(kinds)):
            near = did_you_mean(nearest(kind, kinds))
            problem = f"{cls.__name__}.{table}: {kind!r} is no operator of {language}"
            raise ValueError(f"{problem}.{near}" if near else problem)


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Whether a number keeps its value in `dtype`; a symbolic one may not."""
    if not isinstance(number, (bool, int, float)):
        return False
    return number != number or converted(number, dtype) == number


def _dtype_of(operand: Any) -> torch.dtype | None:
    first = operand[0] if isinstance(operand, (tuple, list)) and operand else operand
    return first.dtype if isinstance(first, Value) else None


def per_axis(values: Any, rank: int) -> list[int]:
    """A kernel size, stride, padding or dilation for each spatial dimension."""
    listed = [values] if isinstance(values, int) else list(values)
    if not all(isinstance(v, int) for v in listed):
        raise NoRule("symbolic kernel sizes, strides, padding or dilations")
    return listed * rank if len(listed) == 1 else listed


def axes_of(dims: Any, rank: int) -> list[int]:
    """A dim argument as a list: all dimensions for None or an empty list."""
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return list(range(rank))
    return [d % rank if rank else 0 for d in dims] if rank else []


__all__ = ["NoRule", "Operand", "Ops", "Value", "axes_of", "holds", "per_axis"]
