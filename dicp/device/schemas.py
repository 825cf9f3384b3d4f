"""Operators by their schemas: names, the functional form behind one, and a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.device.scalars import number_tensor
from dicp.torch_private import OpOverload, schema_of, true_device


def name_of(op: OpOverload) -> str:
    """`add.out`, or `relu` for an overload without a name."""
    schema = schema_of(op)
    name = schema.name.split("::")[-1]
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def packet_name(op: OpOverload) -> str:
    return str(schema_of(op).name.split("::")[-1])


@dataclass(frozen=True)
class Functional:
    """The functional overload behind an operator, and where its results go."""

    op: OpOverload
    outs: tuple[str, ...] = ()
    """Names of the arguments that receive the results, the last ones."""
    fresh: int = 0
    """How many results come before those."""
    resizes: bool = True
    """Whether results of other sizes resize what they are written to."""


HELPERS = {
    torch.ops.aten._cummax_helper.default: torch.ops.aten.cummax.default,
    torch.ops.aten._cummin_helper.default: torch.ops.aten.cummin.default,
}
"""Operators that write to given results, under names of their own."""


def functional_of(op: OpOverload) -> Functional | None:
    schema = schema_of(op)
    if not schema.is_mutable:
        return Functional(op)
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if op in HELPERS:
        return Functional(HELPERS[op], tuple(written))
    library = getattr(torch.ops, op.namespace)
    beside = getattr(library, f"{packet_name(op)}_functional", None)
    if beside is not None and not schema.overload_name:  # what is written is returned, last
        return Functional(beside.default, tuple(written), len(schema.returns))
    outs = [a.name for a in schema.arguments if a.name in written and a.kwarg_only]
    name = packet_name(op)
    in_place = not outs and name.endswith("_") and len(written) == 1
    if not outs and not in_place:
        return None
    packet = getattr(library, name.removesuffix("_") if in_place else name, None)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in outs]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        has = [(a.name, str(a.type)) for a in schema_of(found).arguments]
        factory = tuple(name for name, _ in has[len(wanted) :]) == OPTIONS
        returned = len(schema_of(found).returns)
        if schema_of(found).is_mutable or returned != len(outs or written):
            continue
        if has == wanted or (factory and has[: len(wanted)] == wanted):
            return Functional(found, tuple(outs or written), resizes=not in_place)
    return None


OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""Arguments of an operator that makes a tensor of numbers; given results stand for them."""


def inputs_of(
    form: Functional, given: Mapping[str, Any], outs: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """The arguments of the functional operator, by name."""
    options: dict[str, Any] = dict.fromkeys(OPTIONS)
    if outs:
        options |= {"dtype": outs[0].dtype, "device": true_device(outs[0])}
    names = [argument.name for argument in schema_of(form.op).arguments]
    return {name: given[name] if name in given else options[name] for name in names}


def bound(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, in the schema's order, defaults included."""
    found: dict[str, Any] = {}
    for k, argument in enumerate(schema_of(op).arguments):
        if k < len(args) and not argument.kwarg_only:
            found[argument.name] = args[k]
        else:
            default = argument.default_value if argument.has_default_value() else None
            found[argument.name] = kwargs.get(argument.name, default)
    return found


def bound_with_results(
    op: OpOverload, form: Functional, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The arguments of a call by name, and those that it writes its results to."""
    given = bound(op, args, kwargs)
    return given, [given[name] for name in form.outs]


def with_tensors_for_numbers(op: OpOverload, given: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers given for tensors become tensors, so that code is compiled for any number."""
    changed = dict(given)
    for argument in schema_of(op).arguments:
        value = given[argument.name]
        if is_number_for_tensor(argument, value):
            changed[argument.name] = number_tensor(value)
    return changed


def keep_dtypes(op: OpOverload, given: Mapping[str, Any]) -> bool:
    """Whether numbers given for tensors promote none of the tensors that have dimensions."""
    values = [(a, given[a.name]) for a in schema_of(op).arguments]
    numbers = [value for a, value in values if is_number_for_tensor(a, value)]
    tensors = [v for _, v in values if isinstance(v, torch.Tensor) and v.dim() > 0]
    return bool(numbers) and any(
        all(torch.result_type(tensor, number) == tensor.dtype for number in numbers)
        for tensor in tensors
    )


def is_number_for_tensor(argument: Any, value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) and str(argument.type) == "Tensor"


def taking_numbers(op: OpOverload, given: Mapping[str, Any]) -> OpOverload:
    """The overload that takes numbers where `given` has them for tensors; `op` if there is none."""
    wanted = [
        (a.name, "number" if is_number_for_tensor(a, given[a.name]) else str(a.type))
        for a in schema_of(op).arguments
    ]
    overloads = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
    has = {o: [(a.name, str(a.type)) for a in schema_of(o).arguments] for o in overloads}
    return next((o for o in has if has[o] == wanted), op)


def tensor_places(name: str, value: Any) -> list[tuple[str, int]]:
    """The tensors of an argument: its name, and their positions if it is a list."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [(name, k) for k, item in enumerate(values) if isinstance(item, torch.Tensor)]


def arguments_of(
    op: OpOverload, given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`given` as positional and named arguments of `op`."""
    arguments = schema_of(op).arguments
    positional = tuple(given[a.name] for a in arguments if not a.kwarg_only)
    return positional, {a.name: given[a.name] for a in arguments if a.kwarg_only}


def without_values(value: Any) -> Any:
    """A tensor's sizes, strides and dtype alone; meta for a device."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def single_element(value: Any) -> Any:
    """A host tensor of one element with the dtype and rank of a tensor, or empty as that one; the
    host for a device."""
    if isinstance(value, torch.Tensor):
        sizes = [min(size, 1) for size in value.shape]
        return torch.ones(sizes, dtype=value.dtype, device="cpu")
    return torch.device("cpu") if isinstance(value, torch.device) else value
