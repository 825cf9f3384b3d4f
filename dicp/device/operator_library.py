"""A vendor's operator library: functions of the interface DIOPI for operators of the device.

A vendor's package names its shared object in the entry-point group `dicp.operator_libraries`, under
the name of its runtime, by a callable without arguments that returns the path.
`native/operator_library.h` declares what such a library is given. An operator whose function is
missing, or does not take the arguments, takes its other paths.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from dicp.device.dispatcher import Dispatcher
from dicp.device.hosted import DEVICE_TYPE
from dicp.device.output import say
from dicp.device.schemas import bound_with_results, inputs_of, name_of, without_values
from dicp.errors import OperatorLibraryError
from dicp.torch_private import (
    OpOverload,
    dispatches_alone,
    overloads_of,
    profiling,
    schema_of,
    true_device,
)

GROUP = "dicp.operator_libraries"

_UNARY = ("abs", "ceil", "cos", "erf", "exp", "floor", "log", "neg", "reciprocal", "relu", "rsqrt",
          "sigmoid", "silu", "sin", "sqrt", "tanh")  # fmt: skip
_COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")

FUNCTIONS: dict[str, tuple[str, ...]] = {
    **{name: (f"diopi{name.title()}(out, self)",) for name in _UNARY},
    **{f"{name}.Tensor": (f"diopi{name.title()}(out, self, other)",) for name in _COMPARED},
    **{f"{name}.Scalar": (f"diopi{name.title()}Scalar(out, self, other)",) for name in _COMPARED},
    "add.Tensor": (
        "diopiAdd(out, self, other, alpha)",
        "diopiAddScalar(out, self, *other, alpha)",
    ),
    "sub.Tensor": (
        "diopiSub(out, self, other, alpha)",
        "diopiSubScalar(out, self, *other, alpha)",
    ),
    "mul.Tensor": ("diopiMul(out, self, other)", "diopiMulScalar(out, self, *other)"),
    "div.Tensor": ("diopiDiv(out, self, other, 0)", "diopiDivScalar(out, self, *other, 0)"),
    "maximum": ("diopiMaximum(out, self, other)",),
    "minimum": ("diopiMinimum(out, self, other)",),
    "mm": ("diopiMm(out, self, mat2)",),
    "bmm": ("diopiBmm(out, self, mat2)",),
    "addmm": ("diopiAddmm(out, self, mat1, mat2, beta, alpha)",),
    "linear": ("diopiLinear(out, input, weight, bias)",),
    "_softmax": ("diopiSoftmax(out, self, dim)",),
    "_log_softmax": ("diopiLogSoftmax(out, self, dim)",),
}
"""Of a functional operator the library's functions, the first that takes the arguments is called.

After the context a function has `out`, then arguments of the operator: a tensor is passed as its
handle, an integer as int64_t, what the schema calls a Scalar by a pointer; `*other` is a number
that is given for a tensor, and passed by a pointer too. A number in a text is an enumerator.
"""

NOT_TAKEN = (12, 13, 1000)
"""Statuses by which a function says that it does not take the arguments."""


class _Number(ctypes.Union):
    _fields_ = [("fval", ctypes.c_double), ("ival", ctypes.c_int64)]


class Scalar(ctypes.Structure):
    """`diopiScalar_t`: a number of dtype float64 or int64."""

    _anonymous_ = ("value",)
    _fields_ = [("stype", ctypes.c_int32), ("value", _Number)]

    @classmethod
    def of(cls, number: float) -> Scalar:
        if isinstance(number, float):
            return cls(stype=10, fval=number)
        return cls(stype=6, ival=int(number))


@dataclass(frozen=True)
class Function:
    """A function of the library; `in_place` writes to its first tensor and has no `out`."""

    name: str
    arguments: tuple[str, ...]
    call: Callable[..., int]
    in_place: Callable[..., int] | None

    def takes(self, op: OpOverload, inputs: Mapping[str, Any]) -> bool:
        """Whether the arguments are of the kinds that the function has."""
        kinds = kinds_of(op)
        return all(
            _takes(argument, kinds.get(argument.lstrip("*"), ""), inputs)
            for argument in self.arguments
        )


@dataclass(frozen=True)
class Chosen:
    """A call that a function takes: of a functional operator, its arguments and given result."""

    function: Function
    op: OpOverload
    inputs: dict[str, Any]
    out: torch.Tensor | None


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
        self.missing: list[str] = []
        self.functions: dict[str, list[Function]] = {}
        for operator, texts in FUNCTIONS.items():
            found = [function for text in texts if (function := self._function(text)) is not None]
            if found:
                self.functions[operator] = found
        if not self.functions:
            raise OperatorLibraryError(path, f"it has none of {', '.join(self.missing)}")

    def _function(self, text: str) -> Function | None:
        name, *arguments = re.findall(r"[\w*]+", text)
        call = getattr(self.library, name, None)
        if call is None:
            self.missing.append(name)
            return None
        in_place = getattr(self.library, re.sub("(Scalar)?$", r"Inp\1", name, count=1), None)
        return Function(name, tuple(arguments), call, in_place)

    def name_for(self, op: OpOverload) -> str | None:
        """The first function for an operator, whatever its arguments; None: there is none."""
        if dispatches_alone(op, "CompositeImplicitAutograd") and name_of(op) not in self.functions:
            return None  # PyTorch takes it apart
        form = self.dispatcher.functional(op)
        found = self.functions.get(name_of(form.op), []) if form is not None else []
        return found[0].name if found else None

    def function_for(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        chosen = self._chosen(op, args, kwargs)
        return chosen.function.name if chosen else None

    def _chosen(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Chosen | None:
        """The function that a call of `op` takes; None: there is none for these arguments."""
        form = self.dispatcher.functional(op)
        if form is None or name_of(form.op) not in self.functions:
            return None
        given, outs = bound_with_results(op, form, args, kwargs)
        inputs = inputs_of(form, given, outs)
        for function in self.functions[name_of(form.op)]:
            if function.takes(form.op, inputs):
                return Chosen(function, form.op, inputs, outs[0] if outs else None)
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
        inputs, out = chosen.inputs, chosen.out
        expected = chosen.op(**{name: without_values(value) for name, value in inputs.items()})
        if out is not None and not torch.can_cast(expected.dtype, out.dtype):
            return NotImplemented  # eager's error is the host's
        kind = {"dtype": expected.dtype, "device": place}
        if out is not None and out.shape == expected.shape and out.dtype == expected.dtype:
            result = out
        else:
            result = torch.empty_strided(expected.shape, expected.stride(), **kind)
        given = {name: _packed(value) for name, value in inputs.items()}
        read = [value for value in given.values() if _share_memory(result, value)]
        first = next(iter(given.values()))
        if chosen.function.in_place is not None and result is first and len(read) == 1:
            taken = self._call(chosen, given, None, place)
        else:
            apart = read or not _is_packed(result)
            written = torch.empty(expected.shape, **kind) if apart else result
            taken = self._call(chosen, given, written, place)
            if taken and written is not result:
                result.copy_(written)
        if not taken:
            return NotImplemented
        if out is None or out is result:
            return result
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    def _call(
        self, chosen: Chosen, given: Mapping[str, Any], out: Any, place: torch.device
    ) -> bool:
        """Whether the function took the arguments. Without `out` its in-place form is called."""
        call = self.native.LibraryCall(place.index)
        kinds, function = kinds_of(chosen.op), chosen.function
        passed: list[Any] = [ctypes.c_void_p(call.context)]
        for argument in function.arguments:
            name = argument.lstrip("*")
            if name != "out":
                kind = "Scalar" if argument != name else kinds.get(name, "")
                passed.append(_passed(call, given.get(name, name), kind))
            elif out is not None:
                passed.append(ctypes.c_void_p(call.handle(out)))
        run = function.call if out is not None else function.in_place
        assert run is not None
        with torch.profiler.record_function(function.name) if profiling() else nullcontext():
            status = run(*passed)
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
        tensors = [value for value in chosen.inputs.values() if isinstance(value, torch.Tensor)]
        shown = ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)
        operator = f"{chosen.function.name} for {name_of(chosen.op)} of {shown}"
        return f"{operator} failed with status {status}{said}"


def kinds_of(op: OpOverload) -> dict[str, str]:
    """The types of an operator's arguments in its schema: Tensor, number (a Scalar), int, ..."""
    return {argument.name: str(argument.type) for argument in schema_of(op).arguments}


def _takes(argument: str, kind: str, inputs: Mapping[str, Any]) -> bool:
    if argument == "out" or argument.isdigit():
        return True
    value = inputs[argument.lstrip("*")]
    if isinstance(value, torch.Tensor):
        on_device = true_device(value).type == DEVICE_TYPE and value.layout == torch.strided
        return on_device and not argument.startswith("*")
    if value is None:
        return True
    number = isinstance(value, (bool, int, float))
    return number and (kind != "Tensor" or argument.startswith("*"))


def _passed(call: Any, value: Any, kind: str) -> Any:
    """An argument as C takes it: a handle, a pointer to a number, an integer, an enumerator."""
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(call.handle(value))
    if isinstance(value, str):
        return ctypes.c_int32(int(value))
    return ctypes.c_int64(value) if kind == "int" else ctypes.byref(Scalar.of(value))


def _is_packed(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _packed(value: Any) -> Any:
    """A tensor as a contiguous one, so that every library reads it right."""
    if not isinstance(value, torch.Tensor) or _is_packed(value):
        return value
    return value.resolve_conj().resolve_neg().contiguous()


def _share_memory(a: torch.Tensor, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or a.numel() == 0:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- loading -------------------------------------------------------------------------------------


def load(dispatcher: Dispatcher, vendor: str, library: torch.library.Library) -> None:
    """Let the dispatcher call the operator library of `vendor`, if its package names one."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if vendor not in points:
        return
    made = OperatorLibrary(dispatcher, str(points[vendor].load()()))
    say("diopi dyload init")
    if made.missing:
        listed = ", ".join(made.missing)
        say(f"{made.path} lacks {listed}: their operators take other paths")
    dispatcher.operator_library = made
    whole = [op for op in overloads_of("aten") if name_of(op) in made.functions]
    for op in whole:
        if dispatches_alone(op, "CompositeImplicitAutograd"):
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
