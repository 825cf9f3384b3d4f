"""Compilers of MACA C++ for a device: mxcc, and NVRTC through the compatibility header."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dicp import toolchain as host
from dicp.cache import key_of
from dicp.config import COUNT, PATH, WORDS, Config, vendor_option
from dicp.errors import CompilerError, ToolchainError
from dicp.gpu.build import Variant
from dicp.gpu.module_driver import DriverApi, first_loaded
from dicp.vendor.maca.facts import GPU
from dicp.vendor.maca.units import TARGET, UNIT, header_texts

COMPILER = Path("mxgpu_llvm", "bin", "mxcc")
OPTIONS = (
    vendor_option("maca_path", PATH, "MACA_PATH", "the folder of the MACA toolkit",
                  default=Path("/opt/maca"), changes_code=False),
    vendor_option("maca_flags", WORDS, "DICP_MACA_FLAGS",
                  "further flags of mxcc; --offload-arch=.. names a chip that is not at hand",
                  default=("--offload-arch=native",)),
    vendor_option("maca_nvidia", COUNT, "DICP_MACA_NVIDIA",
                  "the compute capability, such as 90, of the NVIDIA GPU that kernels are compiled "
                  "for by NVRTC in the place of a MetaX one; 0: none", default=0),
)  # fmt: skip
NVRTC_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")

MACA_API = DriverApi(
    target=TARGET, device_type="cuda", libraries=("libmcruntime.so",), load="mcModuleLoadData",
    unload="mcModuleUnload", function="mcModuleGetFunction", launch="mcModuleLaunchKernel",
    describe="mcGetErrorName", describe_writes=False, no_context=201, no_binary=209,
    fix="Install the MACA toolkit, or name its folder in MACA_PATH.",
)  # fmt: skip
CUDA_API = DriverApi(
    target=TARGET, device_type="cuda", libraries=("libcuda.so.1", "libcuda.so"),
    load="cuModuleLoadData", unload="cuModuleUnload", function="cuModuleGetFunction",
    launch="cuLaunchKernel", describe="cuGetErrorName", describe_writes=True, no_context=201,
    no_binary=209, fix="Install the NVIDIA driver.",
)  # fmt: skip
"""CUDA_ERROR_INVALID_CONTEXT and _NO_BINARY_FOR_GPU; that MetaX numbers them alike is assumed."""


@dataclass(frozen=True)
class Mxcc:
    """MetaX's compiler. What `native` means depends on the chips of the machine."""

    command: tuple[str, ...]
    version: str
    defines: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        chips = sorted({torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())})
        return key_of(self.version, chips, *self.command, *self.defines, *header_texts().values())

    def compile(self, text: str, names: Sequence[str]) -> bytes:
        command = [*self.command, *self.defines, UNIT, "-o", host.OUTPUT]
        return host.compile_file(TARGET, command, {UNIT: text, **header_texts()})


def find_mxcc(config: Config, defines: tuple[str, ...] = ()) -> Mxcc:
    """MACA's compiler. Raises ToolchainError, which names the path looked for."""
    root = Path(config.vendor["maca_path"])
    path = root / COMPILER
    if not path.exists():
        raise ToolchainError(
            TARGET, "mxcc", f"{path} does not exist",
            "Install the MACA toolkit, or name its folder in MACA_PATH.",
        )  # fmt: skip
    (program, *_), version = host.find_compiler(TARGET, str(path))
    flags = ("-x", "maca", "--fatbin", f"-I{root / 'include'}", "-O3", "-fPIC", "-std=c++17",
             "-ffp-contract=off", "-fno-strict-aliasing")  # fmt: skip
    return Mxcc((program, *flags, *config.vendor["maca_flags"]), version, defines)


@dataclass(frozen=True)
class Nvrtc:
    """NVIDIA's runtime compiler, which every CUDA build of PyTorch brings."""

    arch: int
    defines: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            f"--gpu-architecture=sm_{self.arch}", "--std=c++17", "--fmad=false", *self.defines,
        )  # fmt: skip

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"nvrtc {major.value}.{minor.value}"

    @property
    def identity(self) -> str:
        return key_of(self.version, *self.flags, *header_texts().values())

    def compile(self, text: str, names: Sequence[str]) -> bytes:
        library, program, headers = _nvrtc(), ctypes.c_void_p(), header_texts()
        _check(library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), UNIT.encode(), len(headers),
            _texts(list(headers.values())), _texts(list(headers)),
        ))  # fmt: skip
        try:
            if library.nvrtcCompileProgram(program, len(self.flags), _texts(self.flags)):
                log = _output(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
                command = ["nvrtc", *self.flags, UNIT]
                raise CompilerError(TARGET, command, log.rstrip(b"\0").decode())
            return _output(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def device_compiler(config: Config, defines: tuple[str, ...] = ()) -> Mxcc | Nvrtc:
    """The compiler for the device that the options name. Raises ToolchainError."""
    arch = config.vendor["maca_nvidia"]
    return Nvrtc(arch, defines) if arch else find_mxcc(config, defines)


def defines_of(variant: Variant) -> tuple[str, ...]:
    """What a variant's kernels may rely on: indices of 32 bits, and aligned tensors."""
    narrow = () if variant.wide else ("-DD_NARROW",)
    return (*narrow, "-DD_ALIGNED") if all(variant.aligned) else narrow


class DriverChoice(NamedTuple):
    """The driver library's functions, folders to look for it in, lanes of a wave, architecture."""

    api: DriverApi
    folders: tuple[str, ...]
    lanes: int
    arch: str


def driver_api(config: Config) -> DriverChoice:
    """The driver of the device that the options name."""
    arch = config.vendor["maca_nvidia"]
    if arch:
        return DriverChoice(CUDA_API, (), 32, f"sm_{arch}")
    folder = str(Path(config.vendor["maca_path"]) / "lib")
    return DriverChoice(MACA_API, (folder,), GPU.lanes, " ".join(config.vendor["maca_flags"]))


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """The library that PyTorch has loaded, or one on the loader's path. Raises ToolchainError."""
    folder = Path(torch.__file__).parents[1] / "nvidia"
    near = (str(path) for path in sorted(folder.glob("*/lib/libnvrtc.so.1?")))
    tried = (*NVRTC_LIBRARIES, *near)
    found = first_loaded(tried, lambda library: library)
    if found is not None:
        return found
    raise ToolchainError(
        TARGET, "NVRTC", f"none of {', '.join(tried)} can be loaded",
        "Install a CUDA build of torch, or the package nvidia-cuda-nvrtc.",
    )  # fmt: skip


def _check(result: int) -> None:
    if result:
        raise ToolchainError(TARGET, "NVRTC", f"it fails with status {result}", "Reinstall it.")


def _texts(items: Sequence[str]) -> Any:
    return (ctypes.c_char_p * max(1, len(items)))(*(item.encode() for item in items))


def _output(size: Any, get: Any, program: Any) -> bytes:
    length = ctypes.c_size_t()
    _check(size(program, ctypes.byref(length)))
    content = ctypes.create_string_buffer(length.value)
    _check(get(program, content))
    return content.raw
