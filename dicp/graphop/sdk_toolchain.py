"""C++ sources built for a vendor's SDK or for its simulator: graphs, and the driver library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dicp import toolchain as host
from dicp.cache import Cache, key_of
from dicp.graphop.simulator import HEADER_FLAGS, Headers
from dicp.origin import Origin


class SdkToolchain(Protocol):
    """A C++ compiler, and the SDK it compiles for or the simulator."""

    @property
    def compiler(self) -> tuple[str, ...]: ...

    @property
    def version(self) -> str: ...

    @property
    def simulated(self) -> bool: ...

    @property
    def identity(self) -> str: ...


@dataclass(frozen=True)
class Linking:
    """What sources are compiled and linked with; without `folder` no library, for a simulator."""

    flags: tuple[str, ...]
    includes: Sequence[Path]
    folder: Path | None = None
    libraries: Sequence[str] = ()


def compile_linked(
    target: str, toolchain: SdkToolchain, linking: Linking, sources: Sequence[str],
    flags: tuple[str, ...] = (), symbols: Collection[str] = (),
    headers: tuple[Headers, Cache] | None = None, origins: Sequence[Origin] = (),
) -> bytes:  # fmt: skip
    """The shared object built from source texts, which defines `symbols`; for the simulator with
    `headers` parsed.

    Raises CompilerError and ToolchainError.
    """
    files: dict[str, str | bytes] = {f"unit{k}.cpp": text for k, text in enumerate(sources)}
    units = tuple(files)
    includes = (f"-I{path}" for path in linking.includes)
    command = (*toolchain.compiler, *linking.flags, *flags, *includes)
    if toolchain.simulated and headers is not None:
        parsed, cache = headers
        files |= parsed.files(command, sources[0], toolchain.identity, cache)
        command += HEADER_FLAGS
    command += (*units, "-o", host.OUTPUT)
    if linking.folder is not None:
        libraries = (f"-l{name}" for name in linking.libraries)
        command += (f"-L{linking.folder}", f"-Wl,-rpath,{linking.folder}", *libraries)
    return host.compile_shared(target, command, files, symbols, sources=[*map(str, origins)])


def load_built(
    target: str, toolchain: SdkToolchain, cache: Cache, sources: object,
    symbols: Collection[str], build: Callable[[], bytes],
) -> ctypes.CDLL:  # fmt: skip
    """The driver that `build` makes of `sources`, built once per toolchain."""
    key = key_of("driver", sources, toolchain.identity)
    entry = cache.get_or_build("unit", key, lambda: {host.OUTPUT: build()})
    return host.load_library(target, entry, symbols, mode=os.RTLD_GLOBAL)
