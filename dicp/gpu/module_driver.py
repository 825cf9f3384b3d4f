"""Loading and launching compiled kernels through a driver library: modules, functions, launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from dicp.errors import ToolchainError
from dicp.gpu.build import Binary


@dataclass(frozen=True)
class DriverApi:
    """The names of a driver library's functions."""

    target: str
    device_type: str
    """PyTorch's name of the device type."""
    libraries: tuple[str, ...]
    load: str
    """(out module, image): load compiled code."""
    function: str
    """(out function, module, name): find a kernel."""
    launch: str
    describe: str
    """A status as text: returned, or written through a second argument (`describe_writes`)."""
    describe_writes: bool
    no_context: int
    """The status of a launch in a thread without a context of the device; -1 if there is none."""
    no_binary: int
    """The status of loading code that was built for another architecture."""
    fix: str
    """What to do where none of the libraries can be loaded."""


class ModuleDriver:
    """Loads compiled kernels and launches them. Raises ToolchainError."""

    def __init__(self, api: DriverApi, library: Any, lanes: int, arch: str) -> None:
        self.api = api
        self.target = api.target
        self.device_type = api.device_type
        self.lanes = lanes
        self.no_context = api.no_context
        self.arch = arch
        self._modules: dict[tuple[int, bytes], ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, bytes, str], int] = {}
        pointer, integer = ctypes.c_void_p, ctypes.c_uint
        self._load = getattr(library, api.load)
        self._load.argtypes = [pointer, ctypes.c_char_p]
        self._function = getattr(library, api.function)
        self._function.argtypes = [pointer, pointer, ctypes.c_char_p]
        self._describe = getattr(library, api.describe)
        if not api.describe_writes:
            self._describe.restype = ctypes.c_char_p
        self.launch = getattr(library, api.launch)
        self.launch.argtypes = [pointer, *[integer] * 6, integer, pointer, pointer, pointer]

    def enter(self, device: int) -> None:
        """Makes the device's context current: PyTorch's first call in a thread does that."""
        torch.get_device_module(self.device_type).synchronize(device)

    def function(self, device: int, binary: Binary) -> int:
        key = (device, binary.code, binary.entry)
        if key not in self._functions:
            self.enter(device)
            module, function = self._module(device, binary.code), ctypes.c_void_p()
            name = binary.entry.encode()
            self._check(self._function(ctypes.byref(function), module, name))
            assert function.value is not None
            self._functions[key] = function.value
        return self._functions[key]

    def _module(self, device: int, code: bytes) -> ctypes.c_void_p:
        if (device, code) not in self._modules:
            module = ctypes.c_void_p()
            self._check(self._load(ctypes.byref(module), code))
            self._modules[device, code] = module
        return self._modules[device, code]

    def _check(self, result: int) -> None:
        if result == self.api.no_binary:
            raise ToolchainError(
                self.target, "code for the chip at hand",
                f"kernels were built for {self.arch}, which device "
                f"{torch.get_device_module(self.device_type).get_device_name()} does not take",
                "Name the chip's architecture in the target's options.",
            )  # fmt: skip
        if result:
            raise ToolchainError(
                self.target, "the device's driver",
                f"{self.describe(result)} while a kernel was loaded",
                "An earlier kernel may have failed: start the process again.",
            )  # fmt: skip

    def describe(self, result: int) -> str:
        if not self.api.describe_writes:
            name = self._describe(result)
        else:
            text = ctypes.c_char_p()
            self._describe(result, ctypes.byref(text))
            name = text.value
        return f"{(name or b'unknown result').decode()} ({result})"


def open_driver(api: DriverApi, folders: tuple[str, ...], lanes: int, arch: str) -> ModuleDriver:
    """The driver of this machine; its library is looked for in `folders`, then by its name.

    Raises ToolchainError.
    """
    tried = [*(f"{folder}/{name}" for folder in folders for name in api.libraries), *api.libraries]
    for path in tried:
        try:
            return ModuleDriver(api, ctypes.CDLL(path), lanes, arch)
        except OSError:
            continue
    raise ToolchainError(
        api.target, "the device's runtime library", f"none of {', '.join(tried)} can be loaded",
        api.fix,
    )  # fmt: skip
