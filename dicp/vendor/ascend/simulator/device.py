"""The simulator's device: models that the library hands over, run by torch on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dicp.torch_private import disable_current_modes
from dicp.vendor.ascend.blocked import packed, storage_dims, unpacked
from dicp.vendor.ascend.simulator.compiler import Compiler, Model, Refused, Tensor

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


class _Piece(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Simulator:
    """What runs instead of a device. `counts` has the models run, the operators they launched,
    and among them those that only move data."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.counts: Counter[str] = Counter()
        self.options: dict[str, str] = {}
        """What the last graph was built with."""
        self.models: dict[int, Model] = {}
        self._handles = itertools.count()
        self._compiled: dict[str, Model | None] = {}
        self._callbacks = _Callbacks(
            _BUILD(self._build), _LOAD(self._load), _RUN(self._run), _UNLOAD(self._unload)
        )
        library.dicp_simulator_connect.argtypes = [_Callbacks]
        library.dicp_simulator_connect.restype = None
        library.dicp_simulator_connect(self._callbacks)

    # ---- called by the library: nothing may be raised through it --------------------------------

    def _build(self, graph: bytes, options: bytes, message: int, room: int) -> int:
        def build() -> int:
            self.options = json.loads(options)
            self._compiled[graph.decode()] = self.compile(graph.decode(), self.options)
            return 0

        return _guarded(build, message, room)

    def _load(self, data: int, size: int, with_memory: bool, message: int, room: int) -> int:
        def load() -> int:
            text = ctypes.string_at(data, size).decode()
            handle = next(self._handles)
            model = self._compiled.pop(text, None) or self.compile(text, None)
            if with_memory and model.is_dynamic:
                raise Refused("a model of changing sizes manages its memory itself")
            self.models[handle] = model
            return handle

        return _guarded(load, message, room)

    def _run(self, handle: int, ins: int, n: int, outs: int, m: int, text: int, room: int) -> int:
        def run() -> int:
            model = self.models[handle]
            given: Any = (_Piece * n).from_address(ins) if n else []
            made: Any = (_Piece * m).from_address(outs) if m else []
            self._execute(model, given, made)
            return 0

        return _guarded(run, text, room)

    def _unload(self, handle: int) -> None:
        self.models.pop(handle, None)

    # ---- the work -------------------------------------------------------------------------------

    def compile(self, text: str, options: Mapping[str, str] | None) -> Model:
        """A graph, checked and made runnable; `options` are None where a built one is loaded."""
        return Compiler(text, options).compile()

    def _execute(self, model: Model, given: Sequence[Any], made: Sequence[Any]) -> None:
        with disable_current_modes(), torch.no_grad():
            addresses = {p.data: k for k, p in enumerate(given) if p.size}
            for k, piece in enumerate(made):
                if piece.data in addresses and piece.size:
                    model.check_shared(addresses[piece.data], k)
                    self.counts["results over inputs"] += 1
            inputs = [_tensor(p, t) for p, t in zip(given, model.inputs, strict=True)]
            results = model.interpreter.run(inputs)
            stored = zip(results, model.outputs, strict=True)
            for piece, result in zip(made, (packed(r, t.format) for r, t in stored), strict=True):
                if result.numel() * result.element_size() != piece.size:
                    raise ValueError(
                        f"an output has {result.dtype}{list(result.shape)}, its buffer "
                        f"{piece.size} bytes"
                    )
                if result.numel():
                    _memory(piece, result.dtype).view(result.shape).copy_(result)
        self.counts["launches"] += 1
        self.counts["operators"] += len(model.kinds)
        for kind in ("Transpose", "TransData", "Cast"):
            self.counts[kind] += model.kinds.count(kind)


def _guarded(work: Any, message: int, room: int) -> int:
    """`work()`, or a negative status and what went wrong in `message`."""
    try:
        return int(work())
    except Refused as error:
        text = str(error)
    except Exception as error:  # any failure becomes the library's status, as a device's would
        text = f"{type(error).__name__}: {error}"
    data = text.encode()[: room - 1] + b"\0"
    ctypes.memmove(message, data, len(data))
    return -1


def _memory(piece: Any, dtype: torch.dtype) -> torch.Tensor:
    array = (ctypes.c_uint8 * piece.size).from_address(piece.data)
    return torch.frombuffer(array, dtype=dtype)


def _tensor(piece: Any, declared: Tensor) -> torch.Tensor:
    assert declared.dims is not None
    stored = storage_dims(declared.format, declared.dims)
    dims = list(piece.dims[: piece.rank]) if piece.rank >= 0 else stored
    if len(dims) != len(stored) or any(d not in (-1, s) for d, s in zip(stored, dims, strict=True)):
        raise ValueError(f"an input has sizes {dims}, the model takes {stored}")
    if not piece.size:
        return torch.empty(dims, dtype=declared.dtype)
    return unpacked(_memory(piece, declared.dtype).view(dims), declared.format, declared.dims)


__all__ = ["Simulator"]
