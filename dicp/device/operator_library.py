"""A vendor's operator library: functions of the interface DIOPI for operators of the device.

`dicp/oplib` lists the functions. A vendor's package names its shared object in the entry-point
group `dicp.operator_libraries`, under the name of its runtime, by a callable without arguments that
returns the path.
`native/operator_library.h` declares what such a library is given. An operator whose function is
missing, or does not take the arguments, takes its other paths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import zip_longest
from typing import Any

import torch

from dicp.device.dispatcher import Dispatcher
from dicp.device.hosted import DEVICE_TYPE
from dicp.device.output import say
from dicp.device.schemas import bound_with_results, inputs_of, name_of, without_values
from dicp.errors import OperatorLibraryError
from dicp.oplib.binding import passed, takes
from dicp.oplib.table import Function, functions
from dicp.torch_private import (
    OpOverload,
    dispatches_alone,
    overloads_of,
    profiling,
    pytree,
    true_device,
)

GROUP = "dicp.operator_libraries"

KINDS = ("Implicit", "Explicit")
"""Kinds of composite operators, which PyTorch takes apart unless a device has them whole."""
NOT_TAKEN = (12, 13, 1000)
"""Statuses by which a function says that it does not take the arguments."""


@dataclass(frozen=True)
class Loaded:
    """A function that the library has; `in_place` writes to its first tensor and has no `out`."""

    function: Function
    call: Callable[..., int] | None
    in_place: Callable[..., int] | None


@dataclass(frozen=True)
class Chosen:
    """A call that a function takes: an operator's arguments, and the results given for it."""

    loaded: Loaded
    inputs: dict[str, Any]
    outs: Sequence[torch.Tensor]

    @property
    def op(self) -> OpOverload:
        return self.loaded.function.op


class OperatorLibrary:
    """The loaded library of a vendor. Raises OperatorLibraryError."""

    def __init__(self, dispatcher: Dispatcher, path: str) -> None:
        self.dispatcher, self.native, self.path = dispatcher, dispatcher.native, path
        # Its callbacks are looked up among the symbols of the whole process.
        ctypes.CDLL(self.native.__spec__.origin, mode=ctypes.RTLD_GLOBAL)
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise OperatorLibraryError(path, str(error)) from None
        self.functions: dict[str, list[Loaded]] = {}
        missing: dict[str, None] = {}
        for function in functions():
            loaded = self._loaded(function)
            if loaded.call or loaded.in_place:
                self.functions.setdefault(function.operator, []).append(loaded)
            elif function.public:
                missing[function.name] = None
        self.missing = list(missing)
        if not self.functions:
            raise OperatorLibraryError(path, f"it has none of {', '.join(self.missing)}")

    def _loaded(self, function: Function) -> Loaded:
        in_place = getattr(self.library, function.in_place, None) if function.in_place else None
        return Loaded(function, getattr(self.library, function.name, None), in_place)

    def name_for(self, op: OpOverload) -> str | None:
        """The first function for an operator, whatever its arguments; None: there is none."""
        if dispatches_alone(op, "CompositeImplicitAutograd") and name_of(op) not in self.functions:
            return None  # PyTorch takes it apart
        form = self.dispatcher.functional(op)
        found = self.functions.get(name_of(form.op), []) if form is not None else []
        return found[0].function.name if found else None

    def function_for(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        chosen = self._chosen(op, args, kwargs)
        return chosen.loaded.function.name if chosen else None

    def _chosen(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Chosen | None:
        """The function that a call of `op` takes; None: there is none for these arguments."""
        form = self.dispatcher.functional(op)
        if form is None or form.fresh or name_of(form.op) not in self.functions:
            return None
        given, outs = bound_with_results(op, form, args, kwargs)
        inputs = inputs_of(form, given, outs)
        for loaded in self.functions[name_of(form.op)]:
            if takes(loaded.function, inputs, _on_device):
                return Chosen(loaded, inputs, outs)
        return None

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call of `op`; NotImplemented where the library does not take it."""
        chosen = self._chosen(op, args, kwargs)
        if chosen is None:
            return NotImplemented
        index = self.dispatcher.index_of(args, kwargs)
        with torch.get_device_module(DEVICE_TYPE).device(index):
            return self._computed(chosen, torch.device(DEVICE_TYPE, index))

    def _computed(self, chosen: Chosen, place: torch.device) -> Any:
        inputs, outs = chosen.inputs, chosen.outs
        whole = chosen.op(**pytree.tree_map(without_values, inputs))
        expected = [whole] if isinstance(whole, torch.Tensor) else list(whole)
        pairs = zip(expected, outs, strict=False)
        if any(not torch.can_cast(form.dtype, out.dtype) for form, out in pairs):
            return NotImplemented  # eager's error is the host's
        given = pytree.tree_map(_packed, inputs)
        read = [tensor for tensor in pytree.tree_leaves(given) if isinstance(tensor, torch.Tensor)]
        wanted = inputs.get("output_mask", (True,) * len(expected))
        results = [
            _result(form, out, place) if asked else None
            for form, out, asked in zip_longest(expected, outs, wanted)
        ]
        if not self._written(chosen, given, results, read, place):
            return NotImplemented
        if chosen.op is torch.ops.aten.native_batch_norm.default and not inputs["training"]:
            unsaved = inputs["running_mean"].new_empty(0)  # eager has statistics of training alone
            results = [results[0], unsaved, unsaved.clone()]
        for name, before in inputs.items():
            if name in chosen.loaded.function.written and given[name] is not before:
                before.copy_(given[name])
        for out, result in zip(outs, results, strict=False):
            if out is not result and result is not None:
                if out.shape != result.shape:
                    out.resize_(result.shape)
                out.copy_(result)
        returned = tuple(outs) or tuple(results)
        return returned[0] if isinstance(whole, torch.Tensor) else returned

    def _written(
        self,
        chosen: Chosen,
        given: Mapping[str, Any],
        results: Sequence[torch.Tensor | None],
        read: Sequence[torch.Tensor],
        place: torch.device,
    ) -> bool:
        """Whether the library took the arguments and wrote the results."""
        loaded, first = chosen.loaded, next(iter(given.values()), None)
        if loaded.in_place is not None and len(results) == 1:
            (result,) = results
            assert result is not None
            alone = sum(_share_memory(result, tensor) for tensor in read) == 1
            if result is first and alone:
                return self._call(chosen, loaded.in_place, given, (), place)
            if loaded.call is None:
                return False
        assert loaded.call is not None
        written = [
            torch.empty(r.shape, dtype=r.dtype, device=place)
            if r is not None
            and (not _is_packed(r) or any(_share_memory(r, tensor) for tensor in read))
            else r
            for r in results
        ]
        taken = self._call(chosen, loaded.call, given, written, place)
        for result, made in zip(results, written, strict=True):
            if taken and result is not None and made is not result:
                result.copy_(made)
        return taken

    def _call(
        self,
        chosen: Chosen,
        run: Callable[..., int],
        given: Mapping[str, Any],
        results: Sequence[torch.Tensor | None],
        place: torch.device,
    ) -> bool:
        """Whether the function took the arguments. Without results its in-place form is called."""
        call, function = self.native.LibraryCall(place.index), chosen.loaded.function
        arguments = passed(function, given, results, call.handle)
        with torch.profiler.record_function(function.name) if profiling() else nullcontext():
            status = run(ctypes.c_void_p(call.context), *arguments)
        call.check()
        if status != 0 and status not in NOT_TAKEN:
            raise OperatorLibraryError(self.path, self._failure(chosen, status))
        return status == 0

    def _failure(self, chosen: Chosen, status: int) -> str:
        said = ""
        text = getattr(self.library, "diopiGetLastErrorString", None)
        if text is not None:
            text.restype = ctypes.c_char_p
            said = f": {(text() or b'').decode(errors='replace')}"
        leaves = pytree.tree_leaves(chosen.inputs)
        tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
        shown = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
        operator = f"{chosen.loaded.function.name} for {name_of(chosen.op)} of {shown}"
        return f"{operator} failed with status {status}{said}"


def _on_device(tensor: torch.Tensor) -> bool:
    return true_device(tensor).type == DEVICE_TYPE and tensor.layout == torch.strided


def _result(form: torch.Tensor, out: torch.Tensor | None, place: torch.device) -> torch.Tensor:
    """The tensor for a result: the one given for it, where it has the sizes and the dtype."""
    if out is not None and (out.shape, out.dtype) == (form.shape, form.dtype):
        return out
    return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=place)


def _is_packed(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _packed(value: Any) -> Any:
    """A tensor as a contiguous one, so that every library reads it right."""
    if not isinstance(value, torch.Tensor) or _is_packed(value):
        return value
    return value.resolve_conj().resolve_neg().contiguous()


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- loading -------------------------------------------------------------------------------------


def load(dispatcher: Dispatcher, vendor: str, library: torch.library.Library) -> None:
    """Let the dispatcher call the operator library of `vendor`, if its package names one."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if vendor not in points:
        return
    made = OperatorLibrary(dispatcher, str(points[vendor].load()()))
    say("diopi dyload init")
    if made.missing:
        say(
            f"{made.path} lacks {len(made.missing)} functions, whose operators take other paths; "
            f"python -m dicp.oplib missing {made.path}"
        )
    dispatcher.operator_library = made
    whole = [op for op in overloads_of("aten") if name_of(op) in made.functions]
    for op in whole:
        composite = any(dispatches_alone(op, f"Composite{kind}Autograd") for kind in KINDS)
        if composite and not dispatches_alone(op, "PrivateUse1"):
            library.impl(op, _entry(dispatcher, op), "PrivateUse1")
            if name_of(op) == "linear":
                library.impl("linear_backward", linear_backward, "PrivateUse1")


def _entry(dispatcher: Dispatcher, op: OpOverload) -> Callable[..., Any]:
    """The kernel of a composite operator that the library has whole."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return dispatcher(op, args, kwargs)

    return run


def linear_backward(
    input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `linear` in its input, its weight and its bias, by operators of the device."""
    rows, flat = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
    return (
        rows.mm(weight).view(input.shape) if wanted[0] else None,
        rows.t().mm(flat) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )
