"""Kernels on CPU tensors: the same source, built by the host's compiler with the emulation of a GPU
in `shim.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from dicp import toolchain as host
from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.loop.runtime.device import Native
from dicp.loop.runtime.native import Libraries, NativeLibrary
from dicp.loop.target import KernelSources
from dicp.vendor.maca.units import header_texts, unit_text

FLAGS = (
    "-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-fwrapv", "-fno-math-errno", "-fno-exceptions",
    "-fno-rtti", "-fno-asynchronous-unwind-tables", "-ffp-contract=off", "-x", "c++",
)  # fmt: skip
SMALL_UNIT = 6_000
"""Characters of kernel text below which a second compiler run costs more than it saves."""
TARGET = "maca"
RUN = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
"""Type of `dicp_run`, which launches the kernels of a segment."""


@dataclass
class HostUnits:
    """The units that one compiler builds with one set of flags."""

    command: tuple[str, ...]
    version: str
    cache: Cache
    jobs: int
    entries: dict[str, Entry] = field(default_factory=dict)
    """Key -> unit found or built here: the entry in the cache may disappear at any time."""

    @classmethod
    def open(cls, config: Config, cache: Cache, checked: bool = False) -> HostUnits:
        """Raises ToolchainError where there is no compiler."""
        command, version = host.find_compiler(TARGET, config.cxx)
        wave = f"-DD_WAVE={config.vendor['wave']}"
        flags = (*FLAGS, wave, *(["-DD_CHECKED"] if config.vendor["checked"] else []))
        return cls((*command, *flags), version, cache, config.jobs)

    @property
    def identity(self) -> str:
        return key_of(self.version, *self.command, *header_texts().values())

    def build(self, sources: KernelSources) -> dict[str, str]:
        """Kernel name -> key of the unit that holds it; compiles only what the cache lacks."""
        units = {n: key for n, body in sources.texts.items() if (key := self._known(n, body))}
        missing = {n: body for n, body in sources.texts.items() if n not in units}
        with ThreadPoolExecutor(max(1, self.jobs)) as pool:
            parts = _parts(missing, self.jobs)
            keys = list(pool.map(partial(self._compile, sources.comments()), parts))
        for part, key in zip(parts, keys, strict=True):
            units |= dict.fromkeys(part, key)
        return units

    def _known(self, name: str, body: str) -> str:
        """The key of the unit in the cache that holds a kernel; empty if there is none."""
        entry = self.cache.get("kernel", key_of(name, body, self.identity))
        key = entry.read("unit").decode() if entry is not None else ""
        unit = self.cache.get("unit", key) if key else None
        if unit is None:
            return ""
        self.entries[key] = unit
        return key

    def _compile(self, comments: Mapping[str, Sequence[str]], bodies: Mapping[str, str]) -> str:
        key = key_of(sorted(bodies.items()), self.identity)
        text = unit_text(bodies, comments)

        def build() -> dict[str, bytes]:
            files = {"unit.maca": text, **header_texts()}
            lines = [line for name in bodies for line in comments.get(name, ())]
            command = [*self.command, "unit.maca", "-o", host.OUTPUT, "-lm"]
            shared = host.compile_shared(TARGET, command, files, symbols(bodies), sources=lines)
            return {host.OUTPUT: shared, "unit.maca": text.encode()}

        self.entries[key] = self.cache.get_or_build("unit", key, build)
        for name, body in bodies.items():
            self.cache.put("kernel", key_of(name, body, self.identity), {"unit": key.encode()})
        return key


def symbols(names: Mapping[str, str] | Sequence[str]) -> list[str]:
    """What a unit with these kernels defines."""
    return [*(f"{name}_run" for name in names), "dicp_run"]


class Simulator:
    """Loads units and makes their kernels a runtime."""

    def __init__(self) -> None:
        self._libraries = Libraries()

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> Native:
        units, found = dict(sources.units), lambda key: cache.get("unit", key)
        libraries = self._loaded(units, found)
        if set(units.values()) - libraries.keys():
            # Units were removed from the cache after the program was stored.
            made = HostUnits.open(config, cache)
            units = made.build(sources)
            libraries = self._loaded(units, made.entries.__getitem__)
        functions = {name: libraries[key].address(f"{name}_run") for name, key in units.items()}
        first = next(iter(libraries.values()), None)
        run = RUN(first.address("dicp_run")) if first is not None else RUN()
        return Native(functions, run, tuple(libraries.values()))

    def _loaded(
        self, units: Mapping[str, str], entry_of: Callable[[str], Entry | None]
    ) -> dict[str, NativeLibrary]:
        """Unit key -> its library, loaded before or now; units without an entry are missing."""
        found: dict[str, NativeLibrary] = {}
        for key in dict.fromkeys(units.values()):
            entry = entry_of(key) if self._libraries.find(key) is None else None
            names = [name for name in units if units[name] == key]
            library = self._libraries.find(key)
            if library is None and entry is not None:
                open_it = partial(host.load_library, TARGET, entry, symbols(names))
                library = self._libraries.load(key, open_it)
            if library is not None:
                found[key] = library
        return found


def _parts(bodies: Mapping[str, str], jobs: int) -> list[dict[str, str]]:
    """Kernels in at most `jobs` units of about equal text, none of them small."""
    total = sum(map(len, bodies.values()))
    parts: list[dict[str, str]] = [{} for _ in range(max(1, min(jobs, total // SMALL_UNIT)))]
    for name, body in sorted(bodies.items(), key=lambda item: -len(item[1])):
        smallest = min(parts, key=lambda part: sum(map(len, part.values())))
        smallest[name] = body
    return [part for part in parts if part]
