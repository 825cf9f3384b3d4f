"""The host C++ compiler: finding it, its flags, and running it without a shell."""

from __future__ import annotations

import math
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from dicp.config import Config
from dicp.errors import CompilerError, SerialWarning, ToolchainError

BASE_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-ffp-contract=off",
)  # fmt: skip
JOINED_PRODUCTS = "-ffp-contract=fast"
"""Products and sums of generated kernels keep their own rounding, as in eager; and g++ 12
miscompiles sums of a condition's products when it joins them. Routines are joined instead: half of
their arithmetic, and none of their sums takes a product under a condition."""
GCC_FLAGS = (
    # Partial redundancies are removed by branches, and loops with branches stay scalar.
    "-fno-tree-pre",
    # A seventh of the compiler's time, for code that is no faster.
    "-fno-thread-jumps", "-fno-tree-dominator-opts", "-fno-gcse", "-fno-code-hoisting",
    "-fno-tree-slp-vectorize",
)  # fmt: skip
"""What clang++ does not know, and refuses."""
LIBMVEC = {"x86_64": (2, 35), "AMD64": (2, 35), "aarch64": (2, 40)}
"""The first glibc with all vector functions that kernels use; 2.38 and 2.39 have some on ARM."""
CAUTIOUS_FLAGS = ("-O1", "-fno-tree-vectorize", "-fno-openmp-simd")
"""For code that crashes the compiler's vectorizer."""
COMPILERS = ("g++", "clang++")
TIMEOUT_SECONDS = 600


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


@lru_cache(maxsize=16)
def _locate(requested: str) -> tuple[tuple[str, ...], str]:
    """The command that starts the compiler, and its version."""
    names = (requested,) if requested else COMPILERS
    for name in names:
        program, *arguments = shlex.split(name)
        path = shutil.which(program)
        if path is None:
            continue
        command = (path, *arguments)
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
        if result.returncode == 0 and result.stdout:
            return command, result.stdout.splitlines()[0]
        detail = f"{shlex.join(command)} --version fails"
        raise ToolchainError("cpu", name, detail, "Reinstall the compiler.")
    raise ToolchainError(
        "cpu",
        "a C++ compiler",
        f"none of {', '.join(names)} is on the PATH",
        "Install g++ (Debian: apt install g++), or name a compiler in DICP_CXX.",
    )


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
    """Whether the C library brings all vector math that kernels use."""
    name, version = platform.libc_ver()
    first = LIBMVEC.get(platform.machine())
    if name != "glibc" or first is None:
        return False
    major, minor = (int(x) for x in version.split(".")[:2])
    return (major, minor) >= first


def vector_math(is_clang: bool) -> tuple[str, ...]:
    """Flags by which loops call the C library's vector functions; clang++ knows them on x86."""
    if not has_libmvec():
        return ()
    if not is_clang:
        return ("-DDICP_LIBMVEC",)
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    link = "-Wl,--push-state,--no-as-needed,-lmvec,--pop-state"
    return ("-fveclib=libmvec", link) if on_x86 else ()


@lru_cache(maxsize=16)
def _parallel_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    """Flags for threads; where the compiler has none of them, as Apple's, kernels run serially."""
    with tempfile.TemporaryDirectory(prefix="dicp-") as folder:
        Path(folder, "probe.cpp").write_text("int probe() { return 0; }\n")
        for flag in ("-fopenmp", "-fopenmp-simd"):
            parts = [*command, "-shared", "-fPIC", flag, "probe.cpp", "-o", "probe.so"]
            if _run(parts, folder).returncode == 0:
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
    command, version = _locate(config.cxx)
    path, *arguments = command
    is_clang = "clang" in version
    own = _parallel_flags(command) if is_clang else ("-fopenmp", *GCC_FLAGS)
    vector = vector_math(is_clang)
    return Toolchain(path, version, (*arguments, *BASE_FLAGS, *own, *vector, *config.cxx_flags))


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError("cpu", command, str(error)) from error


def compile_shared(toolchain: Toolchain, files: dict[str, str], main: str) -> bytes:
    """The shared object built from `main` (other files lie beside it).

    Raises CompilerError with the compiler's first messages.
    """
    with tempfile.TemporaryDirectory(prefix="dicp-") as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        output = Path(folder, "unit.so")
        command = [toolchain.compiler, *toolchain.flags, main, "-o", str(output), "-lm"]
        result = _run(command, folder)
        if "internal compiler error" in result.stderr:
            result = _run([*command, *CAUTIOUS_FLAGS], folder)
        if result.returncode != 0 or not output.exists():
            comments = [x[3:] for x in files[main].splitlines() if x.startswith("// ")]
            raise CompilerError("cpu", command, result.stderr, comments)
        return output.read_bytes()
