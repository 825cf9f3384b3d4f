"""Where HLIR comes from: an installed TopsRider, or the simulator's own headers and library."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dicp import toolchain as host
from dicp.cache import Cache, key_of
from dicp.config import Config, vendor_variable
from dicp.errors import SimulatorForbiddenError
from dicp.graphop.sdk_toolchain import Linking, compile_linked, load_built
from dicp.graphop.simulator import with_header

FOLDER = Path(__file__).parent
INCLUDES = FOLDER / "simulator" / "include"
TARGET = "tops"
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-O0", "-g0", "-w")
SIMULATOR_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables",
                   "-Dbuilder=dicp_simulated_builder",
                   "-Dhlir=dicp_simulated_hlir")  # fmt: skip
"""Half of a long graph's compile time goes into cleaning up after exceptions. The simulator's
builder has a name of its own, and is never taken for TopsRider's."""
DRIVER = ("dicp_call", "dicp_log", "dicp_devices", "dicp_build", "dicp_load", "dicp_sizes",
          "dicp_unload", "dicp_run")  # fmt: skip
"""What the driver defines."""
DEFAULT_ROOTS = ("/usr", "/usr/local", "/opt/tops")
PREFIXES = ("dtu", "gcu")
"""The folder of the headers, which newer versions call differently."""
LIBRARY = "dtu_sdk"


@dataclass(frozen=True)
class Sdk:
    """A TopsRider installation."""

    root: Path
    prefix: str

    @property
    def library(self) -> Path:
        names = (self.root / folder / f"lib{LIBRARY}.so" for folder in ("lib", "lib64"))
        return next((name for name in names if name.is_file()), self.root / "lib")

    @property
    def identity(self) -> str:
        stat = self.library.stat()
        return f"TopsRider {self.library} {stat.st_size} {stat.st_mtime_ns}"


def roots() -> list[Path]:
    """Where a TopsRider is looked for."""
    named = vendor_variable("TOPS_HOME") or vendor_variable("TOPSRIDER_HOME")
    return [Path(named)] if named else [Path(root) for root in DEFAULT_ROOTS]


def locate_sdk() -> Sdk | None:
    """The installation with headers and library, or None."""
    for root in roots():
        for prefix in PREFIXES:
            header = root / "include" / prefix / "hlir_builder" / "hlir_builder.h"
            sdk = Sdk(root, prefix)
            if header.is_file() and sdk.library.is_file():
                return sdk
    return None


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler, and the TopsRider it compiles for; without one, the simulator."""

    compiler: tuple[str, ...]
    version: str
    sdk: Sdk | None

    @property
    def simulated(self) -> bool:
        return self.sdk is None

    @property
    def identity(self) -> str:
        """What the built objects depend on beside the source."""
        made = self.sdk.identity if self.sdk else f"simulator {simulator_identity()}"
        return f"{self.version} {' '.join((*FLAGS, *SIMULATOR_FLAGS))} {platform.machine()} {made}"


def find_toolchain(config: Config) -> Toolchain:
    """The compiler and the TopsRider that `config` allows.

    Raises ToolchainError, or SimulatorForbiddenError where `runs_on` is "device" and no TopsRider
    is installed.
    """
    compiler, version = host.find_compiler(TARGET, config.cxx)
    sdk = None if config.runs_on == "simulator" else locate_sdk()
    if sdk is None and config.runs_on == "device":
        looked = ", ".join(f"{root}/lib/lib{LIBRARY}.so" for root in roots())
        raise SimulatorForbiddenError(
            TARGET, f"Install TopsRider (looked for {looked}), or set TOPS_HOME to its folder"
        )
    return Toolchain((*compiler, *config.cxx_flags), version, sdk)


@lru_cache(maxsize=1)
def simulator_identity() -> str:
    """A digest of the simulator's headers and library and of the driver."""
    texts = [file.read_text() for file in sorted(INCLUDES.rglob("*.h"))]
    return key_of(texts, _driver_source(simulated=True))[:16]


def _driver_source(simulated: bool) -> str:
    """The driver; without TopsRider the simulator's library is part of it. All in one: half of the
    compile time goes into the standard library's headers."""
    own = [FOLDER / "simulator" / name for name in ("hlir.cpp", "runtime.cpp")] if simulated else []
    return with_header(FOLDER / "driver.cpp", *own)


def compile_shared(toolchain: Toolchain, source: str, **options: Any) -> bytes:
    """As `compile_linked`, of one source text for TopsRider or the simulator."""
    sdk = toolchain.sdk
    if sdk is None:
        linking = Linking((*FLAGS, *SIMULATOR_FLAGS), [INCLUDES])
    else:
        linking = Linking(FLAGS, [sdk.root / "include"], sdk.library.parent, [LIBRARY])
        source = source.replace(f'#include "{PREFIXES[0]}/', f'#include "{sdk.prefix}/')
    return compile_linked(TARGET, toolchain, linking, [source], **options)


def load_driver(toolchain: Toolchain, cache: Cache) -> ctypes.CDLL:
    """The driver, built once per toolchain."""
    source, flags = _driver_source(toolchain.simulated), ("-Wl,-Bsymbolic",)
    build = partial(compile_shared, toolchain, source, flags=flags, symbols=DRIVER)
    return load_built(TARGET, toolchain, cache, source, DRIVER, build)
