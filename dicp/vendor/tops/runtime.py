"""Executables on a device or its simulator: the driver's functions, and running one graph."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from dicp.errors import DeviceError, DeviceMemoryError, GraphRejectedError
from dicp.graphop.handles import LoadedGraph
from dicp.vendor.tops.simulator.device import Simulator

TARGET = "tops"
MESSAGE_BYTES = 65536
OUT_OF_MEMORY = frozenset({2})
"""The runtime's statuses for a device without enough free memory."""
_RECEIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)


class Argument(ctypes.Structure):
    """One tensor of a run, as the driver takes it."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_uint64), ("on_host", ctypes.c_bool)]


class Driver:
    """The driver library with its functions typed."""

    def __init__(self, library: Any, simulated: bool) -> None:
        self._library = library
        self.building = threading.Lock()
        self.simulator: Simulator | None = None
        library.dicp_call.restype = ctypes.c_char_p
        library.dicp_log.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        library.dicp_devices.argtypes = [ctypes.POINTER(ctypes.c_int)]
        library.dicp_build.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), _RECEIVE,
        ]  # fmt: skip
        library.dicp_load.argtypes = [
            ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p),
        ]  # fmt: skip
        counted = ctypes.POINTER(ctypes.c_uint64)
        library.dicp_sizes.argtypes = [ctypes.c_void_p, counted, counted]
        library.dicp_unload.argtypes = [ctypes.c_void_p]
        library.dicp_run.argtypes = [
            ctypes.c_void_p, ctypes.POINTER(Argument), ctypes.c_uint64, ctypes.POINTER(Argument),
            ctypes.c_uint64, ctypes.c_void_p,
        ]  # fmt: skip
        if simulated:
            self.simulator = Simulator(library)

    def devices(self) -> int:
        """How many devices answer."""
        count = ctypes.c_int()
        self.check(self._library.dicp_devices(ctypes.byref(count)), "")
        return count.value

    def build(self, define: int, options: Sequence[str]) -> bytes:
        """The binary of the graph that the function at `define` makes.

        Raises GraphRejectedError with the compiler's message.
        """
        received: list[bytes] = []
        receive = _RECEIVE(lambda data, size: received.append(ctypes.string_at(data, size)))
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._library.dicp_build(define, len(options), texts, receive)
        if status != 0:
            call = (self._library.dicp_call() or b"").decode()
            raise GraphRejectedError(TARGET, self._log() or f"{call} gives status {status}")
        return received[0]

    def load(self, binary: bytes, device: int = 0) -> int:
        """A handle of the executable on a device."""
        handle = ctypes.c_void_p()
        status = self._library.dicp_load(binary, len(binary), device, ctypes.byref(handle))
        self.check(status, "an executable")
        assert handle.value is not None
        return handle.value

    def sizes(self, handle: int) -> tuple[list[int], list[int]]:
        """Bytes of each input and of each output."""
        counts = (ctypes.c_uint64 * 2)()
        self._library.dicp_sizes(handle, counts, None)
        found = (ctypes.c_uint64 * max(sum(counts), 1))()
        self._library.dicp_sizes(handle, counts, found)
        return list(found[: counts[0]]), list(found[counts[0] : counts[0] + counts[1]])

    def unload(self, handle: int) -> None:
        self.check(self._library.dicp_unload(handle), "")

    def run(
        self, handle: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
        graph: str, stream: int | None = None,
    ) -> None:  # fmt: skip
        given, made = _arguments(inputs), _arguments(outputs)
        status = self._library.dicp_run(handle, given, len(inputs), made, len(outputs), stream)
        self.check(status, f"a run of {graph}", graph)

    def _log(self) -> str:
        text = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._library.dicp_log(text, MESSAGE_BYTES)
        return text.value.decode(errors="replace")

    def check(self, status: int, wanted: str, graph: str = "") -> None:
        """Raises DeviceMemoryError or DeviceError for a status that is not success."""
        if status in OUT_OF_MEMORY:
            raise DeviceMemoryError(TARGET, 0, wanted)
        if status != 0:
            call = (self._library.dicp_call() or b"").decode()
            said = self.simulator.message if self.simulator is not None else ""
            where = f"graph {graph}" if graph else ""
            words = ": ".join(word for word in (where, said) if word)
            raise DeviceError(TARGET, call, status, words)


def _arguments(tensors: Sequence[torch.Tensor]) -> Any:
    array = (Argument * max(len(tensors), 1))()
    for argument, tensor in zip(array, tensors, strict=False):
        argument.data = tensor.data_ptr()
        argument.size = tensor.numel() * tensor.element_size()
        argument.on_host = tensor.device.type == "cpu"
    return array


class Executable(LoadedGraph):
    """One compiled graph."""

    def __init__(self, driver: Driver, binary: bytes, graph: str) -> None:
        super().__init__(driver.unload)
        self.driver = driver
        self.binary = binary
        self.graph = graph

    def _loaded(
        self, device: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> int:
        """The executable on a device, its sizes compared with the tensors'."""
        handle = self.driver.load(self.binary, device)
        ours = [[t.numel() * t.element_size() for t in side] for side in (inputs, outputs)]
        theirs = list(self.driver.sizes(handle))
        if ours != theirs:
            self.driver.unload(handle)
            told = f"graph {self.graph}: the executable takes and gives {theirs} bytes, dicp {ours}"
            raise DeviceError(TARGET, "topsExecutableQueryInfo", 0, told)
        return handle

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        """Tensors of the device are used where they are; the driver copies those of the host."""
        tensors = (*inputs, *outputs)
        where = next((t.device for t in tensors if t.device.type != "cpu"), None)
        device = 0 if where is None else where.index or 0
        stream = None if where is None else self._stream(where)
        handle = self.handle_on(device, lambda: self._loaded(device, inputs, outputs))
        self.driver.run(handle, inputs, outputs, self.graph, stream)
        return 0

    def _stream(self, device: torch.device) -> int | None:
        """The handle of the device's current stream; without one, what was begun there is done."""
        module = torch.get_device_module(device.type)
        if self.driver.simulator is None:
            handle = getattr(module.current_stream(device), f"{device.type}_stream", None)
            if handle is not None:
                return int(handle)
        module.synchronize(device)
        return None
