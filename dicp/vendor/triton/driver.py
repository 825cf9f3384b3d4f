"""The part of NVIDIA's driver library that launching kernels needs."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from dicp.errors import ToolchainError
from dicp.gpu.build import Binary
from dicp.gpu.module_driver import DriverApi, Function, ModuleDriver, first_loaded
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


API = DriverApi(
    target="triton", device_type="cuda", libraries=LIBRARIES, load="cuModuleLoadData",
    unload="cuModuleUnload", function="cuModuleGetFunction", launch="cuLaunchKernel",
    describe="cuGetErrorString", describe_writes=True,
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT: before PyTorch has used the device in a thread
    no_binary=209, fix="Install the driver, or run on CPU tensors through the interpreter.",
)  # fmt: skip


class Driver(ModuleDriver):
    """NVIDIA's driver library. Raises ToolchainError."""

    def __init__(self, library: Any) -> None:
        super().__init__(API, library, GPU.lanes, "")
        pointer = ctypes.c_void_p
        library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        library.cuCtxGetCurrent.argtypes = [pointer]
        library.cuCtxSetCurrent.argtypes = [pointer]
        library.cuDeviceGet.argtypes = [pointer, ctypes.c_int]
        library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
        self._describe.argtypes = [ctypes.c_int, pointer]

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

    def function(self, device: int, binary: Binary) -> Function:
        function = super().function(device, binary)
        if binary.shared > SHARED_WITHOUT_ASKING:
            self._check(
                self.library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE, binary.shared)
            )
        return function

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


@lru_cache(maxsize=1)
def find_driver() -> Driver:
    """The driver of this machine.

    Raises ToolchainError.
    """
    found = first_loaded(LIBRARIES, Driver)
    if found is not None:
        return found
    raise ToolchainError(
        "triton", "the NVIDIA driver", f"none of {', '.join(LIBRARIES)} can be loaded",
        API.fix,
    )  # fmt: skip
