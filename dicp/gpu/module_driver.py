"""Loading and launching compiled kernels through a driver library: modules, functions, launches."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from dicp import torch_private
from dicp.errors import ToolchainError
from dicp.gpu.build import Binary

T = TypeVar("T")


@dataclass(frozen=True)
class DriverApi:
    """The names of a driver library's functions."""

    target: str
    device_type: str
    """PyTorch's name of the device type."""
    libraries: tuple[str, ...]
    load: str
    """(out module, image): load compiled code."""
    unload: str
    """(module): unload it."""
    function: str
    """(out function, module, name): find a kernel."""
    launch: str
    describe: str
    """A status as text: returned, or written through a second argument (`describe_writes`)."""
    describe_writes: bool
    no_context: int
    """The status of a launch in a thread without a context of the device yet."""
    no_binary: int
    """The status of loading code that was built for another architecture."""
    fix: str
    """What to do where none of the libraries can be loaded."""


class Module:
    """Loaded code on one device: unloaded some time after the last reference to it is gone."""

    def __init__(self, device: int, handle: int, released: SimpleQueue[tuple[int, int]]) -> None:
        self.handle = handle
        self.functions: dict[str, int] = {}
        # A finalizer may run anywhere, in the middle of a capture too: it only queues the handle.
        weakref.finalize(self, released.put, (device, handle)).atexit = False


class Function(int):
    """A kernel's handle: its code stays loaded while this value is referenced."""

    module: Module


class ModuleDriver:
    """Loads compiled kernels and launches them. Raises ToolchainError."""

    def __init__(self, api: DriverApi, library: Any, lanes: int, arch: str) -> None:
        self.api = api
        self.target = api.target
        self.device_type = api.device_type
        self.lanes = lanes
        self.no_context = api.no_context
        self.arch = arch
        self.library = library
        self._modules: weakref.WeakValueDictionary[tuple[int, bytes], Module] = (
            weakref.WeakValueDictionary()
        )
        self._released: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._lock = threading.Lock()
        self._kept: dict[Module, None] = {}
        pointer, integer = ctypes.c_void_p, ctypes.c_uint
        self._load = getattr(library, api.load)
        self._load.argtypes = [pointer, ctypes.c_char_p]
        self._unload = getattr(library, api.unload)
        self._unload.argtypes = [pointer]
        self._function = getattr(library, api.function)
        self._function.argtypes = [pointer, pointer, ctypes.c_char_p]
        self._describe = getattr(library, api.describe)
        if not api.describe_writes:
            self._describe.restype = ctypes.c_char_p
        self.launch = getattr(library, api.launch)
        self.launch.argtypes = [pointer, *[integer] * 6, integer, pointer, pointer, pointer]

    def enter(self, device: int) -> None:
        """Makes the device's context current: PyTorch's first call in a thread does that.

        A thread that captures has made one, and to wait for the device would end the capture.
        """
        if not torch_private.capturing():
            torch.get_device_module(self.device_type).synchronize(device)

    def function(self, device: int, binary: Binary) -> Function:
        self.enter(device)
        self.unload_released()
        module = self._module(device, binary.code)
        if binary.entry not in module.functions:
            handle = ctypes.c_void_p()
            name = binary.entry.encode()
            self._check(self._function(ctypes.byref(handle), module.handle, name))
            assert handle.value is not None
            module.functions[binary.entry] = handle.value
        function = Function(module.functions[binary.entry])
        function.module = module
        return function

    def _module(self, device: int, code: bytes) -> Module:
        with self._lock:
            found = self._modules.get((device, code))
            if found is None:
                handle = ctypes.c_void_p()
                self._check(self._load(ctypes.byref(handle), code))
                assert handle.value is not None
                found = self._modules[device, code] = Module(device, handle.value, self._released)
            return found

    def keep(self, function: Function) -> None:
        """Never unload a kernel: a graph that its user captured may launch it at any time."""
        self._kept[function.module] = None

    def unload_released(self) -> None:
        """Unloads the code that nothing refers to any more; nothing during a capture, which a call
        that waits for the device would end."""
        if self._released.empty() or torch_private.capturing():
            return
        module = torch.get_device_module(self.device_type)
        waited: set[int] = set()
        with contextlib.suppress(Empty):
            while True:
                device, handle = self._released.get_nowait()
                with module.device(device):
                    if device not in waited:  # kernels of that code may still be running
                        module.synchronize(device)
                        waited.add(device)
                    self._unload(handle)  # an error would come of an earlier kernel

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


def first_loaded(paths: Iterable[str], use: Callable[[ctypes.CDLL], T]) -> T | None:
    """`use` of the first library that can be loaded and has the functions that `use` takes."""
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            return use(ctypes.CDLL(path))
    return None


def open_driver(api: DriverApi, folders: tuple[str, ...], lanes: int, arch: str) -> ModuleDriver:
    """The driver of this machine; its library is looked for in `folders`, then by its name.

    Raises ToolchainError.
    """
    tried = [*(f"{folder}/{name}" for folder in folders for name in api.libraries), *api.libraries]
    found = first_loaded(tried, lambda library: ModuleDriver(api, library, lanes, arch))
    if found is not None:
        return found
    raise ToolchainError(
        api.target, "the device's runtime library",
        f"none of {', '.join(tried)} can be loaded and has {api.load}, {api.launch} and the others",
        api.fix,
    )  # fmt: skip
