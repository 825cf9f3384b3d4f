"""Where GE comes from: an installed CANN, or the simulator's own headers and library."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dicp import toolchain as host
from dicp.cache import Cache, key_of
from dicp.config import Config, vendor_variable
from dicp.errors import SimulatorForbiddenError, ToolchainError
from dicp.graphop.prototype import Port, Prototype
from dicp.vendor.ascend.prototypes import PROTOTYPES

FOLDER = Path(__file__).parent
INCLUDES = FOLDER / "simulator" / "include"
OLDEST_CANN = (7, 0)
DEFAULT_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
TARGET = "ascend"
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-O0", "-g0", "-w", "-D_GLIBCXX_USE_CXX11_ABI=0")
SIMULATOR_FLAGS = ("-fno-exceptions", "-fno-asynchronous-unwind-tables")
"""Half of a long graph's compile time goes into cleaning up after exceptions."""
DRIVER = ("dicp_open", "dicp_soc", "dicp_message", "dicp_build", "dicp_load", "dicp_unload",
          "dicp_run")  # fmt: skip
"""What the driver defines."""
LIBRARIES = ("-lge_compiler", "-lge_runner", "-lgraph", "-lascendcl")


@dataclass(frozen=True)
class Cann:
    """A CANN installation."""

    root: Path
    version: str

    @property
    def includes(self) -> tuple[Path, ...]:
        return (self.root / "include", self.root / "opp" / "built-in" / "op_proto" / "inc")

    @property
    def libraries(self) -> Path:
        return self.root / "lib64"


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
    """The compiler and the CANN that `config` allows.

    Raises ToolchainError, or SimulatorForbiddenError where `runs_on` is "device" and no CANN is
    installed.
    """
    compiler, version = host.find_compiler(TARGET, config.cxx)
    cann = None if config.runs_on == "simulator" else find_cann()
    if cann is None and config.runs_on == "device":
        raise SimulatorForbiddenError(
            "ascend", "Install CANN, or set ASCEND_HOME_PATH to the folder it is installed in"
        )
    return Toolchain((*compiler, *config.cxx_flags), version, cann)


def find_cann() -> Cann | None:
    """The installation that CANN's own variable names, else one in a usual place; or None.

    Raises ToolchainError for one that is incomplete or too old.
    """
    named = vendor_variable("ASCEND_HOME_PATH") or vendor_variable("ASCEND_TOOLKIT_HOME")
    roots = [Path(named)] if named else [Path(root) for root in DEFAULT_ROOTS]
    root = next((root for root in roots if (root / "include").is_dir()), None)
    if root is None:
        return None
    version = _cann_version(root)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_CANN:
        wanted = ".".join(map(str, OLDEST_CANN))
        raise ToolchainError(
            "ascend", f"CANN {wanted} or newer", f"{root} holds version {version}",
            f"Install CANN {wanted} or newer, or set runs_on='simulator'.",
        )  # fmt: skip
    return Cann(root, version)


def _cann_version(root: Path) -> str:
    for name in ("version.cfg", "version.info", "compiler/version.info"):
        file = root / name
        if file.is_file():
            found = re.search(r"(?:Version|version)[^\d\n]*([\d.]+\w*)", file.read_text())
            if found:
                return found[1]
    raise ToolchainError(
        "ascend", "CANN", f"{root} has no file that tells its version",
        "Reinstall CANN, or set runs_on='simulator'.",
    )  # fmt: skip


# ---- headers of the simulator --------------------------------------------------------------------

_CPP_TYPES = {
    "Int": "int64_t", "Float": "float", "Bool": "bool", "String": "const char*",
    "ListInt": "const std::vector<int64_t>&", "ListFloat": "const std::vector<float>&",
    "Type": "DataType", "Tensor": "const Tensor&",
}  # fmt: skip
_LEAVES = (
    "GE_OPERATOR(Data) GE_INPUT(x) GE_OUTPUT(y) GE_ATTR(index, int64_t) GE_END",
    "GE_OPERATOR(RefData) GE_INPUT(x) GE_OUTPUT(y) GE_ATTR(index, int64_t) GE_END",
    "GE_OPERATOR(Const) GE_OUTPUT(y) GE_ATTR(value, const Tensor&) GE_END",
)


@lru_cache(maxsize=1)
def operator_headers() -> dict[str, str]:
    """CANN's per-operator headers for the operators in the prototype table, by file name."""
    groups: dict[str, list[str]] = {"array_ops.h": list(_LEAVES)}
    for prototype in PROTOTYPES.values():
        groups.setdefault(prototype.group, []).append(_declaration(prototype))
    return {
        name: "\n".join(
            ["#pragma once", '#include "graph/operator_reg.h"', "namespace ge {", "namespace op {",
             *rows, "}  // namespace op", "}  // namespace ge", ""]
        )
        for name, rows in groups.items()
    }  # fmt: skip


def _declaration(prototype: Prototype) -> str:
    def port(kind: str, p: Port) -> str:
        return f"{'GE_DYNAMIC_' if p.arity == 'many' else 'GE_'}{kind}({p.name})"

    parts = [f"GE_OPERATOR({prototype.kind})"]
    parts += [port("INPUT", p) for p in prototype.inputs]
    parts += [port("OUTPUT", p) for p in prototype.outputs]
    parts += [f"GE_ATTR({a.name}, {_CPP_TYPES[a.type]})" for a in prototype.attrs]
    return " ".join([*parts, "GE_END"])


@lru_cache(maxsize=1)
def simulator_identity() -> str:
    """A digest of the simulator's headers, library and driver."""
    files = sorted(INCLUDES.rglob("*.h"))
    texts = [f.read_text() for f in (*files, FOLDER / "simulator" / "library.cpp")]
    return key_of(texts, operator_headers(), (FOLDER / "driver.cpp").read_text())[:16]


# ---- compiling -----------------------------------------------------------------------------------


def compile_shared(
    toolchain: Toolchain, *sources: str, flags: tuple[str, ...] = (), symbols: Collection[str] = ()
) -> bytes:
    """The shared object built from source texts, which defines `symbols`.

    Raises CompilerError and ToolchainError.
    """
    files = {f"unit{k}.cpp": source for k, source in enumerate(sources)}
    includes, headers = _includes(toolchain, sources)
    command = [
        *toolchain.compiler, *FLAGS, *(SIMULATOR_FLAGS if toolchain.simulated else ()), *flags,
        *(f"-I{path}" for path in includes), *files, "-o", host.OUTPUT,
    ]  # fmt: skip
    if toolchain.cann is not None:
        libraries = toolchain.cann.libraries
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *LIBRARIES]
    lines = [line for source in sources for line in source.splitlines()]
    comments = [line.strip()[3:] for line in lines if line.startswith("  // ")]
    return host.compile_shared(TARGET, command, {**files, **headers}, symbols, sources=comments)


def _includes(
    toolchain: Toolchain, sources: Sequence[str]
) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Folders with headers, and headers that are to lie beside the sources."""
    if toolchain.cann is not None:
        return toolchain.cann.includes, {}
    names = re.findall(r'#include "(\w+\.h)"', "\n".join(sources))
    known = operator_headers()
    return (Path(), INCLUDES), {name: known[name] for name in names if name in known}


def load_driver(toolchain: Toolchain, cache: Cache) -> ctypes.CDLL:
    """The driver, built once per toolchain; without CANN the simulator's library is part of it.

    Several may be loaded: each keeps to its own simulator, by -Bsymbolic.
    """
    sources = [(FOLDER / "driver.cpp").read_text()]
    if toolchain.simulated:
        sources.append((FOLDER / "simulator" / "library.cpp").read_text())
    flags = ("-O1", "-Wl,-Bsymbolic")
    entry = cache.get_or_build(
        "unit",
        key_of("driver", sources, toolchain.identity),
        lambda: {host.OUTPUT: compile_shared(toolchain, *sources, flags=flags, symbols=DRIVER)},
    )
    return host.load_library(TARGET, entry, DRIVER, mode=os.RTLD_GLOBAL)


def doctor_lines(config: Config) -> Mapping[str, str]:
    """What was found, by what it is."""
    toolchain = find_toolchain(config)
    cann = toolchain.cann
    return {
        "compiler": f"{shlex.join(toolchain.compiler)}: {toolchain.version}",
        "CANN": f"{cann.version} in {cann.root}" if cann else "none: the simulator runs",
    }
