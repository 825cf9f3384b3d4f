"""Operator names as users write them, and the way from such a name to a function and back."""

from __future__ import annotations

import builtins
import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch.overrides import get_overridable_functions, resolve_name

from dicp.errors import OperatorNameError
from dicp.torch_private import OpOverload, OpOverloadPacket

SKIPPED = frozenset(
    f"torch.Tensor.{name}"
    for name in (
        "backward data_ptr has_names numel size dim type __repr__ __format__ requires_grad_ "
        "is_floating_point is_complex is_contiguous stride storage_offset untyped_storage "
        "retain_grad register_hook register_post_accumulate_grad_hook record_stream storage "
        "nelement __dlpack__ __dlpack_device__ __len__ __hash__ __dir__ __reduce_ex__ __deepcopy__ "
        "element_size ndimension get_device"
    ).split()
) | {"torch.autograd.backward", "torch.autograd.grad", "torch.device"}
"""What computes nothing of its own: no tool looks at it."""

MULTI_TENSOR = ("torch._foreach_", "torch._fused_")
"""How the names begin of what optimizers call on lists of tensors; other private names are left
out."""

COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor broadcast "
    "reduce all_to_all all_to_all_single gather scatter barrier send recv isend irecv "
    "all_reduce_coalesced all_gather_coalesced all_gather_object gather_object "
    "all_gather_single reduce_scatter_single send_object_list recv_object_list "
    "broadcast_object_list scatter_object_list monitored_barrier batch_isend_irecv"
).split()


OLD_NAMES = {
    "torch.dsmm": "torch.mm", "torch.spmm": "torch.mm", "torch.hsmm": "torch.hspmm",
    "torch.saddmm": "torch.sspaddmm",
}  # fmt: skip
"""Old name of a function -> its newer name. Both functions are equal (`==`) in Python."""

NO_OPERATORS = frozenset(
    f"torch.{name}" for name in (
        "load save from_file import_ir_module import_ir_module_from_buffer compile fork"
    ).split()
)  # fmt: skip
"""Functions of PyTorch's that read files or run code: data never names one to be called."""

RESHAPES_IN_PLACE = frozenset(
    "t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_ "
    "detach_ rename_ share_memory_".split()
)
"""Methods that change how a tensor lies in memory, and no value."""


@lru_cache(maxsize=8192)
def name_of(func: Callable[..., Any]) -> str:
    """The operator's name, such as `torch.Tensor.add`; empty for what no tool looks at.

    Property getters and setters, and functions that only switch a mode, have no name.
    """
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        return ""
    name: str = torch_name(func)
    if name.startswith(MULTI_TENSOR):
        return name
    name = name or _qualified(func)
    if name in SKIPPED or name.startswith(("torch.Tensor.is_", "profiler.")):
        return ""
    return name if "._" not in name or "__" in name.rpartition(".")[2] else ""


def torch_name(func: Callable[..., Any]) -> str:
    """The name of a function whose calls reach a TorchFunctionMode; empty for another."""
    name: str | None = resolve_name(func)
    short = f"torch.{getattr(func, '__name__', '')}"
    if name is None and short.startswith(MULTI_TENSOR):
        return short if getattr(torch, func.__name__, None) is func else ""
    known = name or ""
    return OLD_NAMES.get(known, known)


@cache
def names_of(name: str) -> tuple[str, ...]:
    """All names of the operator: that of `torch_name`, the short one in `torch`, and old ones."""
    short = name.rpartition(".")[2]
    func: Any = getattr(torch, short, None) if name.startswith("torch.") else None
    is_function = callable(func) and not isinstance(func, type)
    own = (name, f"torch.{short}") if is_function and torch_name(func) == name else (name,)
    return (*own, *(old for old, new in OLD_NAMES.items() if new == name))


def _qualified(func: Callable[..., Any]) -> str:
    module = getattr(func, "__module__", None) or ""
    return f"{module}.{getattr(func, '__qualname__', getattr(func, '__name__', ''))}"


@cache
def short_name(name: str) -> str:
    """The operator's own part of its name: `add` of `torch.Tensor.add` and `aten.add.Tensor`."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and registered_operator(name) else parts[-1]


def is_constructor(name: str) -> bool:
    """Whether the operator gives memory without values, which no reference can predict."""
    return short_name(name).startswith(("empty", "new_empty"))


def reads_memory(name: str) -> bool:
    """Whether the operator reads its input's storage, beyond the input itself."""
    return short_name(name).startswith("as_strided")


def reads_bits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call shows the bits of its input as another dtype."""
    given = (*args, *kwargs.values())
    return short_name(name) == "view" and any(isinstance(v, torch.dtype) for v in given)


def is_in_place(name: str) -> bool:
    """Whether the operator writes its first argument, by PyTorch's spelling."""
    last = short_name(name)
    if last in ("__setitem__",) or (last.startswith("__i") and last.endswith("__")):
        return last not in ("__index__", "__int__", "__invert__", "__iter__")
    return last.endswith("_") and not last.endswith("__")


def overwrites(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes its first argument or one that is given as `out`."""
    return is_in_place(name) or "out" in kwargs or kwargs.get("inplace") is True


def is_torch(func: Callable[..., Any]) -> bool:
    """Whether calls of the function reach a TorchFunctionMode."""
    return bool(torch_name(func))


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """The owner, attribute and function that a dotted name leads to.

    Raises OperatorNameError, with near names.
    """
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        owner = _module(".".join(parts[:cut]))
        if owner is None:
            continue
        try:
            for part in parts[cut:-1]:
                owner = getattr(owner, part)
            found = getattr(owner, parts[-1])
        except AttributeError:
            continue
        if callable(found) and not isinstance(found, type):
            return owner, parts[-1], found
    if (found := registered_operator(name)) is not None:  # an operator of a plugin
        return attrgetter(".".join(parts[:-1]))(torch.ops), parts[-1], found
    same = [known for known in _known() if known.rpartition(".")[2] == parts[-1]]
    near = same[:3] or difflib.get_close_matches(name, _known(), n=3, cutoff=0.7)
    raise OperatorNameError(name, near)


def operator_called(name: str, modules: Collection[str] = ()) -> Callable[..., Any] | None:
    """The function of an operator of PyTorch's or of its plugins, or of one of these modules; None
    for any other, whose module is not imported. Raises OperatorNameError."""
    given = any(name.startswith(f"{module}.") for module in modules)
    if not given and not name.startswith("torch."):
        return registered_operator(name)
    function = resolve(name)[2]
    known = torch_name(function)
    return function if given or (known and known not in NO_OPERATORS) else None


def registered_operator(name: str) -> Any:
    """`torch.ops.<name>` of a packet, `<space>.<operator>`, or of one of its overloads; None if no
    such operator is registered."""
    try:
        found = attrgetter(name)(torch.ops)
    except AttributeError:
        return None
    return found if isinstance(found, (OpOverload, OpOverloadPacket)) else None


def resolve_any(name: str) -> Any:
    """A function or module by its dotted name. Raises OperatorNameError."""
    try:
        return resolve(name)[2]
    except OperatorNameError:
        module = _module(name)
        if module is None:
            raise
        return module


def owner_of(func: Callable[..., Any]) -> tuple[Any, str]:
    """The object that has the function as an attribute, and the attribute. OperatorNameError."""
    owner, attribute, found = resolve(_qualified(func))
    if found is not func:
        raise OperatorNameError(_qualified(func))
    return owner, attribute


def routines(module: ModuleType) -> list[Callable[..., Any]]:
    """The public functions of a module; of `torch`, and of what it imports, operators alone."""
    found: list[Callable[..., Any]] = []
    for name in sorted(vars(module)):
        value = getattr(module, name)
        own = getattr(value, "__module__", None) == module.__name__ != "torch"
        if not name.startswith("_") and inspect.isroutine(value) and (own or is_torch(value)):
            found.append(value)
    return found


@cache
def _known() -> list[str]:
    """The names of all operators that PyTorch lets a mode see."""
    functions = (f for group in get_overridable_functions().values() for f in group)
    return sorted({each for f in functions for each in names_of(torch_name(f)) if each})


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except Exception as error:  # a third-party module that fails to import
        problem = f"its import raises {type(error).__name__}"
        raise OperatorNameError(name, problem=problem) from error


def is_random_function(name: str) -> bool:
    """Whether the operator draws random numbers."""
    if name.startswith("torch.nn.init."):
        return name.rpartition(".")[2] not in ("zeros_", "ones_", "constant_", "eye_", "dirac_")
    last = name.rpartition(".")[2]
    packet = getattr(torch.ops.aten, last, None)
    if packet is None or last in vars(builtins):
        return last in ("dropout1d", "dropout2d", "dropout3d", "seed")
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
