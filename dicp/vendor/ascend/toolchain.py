"""Where GE comes from: an installed CANN, or the simulator's own headers and library."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.errors import (
    CompilerError,
    SimulatorForbiddenError,
    SimulatorWarning,
    ToolchainError,
)
from dicp.vendor.ascend.installation import Cann, checked, device_count, locate_cann

FOLDER = Path(__file__).parent
INCLUDES = FOLDER / "simulator" / "include"
COMPILERS = ("g++", "clang++")
TIMEOUT_SECONDS = 600
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-O0", "-g0", "-w", "-D_GLIBCXX_USE_CXX11_ABI=0")
SIMULATOR_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables")
"""Half of a long graph's compile time goes into cleaning up after exceptions."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler, and the CANN it compiles for; without one, the simulator."""

    compiler: tuple[str, ...]
    version: str
    cann: Cann | None

    @property
    def simulated(self) -> bool:
        return self.cann is None

    @property
    def identity(self) -> str:
        """What the built objects depend on beside the source."""
        ge = f"CANN {self.cann.version}" if self.cann else f"simulator {simulator_identity()}"
        return f"{self.version} {' '.join((*FLAGS, *SIMULATOR_FLAGS))} {platform.machine()} {ge}"


def find_toolchain(config: Config) -> Toolchain:
    """The compiler and the CANN that `config` allows: "auto" means a device that answers.

    Raises ToolchainError, or SimulatorForbiddenError where `runs_on` is "device" and no CANN is
    installed.
    """
    compiler, version = _locate(config.cxx)
    cann = None if config.runs_on == "simulator" else locate_cann()
    if cann is None and config.runs_on == "device":
        raise SimulatorForbiddenError(
            "ascend", "Install CANN, or set ASCEND_HOME_PATH to the folder it is installed in"
        )
    if cann is not None and config.runs_on == "auto" and not _answers(cann):
        cann = None
    command = (*compiler, *config.cxx_flags)
    return Toolchain(command, version, cann if cann is None else checked(cann))


@lru_cache(maxsize=8)
def _answers(cann: Cann) -> bool:
    """Whether a device answers; warns where an installation has none."""
    count = device_count(cann)
    if isinstance(count, int) and count > 0:
        return True
    why = count if isinstance(count, str) else "aclrtGetDeviceCount finds none"
    warnings.warn(
        SimulatorWarning(
            f"CANN is in {cann.root}, but no device answers ({why}): dicp's "
            "simulator is used. `python -m dicp doctor` tells what is missing; runs_on='device' "
            "builds for CANN all the same."
        ),
        stacklevel=2,
    )
    return False


@lru_cache(maxsize=16)
def _locate(requested: str) -> tuple[tuple[str, ...], str]:
    """The command that starts the compiler, and its version."""
    for name in (requested,) if requested else COMPILERS:
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
        raise ToolchainError("ascend", name, detail, "Reinstall the compiler.")
    raise ToolchainError(
        "ascend",
        "a C++ compiler",
        f"none of {', '.join((requested,) if requested else COMPILERS)} is on the PATH",
        "Install g++ (Debian: apt install g++), or name a compiler in DICP_CXX.",
    )


@lru_cache(maxsize=1)
def simulator_identity() -> str:
    """A digest of the simulator's headers, library and driver."""
    texts = [file.read_text() for file in sorted(INCLUDES.rglob("*.h"))]
    return key_of(texts, _simulator_sources(), (FOLDER / "driver.cpp").read_text())[:16]


def _simulator_sources() -> list[str]:
    """The sources of the simulator's library, which take their common header in as text."""
    shared = (FOLDER / "simulator" / "callbacks.h").read_text()
    include = '#include "callbacks.h"'
    texts = [(FOLDER / "simulator" / name).read_text() for name in ("ge.cpp", "acl.cpp")]
    return [text.replace(include, shared) for text in texts]


# ---- compiling -----------------------------------------------------------------------------------


def compile_shared(toolchain: Toolchain, *sources: str, flags: tuple[str, ...] = ()) -> bytes:
    """The shared object built from source texts. Raises CompilerError."""
    with tempfile.TemporaryDirectory(prefix="dicp-") as folder:
        names = [f"unit{k}.cpp" for k in range(len(sources))]
        for name, source in zip(names, sources, strict=True):
            Path(folder, name).write_text(source)
        includes = toolchain.cann.includes if toolchain.cann is not None else (INCLUDES,)
        command = [
            *toolchain.compiler, *FLAGS, *(SIMULATOR_FLAGS if toolchain.simulated else ()), *flags,
            *(f"-I{path}" for path in includes), *names,
            "-o", "unit.so",
        ]  # fmt: skip
        if toolchain.cann is not None:
            libraries = toolchain.cann.libraries
            command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
            command += [f"-l{name}" for name in toolchain.cann.linked]
        try:
            result = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False,
                timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerError("ascend", command, str(error)) from error
        output = Path(folder, "unit.so")
        if result.returncode != 0 or not output.exists():
            lines = [line for source in sources for line in source.splitlines()]
            comments = [line.strip()[3:] for line in lines if line.startswith("  // ")]
            raise CompilerError("ascend", command, result.stderr, comments)
        return output.read_bytes()


def load_driver(toolchain: Toolchain, cache: Cache) -> ctypes.CDLL:
    """The driver, built once per toolchain; without CANN the simulator's library is part of it.

    Several may be loaded: each keeps to its own simulator, by -Bsymbolic.
    """
    sources = [(FOLDER / "driver.cpp").read_text()]
    if toolchain.simulated:
        sources += _simulator_sources()
    entry = cache.get_or_build(
        "unit",
        key_of("driver", sources, toolchain.identity),
        lambda: {"unit.so": compile_shared(toolchain, *sources, flags=("-O1", "-Wl,-Bsymbolic"))},
    )
    return ctypes.CDLL(str(entry.path("unit.so")), mode=os.RTLD_GLOBAL)
