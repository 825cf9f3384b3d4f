"""Where GE comes from: an installed CANN, or the simulator's own headers and library."""

from __future__ import annotations

import ctypes
import platform
import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dicp import toolchain as host
from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.errors import SimulatorForbiddenError, SimulatorWarning
from dicp.graphop.sdk_toolchain import Linking, compile_linked, load_built
from dicp.graphop.simulator import with_header
from dicp.vendor.ascend.installation import Cann, checked, device_count, locate_cann

FOLDER = Path(__file__).parent
INCLUDES = FOLDER / "simulator" / "include"
TARGET = "ascend"
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-O0", "-g0", "-w", "-D_GLIBCXX_USE_CXX11_ABI=0")
SIMULATOR_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables", "-Dge=dicp_simulated_ge")
"""Half of a long graph's compile time goes into cleaning up after exceptions. The simulator's GE
has a name of its own: in one process with CANN, neither is taken for the other."""
HIDDEN_ACL = """
#include <cstddef>
#include <cstdint>
#pragma GCC visibility push(hidden)
#include "acl/acl.h"
#pragma GCC visibility pop
"""
"""Before each source of the simulator's driver: its ACL is seen by itself alone."""
DRIVER = ("dicp_open", "dicp_soc", "dicp_message", "dicp_build", "dicp_load", "dicp_unload",
          "dicp_run")  # fmt: skip
"""What the driver defines."""


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler, and the CANN it compiles for; without one, the simulator."""

    compiler: tuple[str, ...]
    version: str
    cann: Cann | None
    declared: Cann | None = None
    """The installation whose operators graphs are made of; None: all that are known."""

    @property
    def simulated(self) -> bool:
        return self.cann is None

    @property
    def identity(self) -> str:
        """What the built objects depend on beside the source."""
        ge = f"CANN {self.cann.version}" if self.cann else f"simulator {simulator_identity()}"
        if self.declared is not None and self.cann is None:
            ge += f" with the operators of {self.declared.root}"
        return f"{self.version} {' '.join((*FLAGS, *SIMULATOR_FLAGS))} {platform.machine()} {ge}"


def find_toolchain(config: Config) -> Toolchain:
    """The compiler and the CANN that `config` allows: "auto" means a device that answers. Where
    none does, the simulator is given the graphs that the installation would be given.

    Raises ToolchainError, or SimulatorForbiddenError where `runs_on` is "device" and no CANN is
    installed.
    """
    compiler, version = host.find_compiler(TARGET, config.cxx)
    cann = None if config.runs_on == "simulator" else locate_cann()
    if cann is None and config.runs_on == "device":
        raise SimulatorForbiddenError(
            "ascend", "Install CANN, or set ASCEND_HOME_PATH to the folder it is installed in"
        )
    command = (*compiler, *config.cxx_flags)
    if cann is None:
        return Toolchain(command, version, None)
    if config.runs_on == "auto" and not _answers(cann):
        return Toolchain(command, version, None, cann)
    cann = checked(cann)
    return Toolchain(command, version, cann, cann)


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


@lru_cache(maxsize=1)
def simulator_identity() -> str:
    """A digest of the simulator's headers, library and driver."""
    texts = [file.read_text() for file in sorted(INCLUDES.rglob("*.h"))]
    return key_of(texts, _simulator_sources(), (FOLDER / "driver.cpp").read_text())[:16]


def _simulator_sources() -> list[str]:
    """The sources of the simulator's library."""
    return [with_header(FOLDER / "simulator" / name) for name in ("ge.cpp", "acl.cpp")]


# ---- compiling -----------------------------------------------------------------------------------


def compile_shared(toolchain: Toolchain, *sources: str, **options: Any) -> bytes:
    """As `compile_linked`, for CANN or the simulator."""
    cann = toolchain.cann
    linking = (
        Linking((*FLAGS, *SIMULATOR_FLAGS), [INCLUDES]) if cann is None
        else Linking(FLAGS, cann.includes, cann.libraries, cann.linked)
    )  # fmt: skip
    return compile_linked(TARGET, toolchain, linking, sources, **options)


def load_driver(toolchain: Toolchain, cache: Cache) -> ctypes.CDLL:
    """The driver, built once per toolchain; without CANN the simulator's library is part of it.

    Several may be loaded: each keeps to its own simulator, by -Bsymbolic.
    """
    sources = [(FOLDER / "driver.cpp").read_text()]
    if toolchain.simulated:
        sources = [HIDDEN_ACL + source for source in (*sources, *_simulator_sources())]
    flags = ("-O1", "-Wl,-Bsymbolic")
    build = partial(compile_shared, toolchain, *sources, flags=flags, symbols=DRIVER)
    return load_built(TARGET, toolchain, cache, sources, DRIVER, build)
