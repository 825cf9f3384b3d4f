"""Translation units of MACA C++: their text, their headers, and building what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

from dicp.cache import Cache, Entry, key_of
from dicp.codegen.spelling import SCALAR_HEADER, header_text
from dicp.errors import CompilerError
from dicp.template import render_template
from dicp.toolchain import OUTPUT
from dicp.vendor.maca.thresholds import SMALL_UNIT

FOLDER = Path(__file__).parent
TARGET = "maca"
UNIT = "unit.maca"
HEADERS = ("device.h", "shim.h", "checked.h", "gpu.h", "compat.h", "native.h")

Comments = Mapping[str, Sequence[str]]
"""Kernel name -> what it computes: operator, graph node, user line."""


class Compiler(Protocol):
    """A compiler with its flags."""

    @property
    def identity(self) -> str:
        """Everything besides the text that its output depends on."""

    def compile(self, text: str, names: Sequence[str]) -> bytes:
        """The unit with the kernels `names`. Raises CompilerError and ToolchainError."""


@dataclass
class Units:
    """The units that one compiler builds."""

    compiler: Compiler
    cache: Cache
    jobs: int
    entries: dict[str, Entry] = field(default_factory=dict)
    """Key -> unit found or built here: the entry in the cache may disappear at any time."""

    def build(self, bodies: Mapping[str, str], comments: Comments) -> dict[str, str]:
        """Kernel name -> key of the unit that holds it; compiles only what the cache lacks."""
        units = {n: key for n, body in bodies.items() if (key := self._known(n, body))}
        missing = {n: body for n, body in bodies.items() if n not in units}
        parts = _parts(missing, self.jobs)
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            keys = list(pool.map(partial(self._compile, comments), parts))
        for part, key in zip(parts, keys, strict=True):
            units |= dict.fromkeys(part, key)
        return units

    def content(self, key: str) -> bytes:
        return self.entries[key].read(OUTPUT)

    def _kernel_key(self, name: str, body: str) -> str:
        return key_of(name, body, self.compiler.identity)

    def _known(self, name: str, body: str) -> str:
        """The key of the unit in the cache that holds a kernel; empty if there is none."""
        entry = self.cache.get("kernel", self._kernel_key(name, body))
        key = entry.read("unit").decode() if entry is not None else ""
        unit = self.cache.get("unit", key) if key else None
        if unit is None:
            return ""
        self.entries[key] = unit
        return key

    def _compile(self, comments: Comments, bodies: Mapping[str, str]) -> str:
        key = key_of(sorted(bodies.items()), self.compiler.identity)
        text = unit_text(bodies, comments)

        def build() -> dict[str, bytes]:
            try:
                content = self.compiler.compile(text, list(bodies))
            except CompilerError as error:
                sources = _refused(text, error.diagnostics, comments)
                raise CompilerError(TARGET, error.command, error.diagnostics, sources) from None
            return {OUTPUT: content, UNIT: text.encode()}

        self.entries[key] = self.cache.get_or_build("unit", key, build)
        for name, body in bodies.items():
            self.cache.put("kernel", self._kernel_key(name, body), {"unit": key.encode()})
        return key


def unit_text(bodies: Mapping[str, str], comments: Comments) -> str:
    """Kernel name -> body as one unit, each below comments that list the operators it computes."""
    return render_template(FOLDER / "unit.maca.jinja", kernels=bodies, comments=comments)


def _refused(text: str, diagnostics: str, comments: Comments) -> list[str]:
    """The kernel that the first error with a line is in, and what it computes; else all kernels."""
    line = re.search(rf"\b{UNIT}[:(](\d+)\b.*\berror\b", diagnostics)
    above = "\n".join(text.splitlines()[: int(line[1])]) if line else ""
    names = re.findall(r"^#define KERNEL (\w+)$", above, re.MULTILINE)[-1:] or list(comments)
    return [part for name in names for part in (f"kernel {name}", *comments.get(name, ()))]


@lru_cache(maxsize=1)
def header_texts() -> dict[str, str]:
    """The files a unit includes, by name."""
    own = {name: (FOLDER / name).read_text() for name in HEADERS}
    return {**own, SCALAR_HEADER: header_text()}


def _parts(bodies: Mapping[str, str], jobs: int) -> list[dict[str, str]]:
    """Kernels in at most `jobs` units of about equal text, none of them small."""
    total = sum(map(len, bodies.values()))
    parts: list[dict[str, str]] = [{} for _ in range(max(1, min(jobs, total // SMALL_UNIT)))]
    for name, body in sorted(bodies.items(), key=lambda item: -len(item[1])):
        min(parts, key=lambda part: sum(map(len, part.values())))[name] = body
    return [part for part in parts if part]
