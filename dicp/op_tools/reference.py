"""The reference of a call: the same operator on the CPU, floating values in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dicp.config import tool_variable
from dicp.dynamo_bridge.timed import copied_as_laid_out
from dicp.errors import ToolVariableError
from dicp.op_tools import trees
from dicp.op_tools.draws import draws_undone
from dicp.op_tools.names import overwrites, reads_bits, reads_memory
from dicp.op_tools.overwriting import differentiable_result
from dicp.torch_private import FakeTensorMode, TorchDispatchMode, schema_of

CPU = torch.device("cpu")
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}
_WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip
Rules = Mapping[torch.dtype, torch.dtype]


def cast_rules(variable: str, default: str = "") -> Rules:
    """The dtype rules `A->B,...` of a variable. Raises ToolVariableError."""
    return parse_rules(variable, tool_variable(variable) or default)


@lru_cache(maxsize=256)
def parse_rules(variable: str, text: str) -> Rules:
    rules = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        source, arrow, target = (part.strip() for part in entry.partition("->"))
        dtypes = [_dtype(name) for name in (source, target)]
        if not arrow or None in dtypes:
            raise ToolVariableError(
                variable, text, "rules such as torch.float16->torch.float32, separated by commas"
            )
        rules[dtypes[0]] = dtypes[1]
    return rules  # type: ignore[return-value]


def _dtype(name: str) -> torch.dtype | None:
    short = name.removeprefix("torch.")
    found = getattr(torch, _ALIASES.get(short, short), None)
    return found if isinstance(found, torch.dtype) else None


def reference_rules(operator: str) -> Rules:
    """How the reference's dtypes differ: the operator's own variable, or everything in float64."""
    variable = f"{operator.rpartition('.')[2].upper()}_OP_DTYPE_CAST_DICT"
    return cast_rules(variable) or _WIDE


def widened(value: torch.Tensor) -> torch.Tensor:
    """The tensor in float64 or complex128; integers as they are."""
    return value.to(_WIDE.get(value.dtype, value.dtype))


class _WideningMode(TorchDispatchMode):
    """Casts to narrower dtypes, and narrower constants, are float64 too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema.is_mutable or any(a.alias_info for a in schema.arguments):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # another dtype draws other numbers
            return trees.map_tensors(func(*args, **kwargs), widened)

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return widened(value)
            return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value

        result = func(*trees.mapped(tuple(args), leaf), **trees.mapped(kwargs, leaf))
        return trees.map_tensors(result, widened)


def autocast_of(args: Any, kwargs: Any) -> torch.dtype | None:
    """What autocast of the arguments' device computes in; None where it is off."""
    for kind in (tensor.device.type for tensor in trees.tensors((args, kwargs))):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def autocast_on(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A device's autocast, perhaps in the place of another's; off for None. That of the CPU leaves
    float64 as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def autocast_name(args: Any, kwargs: Any) -> str:
    """The dtype of `autocast_of` as captures hold it; empty where autocast is off."""
    dtype = autocast_of(args, kwargs)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def autocast_named(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast that `autocast_name` told of, on a device."""
    return autocast_on(device, _dtype(name) if name else None)


def without_autocast(args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    """Within, operators on these arguments compute in the dtypes that they are given."""
    if autocast_of(args, kwargs) is None:
        return nullcontext()
    stack = ExitStack()
    for kind in {tensor.device.type for tensor in trees.tensors((args, kwargs))}:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def widened_dtypes(wide: bool) -> AbstractContextManager[Any]:
    """Within, what the program casts or creates in a narrower floating dtype is in float64."""
    return _WideningMode() if wide else nullcontext()


@dataclass(frozen=True)
class Reference:
    """The arguments of a call, copied to the CPU, and the dtypes that were widened."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    used: Rules
    operator: str = ""

    @classmethod
    def of(
        cls,
        operator: str,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rules: Rules | None = None,
    ) -> Reference:
        """Copies of the arguments; `rules` of dtypes, by default those of the operator."""
        rules = reference_rules(operator) if rules is None else rules
        rules = {} if reads_bits(operator, args, kwargs) else rules
        used: dict[torch.dtype, torch.dtype] = {}
        exact_memory = reads_memory(operator)
        overlapping = _overlapping(args, kwargs) if overwrites(operator, kwargs) else set()
        memory: dict[int, torch.Tensor] = {}

        def tensor(value: torch.Tensor) -> torch.Tensor:
            dtype = rules.get(value.dtype, value.dtype)
            if dtype != value.dtype:
                used[value.dtype] = dtype
            if id(value) not in overlapping:
                return copied(value, dtype, exact_memory)
            key = value.untyped_storage().data_ptr()
            if key not in memory:
                memory[key] = _memory_of(value, dtype)
            return memory[key].as_strided(value.shape, value.stride(), value.storage_offset())

        def other(value: Any) -> Any:
            if isinstance(value, torch.Generator) and value.device.type != "cpu":
                return torch.Generator().manual_seed(value.initial_seed())
            return rules.get(value, value) if isinstance(value, torch.dtype) else value

        return cls(func, *moved(args, kwargs, CPU, tensor, other), used, operator)

    def unwidened(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reference:
        """Copies of the arguments on the CPU in their own dtypes."""
        return Reference.of(self.operator, self.func, args, kwargs, rules={})

    def run(self) -> Any:
        """The result; autograd records nothing."""
        with torch.no_grad():
            return self.func(*self.args, **self.kwargs)

    def gradients(
        self, grad_outputs: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of the `needed` input tensors for these gradients of the output tensors.

        Of others there may be none: running statistics are not differentiable.
        """
        inputs = list(trees.tensors((self.args, self.kwargs)))
        leaves = {id(t): t.detach() for t in inputs}
        for tensor, is_needed in zip(inputs, needed, strict=True):
            if is_needed:
                leaves[id(tensor)].requires_grad_()
        # What is written in place must not be a leaf.
        in_place = overwrites(getattr(self.func, "__name__", ""), self.kwargs)
        with torch.enable_grad():
            swap = (lambda t: leaves[id(t)].clone()) if in_place else (lambda t: leaves[id(t)])
            args, kwargs = trees.map_tensors((self.args, self.kwargs), swap)
            result = differentiable_result(self.operator, args, self.func(*args, **kwargs))
            results = list(trees.tensors(result))
            pairs = [
                (result, gradient.to(CPU, result.dtype))
                for result, gradient in zip(results, grad_outputs, strict=True)
                if gradient is not None and result.requires_grad
            ]
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            if not pairs or not wanted:
                return [None] * len(inputs)
            found = torch.autograd.grad(
                [r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )
        of_leaf = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
        return [of_leaf.get(id(leaves[id(t)])) for t in inputs]


def moved(
    args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, tensor: trees.Leaf,
    other: Callable[[Any], Any] = lambda value: value,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments with what `tensor` makes of each tensor, and `device` for devices they name."""
    plain = {k: device if k == "device" and v is not None else v for k, v in kwargs.items()}
    return trees.map_tensors(  # type: ignore[no-any-return]
        (tuple(args), plain), tensor, lambda v: device if isinstance(v, torch.device) else other(v)
    )


def copied(value: torch.Tensor, dtype: torch.dtype, exact_memory: bool = False) -> torch.Tensor:
    """A copy on the CPU with the strides of `value`, so that views of it are possible as there."""
    value = value.detach()
    if value.layout != torch.strided or value.is_quantized:
        return value.to(CPU, dtype, copy=True) if not value.is_quantized else value.cpu().clone()
    if exact_memory:
        whole = _memory_of(value, dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    if value.is_contiguous() or any(stride == 0 for stride in value.stride()):
        return value.to(CPU, dtype, copy=True)
    copy = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=CPU)
    return copy.copy_(value)


def _memory_of(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy on the CPU of the whole storage of `value`, flat."""
    flat = torch.empty(0, dtype=value.dtype, device=value.device)
    return flat.set_(value.untyped_storage()).to(CPU, dtype, copy=True)


def _overlapping(args: Any, kwargs: Any) -> set[int]:
    """The ids of tensors whose elements lie among those of another one of the same dtype."""
    spans: dict[Any, list[tuple[int, int, int]]] = {}
    for tensor in {id(t): t for t in trees.tensors((args, kwargs))}.values():
        bits = tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
        if tensor.layout == torch.strided and tensor.numel() and not bits:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            first = tensor.storage_offset()
            last = first + sum((size - 1) * stride for size, stride in steps)
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
            spans.setdefault(key, []).append((first, last, id(tensor)))
    found = set()
    for members in spans.values():
        farthest, owner = -1, 0
        for first, last, own in sorted(members):
            found |= {owner, own} if first <= farthest else set()
            farthest, owner = max((farthest, owner), (last, own))
    return found


class _Copied(torch.autograd.Function):
    """A copy with the strides of the tensor, which a clone of a slice has not."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return copied_as_laid_out(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def writable(leaf: torch.Tensor) -> torch.Tensor:
    """A copy of a leaf that wants a gradient, which may not be written in place itself."""
    return _Copied.apply(leaf)  # type: ignore[no-any-return, no-untyped-call]


def expected(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What PyTorch's inference says of the result: tensors without memory; None if it cannot."""
    meta = torch.device("meta")
    try:
        if autocast_of(args, kwargs) is not None:  # which tensors on no device do not have
            mode = FakeTensorMode()
            given = trees.map_tensors((args, kwargs), lambda t: mode.from_tensor(t.detach()))
            with torch.no_grad(), draws_undone(func), mode:
                return func(*given[0], **given[1])
        with torch.no_grad(), draws_undone(func), meta:  # without tensors given, none is made
            args, kwargs = moved(args, kwargs, meta, lambda t: t.detach().to(meta))
            return func(*args, **kwargs)
    except Exception:  # operators whose result depends on data have no meta form
        return None
