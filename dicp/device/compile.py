"""One ATen operator as a compiled graph: traced with symbolic sizes, built by the device's target.

A compiled operator serves every call of the same dtypes, ranks, memory layouts and numbers, with
sizes that satisfy the guards of its trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_aten
from dicp.dynamo_bridge.decompose import decompositions
from dicp.target import Target
from dicp.torch_private import (
    OpOverload,
    is_wrapped_number,
    make_fx,
    pytree,
    traced_guards,
    traced_guards_hold,
)

MOST_VARIANTS = 8
"""Compiled forms of one operator that differ in numbers alone: a program with a new number at
every step would compile at every step."""


class NotCompiled(Exception):
    """The target does not compile this operator, or not with these arguments; the text says why."""


@dataclass(frozen=True)
class Call:
    """A functional operator, and the arguments of one call of it on host tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtypes: tuple[torch.dtype | None, ...] = ()
    """The dtypes of given results, to which what the operator returns is converted."""

    def leaves(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten((self.args, dict(self.kwargs)))


@dataclass
class CompiledOperator:
    executable: Callable[[list[Any]], Sequence[Any]]
    graph: fx.GraphModule
    guards: str
    single: bool

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the sizes of `tensors` are among those it was compiled for."""
        if not self.guards:
            return True
        return traced_guards_hold(self.graph, self.guards, [as_traced(t) for t in tensors])

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self.executable(list(tensors)))


class OperatorCompiler:
    """The compiled operators of a target, by the class of their arguments."""

    def __init__(self, target: Target, config: Config) -> None:
        self.target, self.config = target, config
        self._found: dict[Any, list[CompiledOperator] | NotCompiled] = {}
        self._variants: dict[Any, set[Any]] = {}
        self._lock = threading.RLock()

    def compiled(self, call: Call) -> tuple[CompiledOperator, list[torch.Tensor]]:
        """The compiled form of a call, and the tensors to run it with. Raises NotCompiled."""
        leaves, spec = call.leaves()
        shapes, numbers = _classes(leaves)
        tensors = [dense(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (call.op, call.dtypes, str(spec), shapes, numbers)
        with self._lock:
            found = self._found.get(key, [])
            if isinstance(found, NotCompiled):
                raise found
            for one in found:
                if one.takes(tensors):
                    return one, tensors
            try:
                self._count_variant((call.op, call.dtypes, str(spec), shapes), numbers)
                made = self._compile(call, leaves, spec, tensors)
            except NotCompiled as reason:
                if not found:
                    self._found[key] = reason
                raise
            self._found[key] = [*found, made]
            return made, tensors

    def _count_variant(self, group: Any, numbers: Any) -> None:
        known = self._variants.setdefault(group, set())
        if len(known) >= MOST_VARIANTS:
            raise NotCompiled("its numbers change from call to call")
        known.add(numbers)

    def _compile(
        self, call: Call, leaves: Sequence[Any], spec: Any, tensors: Sequence[torch.Tensor]
    ) -> CompiledOperator:
        run, single = _as_function(call, leaves, spec)
        tensors = [as_traced(tensor) for tensor in tensors]
        try:
            graph = make_fx(
                run, decomposition_table=decompositions(self.target), tracing_mode="symbolic"
            )(*tensors)
            compiled, report = compile_aten(graph, tensors, self.target, self.config)
        except Exception as error:
            raise NotCompiled(f"{type(error).__name__}: {str(error)[:200]}") from error
        left = [node for node in report.nodes if node.decision == "eager"]
        if left:
            raise NotCompiled(f"{left[0].op}: {left[0].reason}")
        assert compiled.executable is not None
        return CompiledOperator(compiled.executable, graph, traced_guards(graph), single())


def _as_function(
    call: Call, leaves: Sequence[Any], spec: Any
) -> tuple[Callable[..., list[Any]], Callable[[], bool]]:
    """The call as a function of its tensors, and whether it returned one tensor when traced."""
    single = [False]

    def run(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = call.op(*args, **kwargs)
        single[0] = isinstance(result, torch.Tensor)
        results = [result] if single[0] else list(result)
        if not all(isinstance(r, torch.Tensor) for r in results):
            raise NotCompiled("it returns something else than tensors")
        wanted = call.dtypes or (None,) * len(results)
        return [r if d is None else r.to(d) for r, d in zip(results, wanted, strict=True)]

    return run, lambda: single[0]


def as_traced(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own of the same dtype, sizes and order of dimensions, without values.

    Neither the place in its storage nor the strides of dimensions of size 1 matter to compiled
    code; a trace would take each for a symbol, and guard it.
    """
    if is_wrapped_number(tensor):
        return tensor
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.size(d) == 1, -tensor.stride(d)))
    strides, step = [0] * tensor.dim(), 1
    for position in reversed(order):
        strides[position] = step
        step *= max(tensor.size(position), 1)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy where its memory has gaps or overlaps."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().contiguous()
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size if size != 1 else 1
    return tensor


def _classes(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The class of every argument: of tensors dtype, rank, layout and which sizes are equal."""
    seen: dict[int, int] = {}
    shapes: list[Any] = []
    numbers: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sizes = tuple(_size_class(int(size), seen) for size in leaf.shape)
            shapes.append((leaf.dtype, sizes, tuple(_layout(leaf)), is_wrapped_number(leaf)))
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            shapes.append(type(leaf))
            numbers.append(repr(leaf))
        else:
            shapes.append(str(leaf))
    return tuple(shapes), tuple(numbers)


def _size_class(size: int, seen: dict[int, int]) -> str:
    """ "0" and "1" are special; other sizes are numbered, equal ones alike."""
    return str(size) if size < 2 else f"s{seen.setdefault(size, len(seen))}"


def _layout(tensor: torch.Tensor) -> Iterator[int]:
    """The order of the dimensions in memory, those of size 1 left out."""
    strides = [
        (stride, position)
        for position, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if size != 1
    ]
    yield from (position for _, position in sorted(strides, reverse=True))
