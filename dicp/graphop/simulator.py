"""What vendors' simulators share: a library that calls Python back to compile, load and run graphs.

A simulator's library is C++ that implements those parts of the vendor's interface that generated
code and the driver use. It records a graph as text, and reaches Python through the functions of
`callbacks.h`. No exception may pass through the library: a failure is a status and a message.
"""

from __future__ import annotations

import abc
import ctypes
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dicp.cache import Cache, key_of
from dicp.toolchain import OUTPUT, compile_file
from dicp.torch_private import disable_current_modes

HEADER = '#include "callbacks.h"'
INCLUDED = "included.h"
HEADER_FLAGS = ("-include", INCLUDED, "-nostdlib")
"""Arguments of a graph's compilation, with the files of `Headers`. The parts of the standard
library that it needs are in the process already, through the driver."""
Model = TypeVar("Model")

_BUILD = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
)
_LOAD = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t
)
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip
_UNLOAD = ctypes.CFUNCTYPE(None, ctypes.c_int)


class _Callbacks(ctypes.Structure):
    _fields_ = [("build", _BUILD), ("load", _LOAD), ("run", _RUN), ("unload", _UNLOAD)]


class Argument(ctypes.Structure):
    """One tensor of a run; a rank of -1 means the sizes that the model declares."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Refused(Exception):
    """The graph is not valid; the text names the operator and says why."""


def with_header(*sources: Path) -> str:
    """Concatenated sources of a simulator's library, after the text of the header they include."""
    header = (Path(__file__).parent / "callbacks.h").read_text()
    return "\n".join([header, *(source.read_text().replace(HEADER, "") for source in sources)])


class Headers:
    """The headers that graphs' sources include, parsed by g++ once for all graphs: this is most of
    the time of a small graph's compilation. The first graph does not wait for it: many processes
    compile only one."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._asked: Counter[str] = Counter()
        self._parsed: dict[str, Mapping[str, bytes]] = {}

    def files(
        self, command: tuple[str, ...], source: str, identity: str, cache: Cache
    ) -> Mapping[str, bytes]:
        """What HEADER_FLAGS need beside the source.

        command: the compiler with its flags; where those of a graph differ, g++ parses the headers.
        identity: the compiler's version, and the simulator's.
        """
        lines = [line for line in source.splitlines() if line.startswith("#include")]
        text = {INCLUDED: "".join(f"{line}\n" for line in lines).encode()}
        if "clang" in identity:  # clang++ takes none of another folder
            return text
        key = key_of(command, text, identity)
        self._asked[key] += 1
        if self._asked[key] == 1:
            return text
        if key not in self._parsed:
            parse = [*command, "-x", "c++-header", INCLUDED, "-o", OUTPUT]
            self._parsed[key] = cache.get_or_build(
                "headers", key,
                lambda: {**text, f"{INCLUDED}.gch": compile_file(self.target, parse, text)},
            ).files  # fmt: skip
        return self._parsed[key]


class SimulatorBase(abc.ABC, Generic[Model]):
    """The simulated device. `counts` has the number of launched graphs and the vendor's own
    counts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.counts: Counter[str] = Counter()
        self.options: Any = {}
        """The options that the last graph was built with."""
        self.models: dict[int, Model] = {}
        self._handles = itertools.count()
        self._compiled: dict[str, Model] = {}
        self._callbacks = _Callbacks(
            _BUILD(self._build), _LOAD(self._load), _RUN(self._run), _UNLOAD(self._unload)
        )
        library.dicp_simulator_connect.argtypes = [_Callbacks]
        library.dicp_simulator_connect.restype = None
        library.dicp_simulator_connect(self._callbacks)

    # ---- what a vendor adds ---------------------------------------------------------------------

    @abc.abstractmethod
    def compile(self, text: str, options: Any) -> Model:
        """A recorded graph, checked and made executable; `options` are None for a loaded graph that
        was built before. Raises Refused."""

    @abc.abstractmethod
    def execute(self, model: Model, given: Sequence[Argument], made: Sequence[Argument]) -> None:
        """Run a model on tensors in memory."""

    def summary(self, model: Model) -> str:
        """The description of a compiled graph that the library returns."""
        return ""

    def check_load(self, model: Model, with_memory: bool) -> None:
        """Raise Refused for a model that cannot be loaded this way."""

    # ---- called by the library ------------------------------------------------------------------

    def _build(self, graph: bytes, options: bytes, message: int, room: int) -> int:
        def build() -> int:
            self.options = json.loads(options)
            model = self.compile(graph.decode(), self.options)
            self._compiled[graph.decode()] = model
            set_message(self.summary(model), message, room)
            return 0

        return guarded(build, message, room)

    def _load(self, data: int, size: int, with_memory: bool, message: int, room: int) -> int:
        def load() -> int:
            text = ctypes.string_at(data, size).decode()
            model = self._compiled.pop(text, None) or self.compile(text, None)
            self.check_load(model, with_memory)
            handle = next(self._handles)
            self.models[handle] = model
            return handle

        return guarded(load, message, room)

    def _run(self, handle: int, ins: int, n: int, outs: int, m: int, text: int, room: int) -> int:
        def run() -> int:
            given: Any = (Argument * n).from_address(ins) if n else []
            made: Any = (Argument * m).from_address(outs) if m else []
            with disable_current_modes(), torch.no_grad():
                self.execute(self.models[handle], given, made)
            self.counts["launches"] += 1
            return 0

        return guarded(run, text, room)

    def _unload(self, handle: int) -> None:
        self.models.pop(handle, None)


def guarded(work: Callable[[], int], message: int, room: int) -> int:
    """The result of `work()`, or a negative status and the failure in `message`."""
    try:
        return int(work())
    except Refused as error:
        text = str(error)
    except Exception as error:  # any failure becomes the library's status, as a device's would
        text = f"{type(error).__name__}: {error}"
    set_message(text, message, room)
    return -1


def set_message(text: str, message: int, room: int) -> None:
    """Stores a text where the library looks for it."""
    data = text.encode()[: room - 1] + b"\0"
    ctypes.memmove(message, data, len(data))


def memory_of(argument: Argument, dtype: torch.dtype) -> torch.Tensor:
    """An argument's memory as a flat tensor."""
    if not argument.size:
        return torch.empty(0, dtype=dtype)
    array = (ctypes.c_uint8 * argument.size).from_address(argument.data)
    return torch.frombuffer(array, dtype=dtype)


def leave(argument: Argument, result: torch.Tensor) -> None:
    """Copies a result to its reader's memory.

    Raises ValueError for memory of another size.
    """
    if result.numel() * result.element_size() != argument.size:
        described = f"{result.dtype}{list(result.shape)}"
        raise ValueError(f"an output has {described}, its buffer {argument.size} bytes")
    if result.numel():
        memory_of(argument, result.dtype).view(result.shape).copy_(result)
