"""The host C++ compiler: finding it, its flags, and running it without a shell."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shlex
import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from dicp import toolchain as host
from dicp.config import Config
from dicp.errors import CompilerError, SerialWarning
from dicp.vendor.cpu.thresholds import MAX_CACHE_PER_CPU

BASE_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-ffp-contract=off",
)  # fmt: skip
JOINED_PRODUCTS = "-ffp-contract=fast"
"""Contracts products and sums into FMA, in routines only: it halves their arithmetic, and none of
their sums takes a product under a condition. Generated kernels round products and sums separately,
as eager does; and g++ 12 miscompiles contracted sums of products under a condition."""
GCC_FLAGS = (
    # Partial redundancy elimination adds branches, and loops with branches stay scalar.
    "-fno-tree-pre",
    # These passes take a seventh of the compile time, for code that is no faster.
    "-fno-thread-jumps", "-fno-tree-dominator-opts", "-fno-gcse", "-fno-code-hoisting",
    "-fno-tree-slp-vectorize",
    # In vectors pow(x, 0.5) becomes a square root, which differs for -0.0 and -inf.
    "-fno-builtin-pow", "-fno-builtin-powf",
)  # fmt: skip
"""Flags that clang++ rejects or does not need."""
LIBMVEC = {
    "x86_64": {(2, 35): 240},
    "AMD64": {(2, 35): 240},
    "aarch64": {(2, 38): 238, (2, 39): 239, (2, 40): 240},
}
"""Machine -> first glibc -> the vector functions that it has, as prelude.h counts them."""
TWO_FUNCTIONS = ("-fno-builtin-sinf", "-fno-builtin-cosf")
"""g++ makes sine and cosine of one value a call of sincosf, and the loop around it stays scalar."""
NO_GATHER = ("-mtune-ctrl=^use_gather,^use_gather_4parts,^use_gather_2parts",)
"""g++ 12 gathers with instructions on AMD's Zen 4, though loads of single elements are faster:
2048x512 float32 from rows of 1024 take 0.18 of the time, and 0.8 of it where the rows are in the
L1 cache."""
CAUTIOUS_FLAGS = ("-O1", "-fno-tree-vectorize", "-fno-openmp-simd")
"""For code that crashes the compiler's vectorizer."""
TARGET = "cpu"


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler with its version and the flags kernels are built with."""

    compiler: str
    version: str
    flags: tuple[str, ...]

    def with_flags(self, flags: Sequence[str]) -> Toolchain:
        return replace(self, flags=(*self.flags, *flags))

    @property
    def identity(self) -> str:
        return f"{self.version} {' '.join(self.flags)} {cpu_model()}"


@lru_cache(maxsize=1)
def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's vendor, name and features, separated by "|": code is built for this one."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "model name", "CPU part", "flags", "Features")
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            rows.setdefault(name.strip(), value.strip())
    return "|".join(rows[name] for name in wanted if name in rows)


def has_feature(name: str) -> bool:
    """Whether the processor has the feature `name` of /proc/cpuinfo.

    Linux lists amx_bf16 only where it lets processes use the tile registers.
    """
    return name in cpu_model().rpartition("|")[2].split()


ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""x86-64 Linux: the system call's number, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA."""


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Whether this process may use AMX's tile registers in bfloat16; asks the kernel for them.

    A process that uses them without permission is killed. Kernels before 5.16, some sandboxes and
    hypervisors refuse; a granted permission holds for all threads and forked children.
    """
    if not (has_feature("amx_tile") and has_feature("amx_bf16")):
        return False
    return _request_tiles() == 0


def _request_tiles() -> int:
    libc = ctypes.CDLL(None)
    numbers = (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return int(libc.syscall(*map(ctypes.c_long, numbers)))


@lru_cache(maxsize=1)
def cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Bytes of the last-level cache that this process may use; infinite where Linux shows none.

    Of a cache that several CPUs share, a process has the share of the CPUs that it may run on.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
        sizes = [_usable(index, cpus) for index in cpu.glob("index*")]
    except (OSError, ValueError, AttributeError):
        return math.inf
    return max(sizes, default=math.inf)


def _usable(index: Path, cpus: int) -> int:
    """Bytes of one cache that a process on `cpus` CPUs may use."""
    size = int((index / "size").read_text().strip().removesuffix("K")) << 10
    sharing = bin(int((index / "shared_cpu_map").read_text().replace(",", ""), 16)).count("1")
    used = min(cpus, max(sharing, 1))
    return min(size * used // max(sharing, 1), MAX_CACHE_PER_CPU * used)


def vector_functions() -> int:
    """The vector math functions of this C library, as prelude.h counts them: 0 is none, 240 all."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return 0
    major, minor = (int(x) for x in version.split(".")[:2])
    releases = LIBMVEC.get(platform.machine(), {})
    return max((has for first, has in releases.items() if (major, minor) >= first), default=0)


def vector_math(is_clang: bool) -> tuple[str, ...]:
    """Flags to call the C library's vector functions in loops; clang++ has them on x86 only."""
    functions = vector_functions()
    if not functions:
        return ()
    if not is_clang:
        return (f"-DDICP_LIBMVEC={functions}", *TWO_FUNCTIONS)
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    link = "-Wl,--push-state,--no-as-needed,-lmvec,--pop-state"
    return ("-fveclib=libmvec", link) if on_x86 else ()


def _gather(version: str) -> tuple[str, ...]:
    """Flags of the g++ with this version line for loads at computed places."""
    gathers = version.rpartition(" ")[2].startswith("12.") and "AuthenticAMD" in cpu_model()
    return NO_GATHER if gathers else ()


@lru_cache(maxsize=16)
def _parallel_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """OpenMP flags of this compiler; without -fopenmp, as with Apple's, kernels run serially."""
    files = {"probe.cpp": 'extern "C" int probe() { return 0; }\n'}
    for flag in ("-fopenmp", "-fopenmp-simd"):
        parts = [*command, "-shared", "-fPIC", flag, "probe.cpp", "-o", host.OUTPUT]
        try:
            host.compile_shared(TARGET, parts, files, ("probe",))
        except CompilerError:
            continue
        break
    else:
        flag = ""
    if flag != "-fopenmp":
        warnings.warn(SerialWarning(shlex.join(command)), stacklevel=2)
    return (flag,) if flag else ()


def find_toolchain(config: Config) -> Toolchain:
    """The compiler that `config` asks for, else the first one found.

    Raises ToolchainError with what to install.
    """
    command, version = host.find_compiler(TARGET, config.cxx)
    path, *arguments = command
    is_clang = "clang" in version
    own = _parallel_flags(command) if is_clang else ("-fopenmp", *GCC_FLAGS, *_gather(version))
    vector = vector_math(is_clang)
    tiles = ("-DDICP_TILES",) if has_tiles() else ()
    flags = (*arguments, *BASE_FLAGS, *own, *vector, *tiles, *config.cxx_flags)
    return Toolchain(path, version, flags)


def compile_shared(
    toolchain: Toolchain,
    files: dict[str, str],
    main: str,
    symbols: Collection[str] = (),
    stop: threading.Event | None = None,
    sources: Sequence[str] = (),
) -> bytes:
    """The shared object built from `main`, which includes the other files and defines `symbols`.

    `sources`: the graph nodes that it computes, for messages. Raises CompilerError with the
    compiler's first messages, and ToolchainError.
    """
    command = [toolchain.compiler, *toolchain.flags, main, "-o", host.OUTPUT, "-lm"]
    return host.compile_shared(
        TARGET, command, files, symbols, sources=sources, cautious=CAUTIOUS_FLAGS, stop=stop
    )
