"""The part of NVIDIA's driver library that launching kernels needs."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from dicp.errors import ToolchainError
from dicp.gpu.build import Binary
from dicp.vendor.triton.facts import GPU

LIBRARIES = ("libcuda.so.1", "libcuda.so")
SHARED_WITHOUT_ASKING = 49152
MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
TOO_OLD = {
    209: "it has no binary for this GPU",
    218: "it does not take this code",
    222: "it is older than the compiler's output",
    300: "it does not read this format",
}
"""Errors of loading a module that a newer driver fixes (cuda.h, CUresult)."""


class Driver:
    """Loads compiled kernels and launches them. Raises ToolchainError."""

    target = "triton"
    device_type = "cuda"
    lanes = GPU.lanes
    no_context = 201
    """CUDA_ERROR_INVALID_CONTEXT: the thread's first call, before PyTorch has used the device."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._modules: dict[tuple[int, bytes], int] = {}
        pointer, integer = ctypes.c_void_p, ctypes.c_uint
        library.cuLaunchKernel.argtypes = [
            pointer, *[integer] * 6, integer, pointer, pointer, pointer
        ]  # fmt: skip
        library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
        library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        library.cuCtxGetCurrent.argtypes = [pointer]
        library.cuCtxSetCurrent.argtypes = [pointer]
        library.cuDeviceGet.argtypes = [pointer, ctypes.c_int]
        library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
        library.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
        self.launch = library.cuLaunchKernel

    def enter(self, device: int) -> None:
        """Makes the device's primary context current for this thread if it has none.

        PyTorch leaves this to the first call of the CUDA runtime, which in an autograd thread may
        come after our launch.
        """
        context, handle = ctypes.c_void_p(), ctypes.c_int()
        self._check(self.library.cuCtxGetCurrent(ctypes.byref(context)))
        if context.value:
            return
        self._check(self.library.cuDeviceGet(ctypes.byref(handle), device))
        self._check(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        self._check(self.library.cuCtxSetCurrent(context))

    def function(self, device: int, binary: Binary) -> int:
        """The kernel's handle in the context of `device`, the current device."""
        known = self._modules.get((device, binary.code))
        if known is not None:
            return known
        self.enter(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self.library.cuModuleLoadData(ctypes.byref(module), binary.code))
        self._check(
            self.library.cuModuleGetFunction(ctypes.byref(function), module, binary.entry.encode())
        )
        assert function.value is not None
        if binary.shared > SHARED_WITHOUT_ASKING:
            self._check(
                self.library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, binary.shared)
            )
        self._modules[device, binary.code] = function.value
        return function.value

    def _check(self, result: int) -> None:
        if result in TOO_OLD:
            raise ToolchainError(
                "triton", "a newer NVIDIA driver", f"{TOO_OLD[result]} (result {result})",
                "Update the driver, or install an older release of triton.",
            )  # fmt: skip
        if result:
            raise ToolchainError(
                "triton", "the NVIDIA driver", f"{self.describe(result)} while a kernel was loaded",
                "An earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1.",
            )  # fmt: skip

    def describe(self, result: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(result, ctypes.byref(text))
        return f"{(text.value or b'unknown result').decode()} ({result})"


@lru_cache(maxsize=1)
def find_driver() -> Driver:
    """The driver of this machine.

    Raises ToolchainError.
    """
    for name in LIBRARIES:
        try:
            return Driver(ctypes.CDLL(name))
        except OSError:
            continue
    raise ToolchainError(
        "triton", "the NVIDIA driver", f"none of {', '.join(LIBRARIES)} can be loaded",
        "Install the driver, or run on CPU tensors through the interpreter.",
    )  # fmt: skip
