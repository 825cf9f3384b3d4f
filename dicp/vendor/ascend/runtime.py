"""Built models on a device or its simulator: the driver's functions, and running one graph."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dicp.errors import DeviceError, DeviceMemoryError, GraphRejectedError, ModelMismatchError
from dicp.graphop.handles import LoadedGraph
from dicp.vendor.ascend.prototypes import DTYPES
from dicp.vendor.ascend.simulator.device import Simulator

TARGET = "ascend"
DEVICE = "npu"
MESSAGE_BYTES = 8192
OUT_OF_MEMORY = frozenset({200000, 207001, 207018})
"""ACL's statuses for a device without enough free memory."""
WRONG_MODEL = frozenset({507008})
"""ACL's status for a model that was built for another chip."""
PLAIN_FORMATS = frozenset({-1, 0, 1, 2, 27, 30})
"""ACL's numbers of formats whose memory is that of a row-major tensor: undefined, NCHW, NHWC, ND,
NDHWC, NCDHW."""
ND = 2

_RECEIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)


class Argument(ctypes.Structure):
    """One tensor of a run, as the driver takes it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("on_host", ctypes.c_bool),
        ("written", ctypes.c_bool),
    ]


class Driver:
    """The driver library with its functions typed; opens a device on first use."""

    def __init__(self, library: Any, simulated: bool) -> None:
        self._library = library
        self._open: set[int] = set()
        self.simulator: Simulator | None = None
        library.dicp_soc.restype = ctypes.c_char_p
        library.dicp_message.argtypes = [ctypes.c_bool, ctypes.c_char_p, ctypes.c_uint64]
        library.dicp_message.restype = None
        library.dicp_build.argtypes = [ctypes.c_void_p, *[ctypes.c_char_p] * 4, _RECEIVE]
        library.dicp_load.argtypes = [
            ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_bool,
            ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint64),
        ]  # fmt: skip
        library.dicp_unload.argtypes = [ctypes.c_void_p]
        library.dicp_run.argtypes = [
            ctypes.c_void_p, ctypes.POINTER(Argument), ctypes.c_uint64, ctypes.POINTER(Argument),
            ctypes.c_uint64, ctypes.c_bool, ctypes.c_void_p,
        ]  # fmt: skip
        if simulated:
            self.simulator = Simulator(library)

    def open(self, device: int = 0) -> None:
        """Initialize ACL and see that a device answers; once for each."""
        if device not in self._open:
            self._check("aclInit", self._library.dicp_open(device))
            self._open.add(device)

    def soc(self) -> str:
        """The name of the chip."""
        self.open()
        return (self._library.dicp_soc() or b"").decode()

    def message(self, build: bool = False) -> str:
        text = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._library.dicp_message(build, text, MESSAGE_BYTES)
        return text.value.decode(errors="replace")

    def build(self, define: int, name: str, precision: str, shapes: str = "") -> bytes:
        """The offline model of the graph that the function at `define` makes.

        `precision` is what GE's option PRECISION_MODE is set to, `shapes` what INPUT_SHAPE is, for
        a graph of changing sizes.

        Raises GraphRejectedError with GE's message.
        """
        received: list[bytes] = []
        receive = _RECEIVE(lambda data, size: received.append(ctypes.string_at(data, size)))
        texts = (text.encode() for text in (name, self.soc(), precision, shapes))
        status = self._library.dicp_build(define, *texts, receive)
        if status != 0:
            raise GraphRejectedError(TARGET, self.message(build=True) or f"status {status}")
        return received[0]

    def load(self, model: bytes, built_for: str, device: int = 0, dynamic: bool = False) -> int:
        """A handle of the model on a device; `dynamic`: its sizes change from run to run.

        Raises ModelMismatchError for one built for another chip, DeviceMemoryError.
        """
        self.open(device)
        if built_for != self.soc():
            raise ModelMismatchError(TARGET, built_for, self.soc())
        handle, wanted = ctypes.c_void_p(), ctypes.c_uint64()
        status = self._library.dicp_load(
            model, len(model), device, dynamic, ctypes.byref(handle), ctypes.byref(wanted)
        )
        if status in OUT_OF_MEMORY:
            raise DeviceMemoryError(TARGET, wanted.value, "a model's workspace and weights")
        if status in WRONG_MODEL:
            raise ModelMismatchError(TARGET, built_for, self.soc())
        self._check("aclmdlLoadFromMem", status)
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
        written: Sequence[int] = (),
        stream: int | None = None,
    ) -> None:
        """Run a model. `described`: the inputs' sizes are given, for a model that asks for them.
        `written` numbers the inputs that the graph writes to."""
        on_host = self.simulator is None
        given, made = _arguments(inputs, described, on_host), _arguments(outputs, False, on_host)
        for number in written:
            given[number].written = True
        for number in range(len(outputs)):
            made[number].written = True
        status = self._library.dicp_run(
            handle, given, len(inputs), made, len(outputs), described, stream
        )
        if status in OUT_OF_MEMORY:
            raise DeviceMemoryError(TARGET, 0, "a run")
        self._check("aclmdlExecuteAsync", status)

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            raise DeviceError(TARGET, call, status, self.message())


def _arguments(tensors: Sequence[torch.Tensor], described: bool, on_host: bool) -> Any:
    """`on_host`: tensors of the host are not where the graph runs."""
    array = (Argument * max(len(tensors), 1))()
    for argument, tensor in zip(array, tensors, strict=False):
        argument.data = tensor.data_ptr()
        argument.size = tensor.numel() * tensor.element_size()
        argument.dtype = DTYPES[tensor.dtype][1]
        argument.rank = tensor.dim()
        argument.on_host = on_host and tensor.device.type == "cpu"
        if described:
            argument.dims = (ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.shape)
    return array


class Model(LoadedGraph):
    """One compiled graph."""

    def __init__(
        self, driver: Driver, data: bytes, built_for: str, dynamic: bool,
        written: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(driver.unload)
        self.driver = driver
        self.data = data
        self.built_for = built_for
        self.dynamic = dynamic
        self.written = written
        """Inputs, by number, that the graph writes to."""

    def handle(self, device: int) -> int:
        """The model on a device."""
        return self.handle_on(
            device, lambda: self.driver.load(self.data, self.built_for, device, self.dynamic)
        )

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        """Tensors of the device are used where they are; where all are the host's, the driver
        copies them. Numbers that the host computes go to the device of the others."""
        where = next((t.device for t in (*inputs, *outputs) if t.device.type == DEVICE), None)
        if where is None:
            self.driver.run(self.handle(0), inputs, outputs, self.dynamic, self.written)
            return 0
        given = [as_plain(t.to(where)) for t in inputs]
        made = [as_plain(t.to(where)) for t in outputs]
        stream = int(torch.npu.current_stream(where).npu_stream)  # type: ignore[attr-defined]
        self.driver.run(
            self.handle(where.index or 0), given, made, self.dynamic, self.written, stream
        )
        changed = [(inputs[k], given[k]) for k in self.written]
        for there, here in [*changed, *zip(outputs, made, strict=True)]:
            if here is not there:
                there.copy_(here)
        return 0


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a row-major copy of one in a format of the chip's own."""
    extension = sys.modules.get("torch_npu")
    if extension is None or tensor.device.type != DEVICE:
        return tensor
    if extension.get_npu_format(tensor) in PLAIN_FORMATS:
        return tensor
    return extension.npu_format_cast(tensor, ND)  # type: ignore[no-any-return]
