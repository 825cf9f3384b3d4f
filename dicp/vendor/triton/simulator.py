"""Runs generated kernels on CPU tensors through Triton's interpreter.

Triton decides at import whether its functions are compiled or interpreted, and PyTorch imports it
before any backend is chosen. So the simulator imports a second copy, once, with the interpreter
enabled, and restores the process's own Triton: both coexist. Functions of the host replace those of
the device's math library. Values are rounded to bfloat16, where the interpreter would truncate.
"""

from __future__ import annotations

import dataclasses
import importlib
import linecache
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from dicp.config import environment
from dicp.gpu.index_width import needs_wide
from dicp.gpu.launch import extent_of
from dicp.serialize import evaluate_size
from dicp.torch_private import disable_current_modes
from dicp.vendor.triton.thresholds import MAX_BLOCK, MAX_PROGRAMS, MAX_TILE_ELEMENTS

DEVICE_FUNCTIONS = Path(__file__).parent / "device.py"


def _fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The exact remainder, as on the device; PyTorch's own is NaN for large quotients."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.fmod(x.numpy(), y.numpy())))


def _fast_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The quotient, and 0 for divisors beyond 2**126, as on the device (CUDA's __fdividef)."""
    return x / torch.where((y * 4).isinf(), torch.inf, y)


HOST_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
        "erfinv", "lgamma", "hypot", "nextafter", "copysign", "rsqrt", "floor", "ceil", "trunc",
        "pow",
    )
} | {
    "fmod": _fmod, "rint": torch.round, "fast_dividef": _fast_divide,
    "cospi": lambda x: torch.cos(x * math.pi),
}  # fmt: skip
"""Host functions for those of the device's math library, by name."""


class CheckFailed(Exception):
    """A check of a kernel failed: code 1 index out of range, 2 integer division by zero."""

    def __init__(self, code: int, site: int, index: int = 0, size: int = 0) -> None:
        super().__init__(code, site, index, size)
        self.status = (code, site, index, size)


class Interpreter:
    """A second copy of Triton, whose functions are interpreted."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.modules: dict[str, ModuleType] = {}
        with self.own_modules(), environment(TRITON_INTERPRET="1"):
            self.triton = _module("triton")
            self.language = _module("triton.language")
            self.runtime = _module("triton.runtime.interpreter")
            _module("triton.language.extra").libdevice = self._host_library()
            self.device = self._device_functions()
        self._repair_arithmetic()
        # Triton's language is patched once: only the interpreter uses this copy.
        for function in (self.device.sum, self.language.standard.sum):
            self.runtime._patch_lang(function.fn)
        self.runtime._patch_lang = lambda fn: None
        # Older Triton releases convert by a rule that newer numpy releases have dropped.
        self.language.tensor.__index__ = lambda value: int(value.handle.data.item())

    @contextmanager
    def own_modules(self) -> Iterator[None]:
        """Swaps in this copy for the process's own Triton: its functions import as they run."""
        with self.lock:
            others = _without_triton()
            sys.modules.update(self.modules)
            try:
                yield
            finally:
                self.modules = _without_triton()
                sys.modules.update(others)

    def _repair_arithmetic(self) -> None:
        """Fixes operations of the interpreter: comparisons get type bool instead of the operands',
        a fused multiply-add rounds once, and subnormal numbers in bfloat16 are no zeros."""
        builder, truth = self.runtime.InterpreterBuilder, self.language.int1
        # As in compiled kernels, integers wrap around; overflow checks would take time.
        shared = self.runtime.interpreter_builder
        shared.options = dataclasses.replace(shared.options, sanitize_overflow=False)

        def typed(compare: Callable[..., Any]) -> Callable[..., Any]:
            def call(own: Any, lhs: Any, rhs: Any) -> Any:
                return self.runtime.TensorHandle(compare(own, lhs, rhs).data, truth)

            return call

        builder.create_fma = lambda own, x, y, z: self._fma(x, y, z)
        cast = builder.cast_impl

        def widened(own: Any, x: Any, dtype: Any) -> Any:
            kinds = (x.dtype.scalar, dtype.scalar)
            if kinds != (self.language.bfloat16, self.language.float32):
                return cast(own, x, dtype)
            return self.runtime.TensorHandle(self._floats(x), dtype.scalar)

        builder.cast_impl = widened
        builder.create_dot = lambda own, a, b, total, *options: self._dot(a, b, total)
        for name in dir(builder):
            if name.startswith(("create_icmp", "create_fcmp")):
                setattr(builder, name, typed(getattr(builder, name)))

    def _fma(self, x: Any, y: Any, z: Any) -> Any:
        kind = z.data.dtype
        wide = np.longdouble if kind == np.float64 else np.float64
        exact = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return self.runtime.TensorHandle(exact.astype(kind), z.dtype.scalar)

    def _dot(self, a: Any, b: Any, total: Any) -> Any:
        """A product of tiles; the interpreter's own takes bfloat16 for integers."""
        left, right = (self._floats(x).astype(np.float32) for x in (a, b))
        return self.runtime.TensorHandle(left @ right + total.data, total.dtype.scalar)

    def _floats(self, handle: Any) -> np.ndarray:
        if handle.dtype.scalar != self.language.bfloat16:
            return np.asarray(handle.data)
        bits = np.ascontiguousarray(handle.data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)

    # ---- functions of the host ----------------------------------------------------------------

    def _host_library(self) -> ModuleType:
        library = ModuleType("libdevice")
        for name, function in HOST_FUNCTIONS.items():
            setattr(library, name, self._hosted(function))
        return library

    def _hosted(self, function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            arrays = [torch.from_numpy(np.ascontiguousarray(x.handle.data)) for x in operands]
            return self.tensor(function(*arrays).numpy(), operands[0].dtype, *operands)

        return call

    def tensor(self, data: np.ndarray, dtype: Any, *like: Any) -> Any:
        """`data` as a Triton value, a block if any of `like` is one."""
        tl = self.language
        block = any(x.type.is_block() for x in like)
        kind = tl.block_type(dtype, list(data.shape)) if block else dtype
        return tl.tensor(self.runtime.TensorHandle(data, dtype), kind)

    def _device_functions(self) -> Any:
        scope: dict[str, Any] = {"__name__": "dicp.vendor.triton.simulated_device"}
        text = DEVICE_FUNCTIONS.read_text()
        exec(compile(text, str(DEVICE_FUNCTIONS), "exec"), scope)
        scope |= {
            "to_bf16": self._to_bf16,
            "exp2_flushed": self._hosted(torch.exp2),
            "divisor": self._divisor,
            "check_index": self._check_index,
            "wrap_index": self._wrap_index,
            "prod": self._reduced(np.prod),
            "max": self._reduced(np.max),
            "min": self._reduced(np.min),
        }
        return SimpleNamespace(**{n: f for n, f in scope.items() if not n.startswith("__")})

    def _to_bf16(self, x: Any) -> Any:
        wide = torch.from_numpy(np.ascontiguousarray(x.handle.data)).to(torch.bfloat16)
        return self.tensor(wide.view(torch.uint16).numpy(), self.language.bfloat16, x)

    def _reduced(self, function: Callable[..., np.ndarray]) -> Callable[[Any], Any]:
        """A reduction along the last axis that propagates NaN, as the device function does."""

        def call(x: Any) -> Any:
            data = x.handle.data
            return self.tensor(function(data, axis=1, keepdims=True).astype(data.dtype), x.dtype, x)

        return call

    def _divisor(self, b: Any, active: Any, site: int) -> Any:
        if bool(np.any((b.handle.data == 0) & active.handle.data)):
            raise CheckFailed(2, site)
        data = np.where(b.handle.data == 0, np.ones_like(b.handle.data), b.handle.data)
        return self.tensor(data, b.dtype, b)

    def _check_index(self, index: Any, size: Any, active: Any, site: int, message: str) -> Any:
        at, most = index.handle.data, size.handle.data
        _refuse((at < 0) | (at >= most), active, site, at, most)
        return index

    def _wrap_index(self, index: Any, size: Any, active: Any, site: int, message: str) -> Any:
        at, most = index.handle.data, size.handle.data
        _refuse((at < -most) | (at >= most), active, site, at, most)
        return self.tensor(np.where(at < 0, at + most, at), index.dtype, index)

    # ---- kernels --------------------------------------------------------------------------------

    def function(self, name: str, body: str) -> Callable[..., None]:
        """The kernel as a Python function of Triton values."""
        path = f"<triton {name}>"
        text = f"@triton.jit\ndef {name}{body}\n"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        scope: dict[str, Any] = {
            "triton": self.triton, "tl": self.language, "d": self.device, "__name__": path,
        }  # fmt: skip
        with self.own_modules(), environment(TRITON_INTERPRET="1"):
            exec(compile(text, path, "exec"), scope)
            kernel: Callable[..., None] = scope[name].rewrite()
        return kernel

    def pointer(self, address: int, element: Any) -> Any:
        handle = self.runtime.TensorHandle(np.array([address], dtype=np.uint64), element)
        return self.language.tensor(handle, element)

    def pointer_type(self, element: str) -> Any:
        return self.language.str_to_ty(f"*{element}", None)

    def run(self, kernel: Callable[..., None], programs: int, args: Sequence[Any]) -> None:
        builder = self.runtime.interpreter_builder
        with self.own_modules(), np.errstate(all="ignore"), disable_current_modes():
            builder.set_grid_dim(programs, 1, 1)
            for program in range(programs):
                builder.set_grid_idx(program, 0, 0)
                kernel(*args)


def _refuse(outside: Any, active: Any, site: int, index: Any, size: Any) -> None:
    """Raises CheckFailed for the first active lane whose index lies `outside`."""
    wrong = np.broadcast_arrays(outside & active.handle.data, index, size)
    if wrong[0].any():
        first = tuple(np.argwhere(wrong[0])[0])
        raise CheckFailed(1, site, int(wrong[1][first]), int(wrong[2][first]))


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _without_triton() -> dict[str, ModuleType]:
    """Removes and returns Triton's modules, but the native library: it cannot be loaded twice."""
    names = [
        name
        for name in sys.modules
        if (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C")
    ]
    return {name: sys.modules.pop(name) for name in names}


_ONE_INTERPRETER = threading.Lock()


def interpreter() -> Interpreter:
    """The one interpreter of this process."""
    with _ONE_INTERPRETER:  # while one thread makes it, others wait
        return _interpreter()


@lru_cache(maxsize=1)
def _interpreter() -> Interpreter:
    return Interpreter()


class Simulator:
    """The kernels of a program, ready to be interpreted."""

    def __init__(self, texts: Mapping[str, str], buffers: Sequence[Mapping[str, Any]]) -> None:
        self.texts = texts
        self.buffers = buffers
        """Those of the serialized program, whose extents decide how wide indices are."""
        self._functions: dict[str, Callable[..., None]] = {}

    def function(self, name: str) -> Callable[..., None]:
        if name not in self._functions:
            self._functions[name] = interpreter().function(name, self.texts[name])
        return self._functions[name]

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> SimulatedSegment:
        return SimulatedSegment([_Launch(self, step, symbols) for step in launches], table, status)


class _Launch:
    """One kernel with all arguments but the addresses of its buffers."""

    def __init__(
        self, simulator: Simulator, step: Mapping[str, Any], symbols: Mapping[str, int]
    ) -> None:
        host = interpreter()
        launch = step["launch"]
        self.kernel = simulator.function(step["kernel"])
        self.slots = step["args"]
        self.elements = [host.pointer_type(e) for e in launch["elements"]]
        sizes = [host.runtime._implicit_cvt(evaluate_size(s, symbols)) for s in step["symbols"]]
        blocks, self.programs = simulated_blocks(launch, symbols)
        extents = [extent_of(simulator.buffers[slot], symbols) for slot in self.slots]
        wide = needs_wide(step, symbols, extents)
        width = host.language.int64 if wide else host.language.int32
        self.rest = [*sizes, width, *blocks, *launch.get("constants", {}).values()]

    def run(self, table: Any) -> None:
        host = interpreter()
        pointers = [
            host.pointer(table[slot] or 0, element)
            for slot, element in zip(self.slots, self.elements, strict=True)
        ]
        host.run(self.kernel, self.programs, [*pointers, *self.rest])


def simulated_blocks(
    launch: Mapping[str, Any], symbols: Mapping[str, int]
) -> tuple[list[int], int]:
    """Block sizes per axis, larger than on a chip, and the number of programs.

    The block of an axis without a mask divides the axis.
    """
    axes = launch["axes"]
    blocks = {name: axis["block"] for name, axis in axes.items()}
    programs = 1
    for name, axis in axes.items():
        size = evaluate_size(axis["size"], symbols)
        while (
            not axis.get("fixed")
            and -(-size // blocks[name]) > MAX_PROGRAMS
            and blocks[name] < MAX_BLOCK
            and 2 * math.prod(blocks.values()) <= MAX_TILE_ELEMENTS
            and (axis["masked"] or size % (2 * blocks[name]) == 0)
        ):
            blocks[name] *= 2
        programs *= -(-size // blocks[name]) if name in launch["grid"] else 1
    return list(blocks.values()), programs


class SimulatedSegment:
    """Consecutive kernels, run in order."""

    def __init__(self, launches: Sequence[_Launch], table: Any, status: Any) -> None:
        self.launches = launches
        self.table = table
        self.status = status

    def run(self) -> int:
        return next((k for k in map(self.run_one, range(len(self.launches))) if k), 0)

    def run_one(self, position: int) -> int:
        try:
            self.launches[position].run(self.table)
        except CheckFailed as failure:
            self.status[:] = failure.status
            return position + 1
        return 0
