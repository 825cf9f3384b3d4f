"""Built models on a device or its simulator: the driver's functions, and running one graph."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dicp.errors import (
    DeviceError,
    DeviceMemoryError,
    GraphRejectedError,
    ModelMismatchError,
    SimulatorWarning,
)
from dicp.vendor.ascend.prototypes import DTYPES
from dicp.vendor.ascend.simulator.device import Simulator

TARGET = "ascend"
DEVICE = "npu"
MESSAGE_BYTES = 8192
OUT_OF_MEMORY = frozenset({107002, 207001, 507899})
"""ACL's statuses for a device without enough free memory."""
WRONG_MODEL = frozenset({145009, 145020, 500001})
"""ACL's statuses for a model that was built for something else."""

_RECEIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)


class Piece(ctypes.Structure):
    """One tensor of a run, as the driver takes it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Driver:
    """The driver library with its functions typed; opens the device on first use."""

    def __init__(self, library: Any, simulated: bool) -> None:
        self._library = library
        self._open = False
        self.simulator: Simulator | None = None
        library.dicp_soc.restype = ctypes.c_char_p
        library.dicp_message.argtypes = [ctypes.c_bool, ctypes.c_char_p, ctypes.c_uint64]
        library.dicp_message.restype = None
        library.dicp_build.argtypes = [ctypes.c_void_p, *[ctypes.c_char_p] * 5, _RECEIVE]
        library.dicp_load.argtypes = [
            ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_uint64),
        ]  # fmt: skip
        library.dicp_unload.argtypes = [ctypes.c_void_p]
        library.dicp_run.argtypes = [
            ctypes.c_void_p, ctypes.POINTER(Piece), ctypes.c_uint64, ctypes.POINTER(Piece),
            ctypes.c_uint64, ctypes.c_bool, ctypes.c_bool, ctypes.c_void_p,
        ]  # fmt: skip
        if simulated:
            self.simulator = Simulator(library)
            warnings.warn(
                SimulatorWarning(
                    "no Ascend device is used: graphs run in dicp's simulator on the CPU. Its "
                    "numerics count, its speed does not."
                ),
                stacklevel=2,
            )

    def open(self) -> None:
        """Claim device 0 and a stream; once."""
        if not self._open:
            self._check("aclInit", self._library.dicp_open(0))
            self._open = True

    def soc(self) -> str:
        """The name of the chip."""
        self.open()
        return (self._library.dicp_soc() or b"").decode()

    def message(self, build: bool = False) -> str:
        text = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._library.dicp_message(build, text, MESSAGE_BYTES)
        return text.value.decode(errors="replace")

    def build(self, define: int, name: str, precision: str, short: str = "false") -> bytes:
        """The offline model of the graph that the function at `define` makes.

        `precision` and `short` are what GE's options PRECISION_MODE and ALLOW_HF32 are set to.

        Raises GraphRejectedError with GE's message.
        """
        received: list[bytes] = []
        receive = _RECEIVE(lambda data, size: received.append(ctypes.string_at(data, size)))
        status = self._library.dicp_build(
            define,
            name.encode(),
            self.soc().encode(),
            precision.encode(),
            short.encode(),
            b"",
            receive,
        )
        if status != 0:
            raise GraphRejectedError(TARGET, self.message(build=True) or f"status {status}")
        return received[0]

    def load(self, model: bytes, built_for: str) -> int:
        """A handle of the model on the device.

        Raises ModelMismatchError for one built for another chip, DeviceMemoryError.
        """
        if built_for != self.soc():
            raise ModelMismatchError(TARGET, built_for, self.soc())
        handle, wanted = ctypes.c_void_p(), ctypes.c_uint64()
        status = self._library.dicp_load(
            model, len(model), ctypes.byref(handle), ctypes.byref(wanted)
        )
        if status in OUT_OF_MEMORY:
            raise DeviceMemoryError(TARGET, wanted.value, "a model's workspace and weights")
        if status in WRONG_MODEL:
            raise ModelMismatchError(TARGET, built_for, self.soc())
        self._check("aclmdlLoadFromMemWithMem", status)
        assert handle.value is not None
        return handle.value

    def unload(self, handle: int) -> None:
        self._library.dicp_unload(handle)

    def run(
        self,
        handle: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        described: bool,
        wait: bool,
    ) -> None:
        """Run a model. `described`: the inputs' sizes are given, for a model that asks for them."""
        given, made = _pieces(inputs, described), _pieces(outputs, False)
        status = self._library.dicp_run(
            handle, given, len(inputs), made, len(outputs), described, wait, self._stream()
        )
        if status in OUT_OF_MEMORY:
            raise DeviceMemoryError(TARGET, 0, "a run")
        self._check("aclmdlExecuteAsync", status)

    def _stream(self) -> int | None:
        """The stream PyTorch works on, where its extension for the device is loaded."""
        npu = getattr(torch, "npu", None)
        if self.simulator is not None or npu is None:
            return None
        return int(npu.current_stream().npu_stream)

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise DeviceError(TARGET, call, status, self.message())


def _pieces(tensors: Sequence[torch.Tensor], described: bool) -> Any:
    array = (Piece * max(len(tensors), 1))()
    for piece, tensor in zip(array, tensors, strict=False):
        piece.data = tensor.data_ptr()
        piece.size = tensor.numel() * tensor.element_size()
        piece.dtype = DTYPES[tensor.dtype][1]
        piece.rank = tensor.dim()
        if described:
            piece.dims = (ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.shape)
    return array


class Model:
    """One graph on the device; unloaded with the last reference."""

    def __init__(
        self, driver: Driver, data: bytes, built_for: str, dynamic: bool,
        written: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.driver = driver
        self.dynamic = dynamic
        self.written = written
        """Inputs, by number, that the graph writes to."""
        self.handle = driver.load(data, built_for)
        weakref.finalize(self, driver.unload, self.handle).atexit = False

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        given, made = list(inputs), list(outputs)
        changed = [given[k] for k in self.written]
        host = self.driver.simulator is None and any(
            t.device.type == "cpu" for t in (*made, *changed)
        )
        if self.driver.simulator is None:
            given = [t.to(DEVICE) for t in inputs]
            made = [torch.empty_like(t, device=DEVICE) for t in outputs] if host else made
        self.driver.run(self.handle, given, made, self.dynamic, wait=host)
        if host:
            there = [given[k] for k in self.written]
            for result, output in zip([*made, *there], [*outputs, *changed], strict=True):
                output.copy_(result)
