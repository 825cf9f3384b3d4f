"""A reference library: every function of the table, computed by a one-operator graph.

A vendor's library can be compared with it. It also shows that the device passes every argument as
the header declares it: the functions are compiled as C, and read their arguments as C does.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from dicp.config import Config
from dicp.oplib.binding import POINTED, ROUNDING, VALUES, Scalar, Size
from dicp.oplib.table import ANY, Function, Parameter, overload
from dicp.oplib.text import Declaration, declarations, header, reference
from dicp.toolchain import OUTPUT, compile_shared, find_compiler

logger = logging.getLogger("dicp.oplib")

USER: Final = "the reference library of operators"
NAME: Final = "libdiopi_impl.so"
TYPES: Final = Path(__file__).resolve().parents[1] / "device/native/operator_library.h"
SUCCESS, FAILED, NOT_TAKEN = 0, 1, 13
DTYPES: Final = {
    0: torch.int8, 1: torch.uint8, 2: torch.int16, 3: torch.uint16, 4: torch.int32,
    5: torch.uint32, 6: torch.int64, 7: torch.uint64, 8: torch.float16, 9: torch.float32,
    10: torch.float64, 11: torch.bool, 12: torch.bfloat16, 14: torch.complex32,
    15: torch.complex64, 16: torch.complex128,
}  # fmt: skip
"""`diopiDtype_t` -> dtype."""
CALL: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


def build(folder: Path, config: Config | None = None) -> Path:
    """Write the header and the compiled library into `folder`; the library's path.

    Raises ToolchainError and CompilerError.
    """
    command, _ = find_compiler(USER, (config or Config.from_env()).cxx)
    files = {
        "functions.h": header(), TYPES.name: TYPES.read_text(), "reference.cpp": reference(),
    }  # fmt: skip
    arguments = [*command, "-std=c++17", "-O1", "-shared", "-fPIC", "reference.cpp", "-o", OUTPUT]
    content = compile_shared(USER, arguments, files, ["dicp_reference_start"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("functions.h", TYPES.name):
        folder.joinpath(name).write_text(files[name])
    folder.joinpath(NAME).write_bytes(content)
    return folder / NAME


class ReferenceLibrary:
    """Lets the functions of a loaded reference library compute; it has to be kept.

    `backend` compiles the one-operator graphs; None: eager computes them. It reads the device's
    memory as the host's, which the simulated chip's is.
    """

    def __init__(self, path: Path, backend: str | None = "dicp") -> None:
        self.backend = backend
        self.library = ctypes.CDLL(str(path))
        self.device: Any = ctypes.CDLL(None)  # whose functions tell what a handle stands for
        self._callback = CALL(self._call)
        self.library.dicp_reference_start(self._callback)

    def _call(self, number: int, context: int, addresses: Any) -> int:
        declaration = declarations()[number]
        try:
            torch.accelerator.synchronize()  # what was asked for before has to be in memory
            return self._computed(declaration, addresses)
        except Exception:
            logger.exception("%s", declaration.name)
            return FAILED

    def _computed(self, declaration: Declaration, addresses: Any) -> int:
        for function in declaration.functions:
            pairs = list(self._values(function, declaration.in_place, addresses))
            if any(p.constant is not ANY and p.constant != value for p, value in pairs):
                continue
            outs = [v for p, v in pairs if p.kind == "out"] or [pairs[0][1]]
            given = {p.name: v for p, v in pairs if p.kind != "out" and p.constant is ANY}
            if any(given[name].dim() != count for name, count in function.dimensions.items()):
                continue
            given |= {name: _told(name, value, given, outs)
                      for name, value in function.absent.items()}  # fmt: skip
            try:
                results = self._run(function, given)
            except (RuntimeError, IndexError, NotImplementedError):
                if function is declaration.functions[-1]:
                    raise
                continue  # another operator of the same function
            made = [results] if isinstance(results, torch.Tensor) else list(results)
            for out, result in zip(outs, made, strict=True):
                if out is not None and (result.numel() or not out.numel()):
                    out.copy_(result)  # statistics that eager does not compute stay as they are
            return SUCCESS
        return NOT_TAKEN

    def _run(self, function: Function, given: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            if self.backend is None:
                return function.op(**given)
            return _compiled(function.operator, self.backend)(given)

    def _values(
        self, function: Function, in_place: bool, addresses: Any
    ) -> Iterator[tuple[Parameter, Any]]:
        """The parameters with their values, decoded by the types that the header declares."""
        at = 0
        for parameter in function.parameters_of(in_place):
            yield parameter, self._value(parameter, addresses, at)
            at += 2 if parameter.kind == "tensors" else 1

    def _value(self, parameter: Parameter, addresses: Any, at: int) -> Any:
        kind, address = parameter.kind, addresses[at]
        if kind == "tensors":
            count = ctypes.c_int64.from_address(addresses[at + 1]).value
            handles = ctypes.cast(_pointer(address) or 0, ctypes.POINTER(ctypes.c_void_p))
            return [self._tensor(handles[k]) for k in range(count)]
        if kind in ("out", "write", "tensor"):
            return self._tensor(_pointer(address))
        if kind == "size":
            return _numbers(Size.from_address(address))
        if kind == "string":
            text = ctypes.c_char_p.from_address(address).value
            return None if text is None else text.decode()
        if kind in VALUES:
            value = VALUES[kind].from_address(address).value
            if kind == "unbiased":
                return int(value)
            names = {number: name for name, number in ROUNDING.items()}
            return names[value] if kind == "rounding" and parameter.constant is ANY else value
        pointed = _pointer(address)
        if pointed is None:
            return None
        if kind == "size*":
            return _numbers(Size.from_address(pointed))
        if kind == "scalar":
            number = Scalar.from_address(pointed)
            return number.fval if number.stype == Scalar.FLOAT64 else number.ival
        return POINTED[kind].from_address(pointed).value

    def _tensor(self, handle: int | None) -> torch.Tensor | None:
        """A tensor of the host over the memory of a packed tensor of the device."""
        if handle is None:
            return None
        sizes, dtype, data = Size(), ctypes.c_int(), ctypes.c_void_p()
        of = ctypes.c_void_p(handle)
        self.device.diopiGetTensorShape(of, ctypes.byref(sizes))
        self.device.diopiGetTensorDtype(of, ctypes.byref(dtype))
        self.device.diopiGetTensorData(of, ctypes.byref(data))
        shape, kind = _numbers(sizes) or [], DTYPES[dtype.value]
        if data.value is None or not prod(shape):
            return torch.empty(shape, dtype=kind)
        buffer = (ctypes.c_uint8 * (prod(shape) * kind.itemsize)).from_address(data.value)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(kind).view(shape)


def _pointer(address: int) -> int | None:
    """The pointer at an address."""
    return ctypes.c_void_p.from_address(address).value


def _numbers(size: Size) -> list[int] | None:
    return [size.data[k] for k in range(size.len)] if size.data or size.len else None


def _told(
    name: str, required: Any, given: Mapping[str, Any], outs: Sequence[torch.Tensor | None]
) -> Any:
    """An argument that is not passed, from the results and the other arguments."""
    if required is not ANY:
        return required
    if name == "output_mask":
        return [out is not None for out in outs]
    if name == "output_padding":
        return [0] * len(given["stride"])
    source = given.get("input", given.get("self"))
    (result, *_) = outs
    if name == "N":
        return source.shape[0]
    if name == "C":
        return source.shape[1]
    if name == "HxW":
        return prod(source.shape[2:])
    assert result is not None
    if name == "keepdim":
        return result.dim() == source.dim()
    if name == "half_to_float":
        return result.dtype != source.dtype
    return result.dtype if name in ("dtype", "input_dtype") else None


@cache
def _compiled(operator: str, backend: str) -> Callable[[Mapping[str, Any]], Any]:
    op = overload(operator)

    def run(given: Mapping[str, Any]) -> Any:
        return op(**given)

    return torch.compile(run, backend=backend, dynamic=True)
