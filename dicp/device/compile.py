"""One ATen operator as a compiled graph: traced with symbolic sizes, built by the device's target.

A compiled operator serves every call of the same dtypes, ranks, memory layouts and numbers, with
sizes that satisfy the guards of its trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from dicp.config import Config
from dicp.device.call import Call, NotCompiled
from dicp.device.hosted import written_inputs
from dicp.device.thresholds import FIXED_INTEGERS, MAX_VARIANTS
from dicp.dynamo_bridge.compile_fx import compile_aten
from dicp.dynamo_bridge.decompose import decompositions
from dicp.target import Target
from dicp.torch_private import make_fx, pytree, traced_guards, traced_guards_hold


@dataclass
class CompiledOperator:
    """A compiled graph of real tensors: complex ones go in and come out as pairs."""

    executable: Callable[[list[Any]], Sequence[Any]]
    graph: fx.GraphModule
    guards: str
    returned: Results
    written: tuple[int, ...] = ()
    """Inputs that it overwrites, which an operator's name may not show."""
    sizes: tuple[torch.Size, ...] | None = None
    """The only sizes it was compiled for; None: any that satisfy the guards."""

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether the sizes and integers in `inputs` are among those it was compiled for."""
        if self.sizes is not None:
            return self.sizes == _sizes(inputs)
        if not self.guards:
            return True
        return traced_guards_hold(self.graph, self.guards, [as_traced(one) for one in inputs])

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor | None]:
        results = self.executable([in_pairs(one) for one in inputs])
        given = [
            torch.view_as_complex(r) if pairs else r
            for r, pairs in zip(results, self.returned.pairs, strict=True)
        ]
        return self.returned.with_absent(given, None)

    def prepare(self, inputs: Sequence[Any]) -> None:
        prepare = getattr(self.executable, "prepare", None)
        if prepare is not None:
            prepare([in_pairs(one) for one in inputs])

    def native_call(self, inputs: Sequence[Any]) -> Any:
        """What the native part needs to run it alone on `inputs`; None if it cannot."""
        native_call = getattr(self.executable, "native_call", None)
        if native_call is None or any(self.returned.pairs):
            return None
        return native_call([in_pairs(one) for one in inputs])


@dataclass
class Results:
    """What a traced operator returned."""

    single: bool = False
    """One tensor, and no tuple."""
    pairs: tuple[bool, ...] = ()
    """Which results are complex: pairs of real numbers in the graph."""
    converted: bool = False
    """Whether a result has another dtype than the tensor that was given for it."""
    absent: tuple[bool, ...] = ()
    """Which results are None, such as unneeded gradients: the graph has none for them."""

    def with_absent(self, results: Iterable[Any], absent: Any) -> list[Any]:
        """`results` of the graph at their places among the operator's, `absent` at the others."""
        given = iter(results)
        return [absent if missing else next(given) for missing in self.absent]


class OperatorCompiler:
    """The compiled operators of a target, by the class of their arguments."""

    def __init__(self, target: Target, config: Config) -> None:
        self.target, self.config = target, config
        self._found: dict[Any, list[CompiledOperator] | NotCompiled] = {}
        self._variants: dict[Any, set[Any]] = {}
        self._lock = threading.RLock()

    def compiled(self, call: Call) -> tuple[CompiledOperator, list[Any]]:
        """The compiled form of a call, and the inputs to run it with: tensors, then integers.

        Raises NotCompiled.
        """
        leaves, spec = call.leaves()
        shapes, numbers = _classes(leaves)
        group = (call.op, call.dtypes, str(spec), shapes, torch.get_default_dtype())
        inputs: list[Any] = [dense(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with self._lock:
            if self._integers_change(group, numbers) and any(map(_is_symbol, leaves)):
                integers = [leaf for leaf in leaves if _is_symbol(leaf)]
                fixed = _classes(["symbol" if _is_symbol(leaf) else leaf for leaf in leaves])
                try:
                    made = (*group, fixed, "any")
                    return self._found_or_made(call, made, (), [*inputs, *integers])
                except NotCompiled as reason:
                    if reason.transient:
                        raise
            return self._found_or_made(call, group, numbers, inputs)

    def _integers_change(self, group: Any, numbers: Any) -> bool:
        known = self._variants.get(group, set())
        return len(known) >= FIXED_INTEGERS and numbers not in known

    def _found_or_made(
        self, call: Call, group: Any, numbers: Any, inputs: list[Any]
    ) -> tuple[CompiledOperator, list[Any]]:
        key = (*group, numbers)
        found = self._found.get(key, [])
        if isinstance(found, NotCompiled):
            raise found
        for one in found:
            if one.takes(inputs):
                return one, inputs
        if len(found) >= MAX_VARIANTS:
            raise NotCompiled("its sizes change from call to call, and its code is for fixed ones")
        try:
            self._count_variant(group, numbers if group[-1] != "any" else len(found))
            made = self._compile(call, group, inputs)
        except NotCompiled as reason:
            if not found and not reason.transient:
                self._found[key] = reason
            raise
        self._found[key] = [*found, made]
        return made, inputs

    def _count_variant(self, group: Any, numbers: Any) -> None:
        known = self._variants.setdefault(group, set())
        if len(known) >= MAX_VARIANTS:
            raise NotCompiled("its numbers change from call to call")
        known.add(numbers)

    def _compile(self, call: Call, group: Any, inputs: Sequence[Any]) -> CompiledOperator:
        """For any sizes, or where the target has code for fixed ones alone, for these."""
        fixed = (*group, _classes(call.leaves()[0])[1], "fixed")
        try:
            if fixed in self._variants:
                raise NotCompiled("its sizes have to be fixed")
            return self._traced(call, inputs, "symbolic")
        except NotCompiled as reason:
            may_vary = any(n >= 2 for t in inputs for n in t.shape)
            if reason.transient or group[-1] == "any" or not may_vary:
                raise
            made = self._traced(call, inputs, "fake")
            self._count_variant(fixed, _sizes(inputs))
            return replace(made, guards="", sizes=_sizes(inputs))

    def _traced(
        self, call: Call, inputs: Sequence[Any], sizes: Literal["symbolic", "fake"]
    ) -> CompiledOperator:
        returned = Results()
        run = _as_function(call, any(isinstance(one, int) for one in inputs), returned)
        given = [as_traced(one) for one in inputs]
        try:
            table = decompositions(self.target)
            graph = make_fx(run, decomposition_table=table, tracing_mode=sizes)(*given)
            written = tuple(written_inputs(graph.graph))
            compiled, report = compile_aten(graph, given, self.target, self.config)
        except Exception as error:
            transient = isinstance(error, (OSError, MemoryError))
            raise NotCompiled(f"{type(error).__name__}: {str(error)[:200]}", transient) from error
        left = [node for node in report.nodes if node.decision == "eager"]
        if left:
            raise NotCompiled(f"{left[0].op}: {left[0].reason}")
        assert compiled.executable is not None
        guards = traced_guards(graph)
        return CompiledOperator(compiled.executable, graph, guards, returned, written)


def _is_symbol(leaf: Any) -> bool:
    """Whether a number becomes a symbol of a trace; PyTorch takes 0 and 1 for constants."""
    return isinstance(leaf, int) and leaf not in (0, 1)


def _as_function(call: Call, any_integers: bool, returned: Results) -> Callable[..., list[Any]]:
    """The call as a function of its tensors in pairs, and of its integers if `any_integers`.

    `returned` is set when it is traced.
    """
    leaves, spec = call.leaves()

    def run(*inputs: Any) -> list[Any]:
        tensors = iter(inputs)
        integers = iter(inputs[sum(isinstance(leaf, torch.Tensor) for leaf in leaves) :])

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                given = next(tensors)
                return torch.view_as_complex(given) if leaf.is_complex() else given
            return next(integers) if any_integers and _is_symbol(leaf) else leaf

        args, kwargs = pytree.tree_unflatten([filled(leaf) for leaf in leaves], spec)
        result = call.op(*args, **kwargs)
        returned.single = isinstance(result, torch.Tensor)
        every = [result] if returned.single else list(result)
        returned.absent = tuple(r is None for r in every)
        results = [r for r in every if r is not None]
        if not all(isinstance(r, torch.Tensor) for r in results):
            raise NotCompiled("it returns something else than tensors")
        returned.pairs = tuple(r.is_complex() for r in results)
        wanted = call.dtypes or (None,) * len(results)
        returned.converted = any(
            dtype not in (None, r.dtype) for r, dtype in zip(results, wanted, strict=True)
        )
        return [_converted(r, dtype) for r, dtype in zip(results, wanted, strict=True)]

    return run


def _converted(result: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A result in the dtype of the tensor that was given for it, complex numbers as pairs."""
    if not result.is_complex():
        return result if dtype is None else result.to(dtype)
    if dtype is not None and not dtype.is_complex:
        raise NotCompiled(f"a result of {result.dtype} is not converted to {dtype}")
    pairs = torch.view_as_real(result)
    return pairs if dtype is None else pairs.to(dtype.to_real())


def in_pairs(given: Any) -> Any:
    """A complex tensor as pairs of real numbers that share its memory; any other as it is."""
    complex_one = isinstance(given, torch.Tensor) and given.is_complex()
    return torch.view_as_real(given) if complex_one else given


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


def as_traced(tensor: Any) -> Any:
    """A tensor of its own of the same dtype, sizes and order of dimensions, without values.

    Neither the place in its storage nor the strides of dimensions of size 1 matter to compiled
    code; a trace would take each for a symbol, and guard it.
    """
    if isinstance(tensor, int):
        return tensor
    tensor = in_pairs(tensor)
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
            shapes.append((leaf.dtype, sizes, tuple(_layout(leaf))))
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
