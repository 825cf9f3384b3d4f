"""The host C++ compiler: finding it, its flags, and running it without a shell."""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from dicp import toolchain as host
from dicp.config import Config

BASE_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    # Products and sums keep their own rounding, as in eager; and g++ 12 miscompiles masked ones
    # when it contracts them.
    "-ffp-contract=off",
)  # fmt: skip
GCC_FLAGS = (
    # Partial redundancies are removed by branches, and loops with branches stay scalar.
    "-fno-tree-pre",
    # A seventh of the compiler's time, for code that is no faster.
    "-fno-thread-jumps", "-fno-tree-dominator-opts", "-fno-gcse", "-fno-code-hoisting",
    "-fno-tree-slp-vectorize",
)  # fmt: skip
"""What clang++ does not know, and refuses."""
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
def cpu_model() -> str:
    """The processor's name and features, since code is built for exactly this one."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            rows.setdefault(name.strip(), value.strip())
    return "|".join(rows.values())


@lru_cache(maxsize=1)
def cache_bytes() -> float:
    """The size of the last cache that threads share; infinite where the system does not tell it."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        return max(int(p.read_text().strip().removesuffix("K")) << 10 for p in sizes)
    except (OSError, ValueError):
        return math.inf


def has_libmvec() -> bool:
    """Whether the C library brings vector math (glibc 2.35 or later on x86-64)."""
    name, version = platform.libc_ver()
    if name != "glibc" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    major, minor = (int(x) for x in version.split(".")[:2])
    return (major, minor) >= (2, 35)


def find_toolchain(config: Config) -> Toolchain:
    """The compiler that `config` asks for, else the first one found.

    Raises ToolchainError with what to install.
    """
    (path, *arguments), version = host.find_compiler(TARGET, config.cxx)
    own = () if "clang" in version else GCC_FLAGS
    vector = ("-DDICP_LIBMVEC",) if own and has_libmvec() else ()
    return Toolchain(path, version, (*arguments, *BASE_FLAGS, *own, *vector, *config.cxx_flags))


def compile_shared(
    toolchain: Toolchain,
    files: dict[str, str],
    main: str,
    symbols: Collection[str] = (),
    stop: threading.Event | None = None,
) -> bytes:
    """The shared object built from `main` (other files lie beside it), which defines `symbols`.

    Raises CompilerError with the compiler's first messages, and ToolchainError.
    """
    command = [toolchain.compiler, *toolchain.flags, main, "-o", host.OUTPUT, "-lm"]
    comments = [line[3:] for line in files[main].splitlines() if line.startswith("// ")]
    return host.compile_shared(
        TARGET, command, files, symbols, sources=comments, cautious=CAUTIOUS_FLAGS, stop=stop
    )
