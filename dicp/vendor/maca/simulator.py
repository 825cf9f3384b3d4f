"""Kernels on CPU tensors: the same source, built by the host's compiler with the emulation of a GPU
in `shim.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dicp import toolchain as host
from dicp.cache import Cache, Entry, key_of
from dicp.config import BOOLEAN, COUNT, Config, vendor_option
from dicp.errors import LaunchError
from dicp.loop.runtime.device import Native
from dicp.loop.runtime.native import Libraries, NativeLibrary
from dicp.loop.target import KernelSources
from dicp.vendor.maca.facts import GPU
from dicp.vendor.maca.units import TARGET, UNIT, Units, header_texts

FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-w", "-fwrapv", "-fno-math-errno", "-fno-exceptions",
    "-fno-rtti", "-fno-asynchronous-unwind-tables", "-ffp-contract=off", "-x", "c++",
)  # fmt: skip
OPTIONS = (
    vendor_option("maca_checked", BOOLEAN, "DICP_MACA_CHECKED",
                  "whether the emulation looks for data races and for lanes past a wave",
                  default=False),
    vendor_option("maca_wave", COUNT, "DICP_MACA_WAVE", "lanes of the emulation's waves: 64 or 32",
                  default=GPU.lanes),
)  # fmt: skip
RUN = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
"""Type of `dicp_run`, which launches the kernels of a segment."""


@dataclass(frozen=True)
class HostCompiler:
    """The host's compiler; units define a function `.._run` for each kernel, and `dicp_run`."""

    command: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        return key_of(self.version, *self.command, *header_texts().values())

    def compile(self, text: str, names: Sequence[str]) -> bytes:
        command = [*self.command, UNIT, "-o", host.OUTPUT, "-lm"]
        files = {UNIT: text, **header_texts()}
        return host.compile_shared(TARGET, command, files, symbols(names))


def host_compiler(config: Config) -> HostCompiler:
    """Raises ToolchainError where there is none."""
    command, version = host.find_compiler(TARGET, config.cxx)
    defines = [f"-DD_WAVE={config.vendor['maca_wave']}"]
    defines += ["-DD_CHECKED"] if config.vendor["maca_checked"] else []
    return HostCompiler((*command, *FLAGS, *defines), version)


def symbols(names: Sequence[str]) -> list[str]:
    """What a unit with these kernels defines."""
    return [*(f"{name}_run" for name in names), "dicp_run"]


ERRORS = {
    16: "threads of a wave or block wait at different barriers or exchanges",
    17: "a thread has ended before a barrier or exchange that others of its wave or block wait at",
    18: "thread {1} accesses element {2} of {3} in shared memory",
    19: "a race: thread {1} accesses element {2} of an array in shared memory that another thread "
    "accesses between the same barriers",
    20: "a race: thread {2} of block {1} and another access an element of global memory unordered",
    21: "an exchange with lane {2} of a wave of {3}",
    22: "a block of {2} threads; the most are {3}",
}
"""What the emulation finds wrong: the first element of `status` -> a text about all of them."""


class _Segment:
    """Consecutive kernels; what the emulation finds wrong is an error."""

    def __init__(self, native: Any, launches: Sequence[Mapping[str, Any]], status: Any) -> None:
        self.native = native
        self.launches = launches
        self.status = status

    def run(self) -> int:
        return self._checked(self.native.run())

    def run_one(self, position: int) -> int:
        return self._checked(self.native.run_one(position), position)

    def _checked(self, stopped: int, first: int = 0) -> int:
        if stopped and self.status[0] in ERRORS:
            step = self.launches[first + stopped - 1]
            reason = ERRORS[self.status[0]].format(*self.status)
            self.status[0] = 0
            raise LaunchError(TARGET, step["kernel"], reason, tuple(map(str, step["origins"])))
        return first + stopped if stopped else 0


@dataclass(frozen=True)
class Emulated:
    """The emulation's loaded kernels."""

    native: Native

    def segment(
        self, launches: Sequence[Mapping[str, Any]], symbols: Mapping[str, int], table: Any,
        status: Any,
    ) -> _Segment:  # fmt: skip
        return _Segment(self.native.segment(launches, symbols, table, status), launches, status)


class Simulator:
    """Loads units and makes their kernels a runtime."""

    def __init__(self) -> None:
        self._libraries = Libraries()

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> Emulated:
        units, found = dict(sources.units), lambda key: cache.get("unit", key)
        libraries = self._loaded(units, found)
        if set(units.values()) - libraries.keys():
            # Units were removed from the cache after the program was stored.
            made = Units(host_compiler(config), cache, config.jobs)
            units = made.build(sources.texts, sources.comments())
            libraries = self._loaded(units, made.entries.__getitem__)
        functions = {name: libraries[key].address(f"{name}_run") for name, key in units.items()}
        first = next(iter(libraries.values()), None)
        run = RUN(first.address("dicp_run")) if first is not None else RUN()
        return Emulated(Native(functions, run, tuple(libraries.values())))

    def _loaded(
        self, units: Mapping[str, str], entry_of: Callable[[str], Entry | None]
    ) -> dict[str, NativeLibrary]:
        """Unit key -> its library, loaded before or now; units without an entry are missing."""
        found: dict[str, NativeLibrary] = {}
        for key in dict.fromkeys(units.values()):
            library = self._libraries.find(key)
            entry = entry_of(key) if library is None else None
            if entry is not None:
                names = [name for name in units if units[name] == key]
                open_it = partial(host.load_library, TARGET, entry, symbols(names))
                library = self._libraries.load(key, open_it)
            if library is not None:
                found[key] = library
        return found
