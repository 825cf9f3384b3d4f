"""Calls of a library's functions through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from dicp.oplib.table import ANY, Function, Parameter

ROUNDING: Final = {None: 0, "trunc": 1, "floor": 2}
"""`rounding_mode` -> `diopiRoundMode_t`."""


class _Number(ctypes.Union):
    _fields_ = [("fval", ctypes.c_double), ("ival", ctypes.c_int64)]


class Scalar(ctypes.Structure):
    """`diopiScalar_t`: a number of dtype float64 or int64."""

    FLOAT64, INT64 = 10, 6
    _anonymous_ = ("value",)
    _fields_ = [("stype", ctypes.c_int32), ("value", _Number)]

    @classmethod
    def of(cls, number: float) -> Scalar:
        if isinstance(number, float):
            return cls(stype=cls.FLOAT64, fval=number)
        return cls(stype=cls.INT64, ival=int(number))


class Size(ctypes.Structure):
    """`diopiSize_t`: integers, and how many there are."""

    _fields_ = [("data", ctypes.POINTER(ctypes.c_int64)), ("len", ctypes.c_int64)]

    @classmethod
    def of(cls, numbers: Sequence[int] | int | None) -> Size:
        if numbers is None:
            return cls(None, 0)
        listed = [numbers] if isinstance(numbers, int) else list(numbers)
        return cls((ctypes.c_int64 * len(listed))(*listed), len(listed))  # which keeps the array


def takes(
    function: Function, arguments: Mapping[str, Any], is_tensor: Callable[[torch.Tensor], bool]
) -> bool:
    """Whether a function takes these arguments; `is_tensor`: whether it takes a tensor's kind."""
    for name, wanted in function.absent.items():
        if wanted is not ANY and arguments[name] != wanted:
            return False
    for name, count in function.dimensions.items():
        if arguments[name].dim() != count:
            return False
    return all(
        _takes(parameter, arguments, is_tensor)
        for parameter in function.parameters
        if parameter.kind != "out" and parameter.constant is ANY
    )


def _takes(
    parameter: Parameter,
    arguments: Mapping[str, Any],
    is_tensor: Callable[[torch.Tensor], bool],
) -> bool:
    value = arguments[parameter.name]
    if parameter.kind in ("tensor", "write", "tensors"):
        tensors = value if isinstance(value, (list, tuple)) else [value]
        return all(
            each is None or (isinstance(each, torch.Tensor) and is_tensor(each)) for each in tensors
        )
    if parameter.kind == "unbiased":
        return value is None or value in (0, 1)
    if parameter.kind in ("scalar", "double"):
        return value is None or isinstance(value, (bool, int, float))
    return not isinstance(value, torch.Tensor)


def passed(
    function: Function,
    arguments: Mapping[str, Any],
    results: Sequence[torch.Tensor | None],
    handle: Callable[[torch.Tensor], int],
) -> list[Any]:
    """What a function is called with, after the context; without results, its in-place form."""
    given: list[Any] = []
    left = iter(results)
    for parameter in function.parameters_of(in_place=not results):
        if parameter.kind == "out":
            given.append(_handle(next(left), handle))
        elif parameter.kind == "tensors":
            tensors = [_handle(tensor, handle) for tensor in arguments[parameter.name]]
            given += [(ctypes.c_void_p * len(tensors))(*tensors), ctypes.c_int64(len(tensors))]
        else:
            constant = parameter.constant is not ANY
            value = parameter.constant if constant else arguments[parameter.name]
            given.append(_converted(parameter.kind, value, handle))
    return given


def _handle(tensor: torch.Tensor | None, handle: Callable[[torch.Tensor], int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else handle(tensor))


POINTED: Final[Mapping[str, Any]] = {
    "int64*": ctypes.c_int64, "bool*": ctypes.c_bool, "double*": ctypes.c_double,
}  # fmt: skip
VALUES: Final[Mapping[str, Any]] = {
    "int64": ctypes.c_int64, "bool": ctypes.c_bool, "double": ctypes.c_double,
    "reduction": ctypes.c_int32, "rounding": ctypes.c_int32, "unbiased": ctypes.c_bool,
    "string": ctypes.c_char_p, "size": Size,
}  # fmt: skip


def _converted(kind: str, value: Any, handle: Callable[[torch.Tensor], int]) -> Any:
    if kind in ("tensor", "write"):
        return _handle(value, handle)
    if kind == "size":
        return Size.of(value)
    if kind in VALUES:
        if kind == "rounding" and not isinstance(value, int):
            value = ROUNDING[value]
        if kind == "unbiased":
            value = value is None or value == 1
        return VALUES[kind](value.encode() if isinstance(value, str) else value)
    if value is None:
        return ctypes.c_void_p(None)
    if kind == "scalar":
        return ctypes.byref(Scalar.of(value))
    return ctypes.byref(Size.of(value) if kind == "size*" else POINTED[kind](value))
