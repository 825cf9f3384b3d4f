"""Translation units: which kernels are compiled together, under which key, and when.

A unit holds generated kernels or the routines of one group. Routines are the same for every model,
so their compilation may begin before a graph is lowered.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from dicp.cache import Cache, Entry, key_of
from dicp.codegen import spelling
from dicp.config import Config
from dicp.template import render_template
from dicp.vendor.cpu.routines import Group, group_of, headers, without_parts
from dicp.vendor.cpu.thresholds import UNIT_TEXT
from dicp.vendor.cpu.toolchain import Toolchain, compile_shared, find_toolchain

FOLDER = Path(__file__).parent
MAX_ARGS = 1024

Sources: TypeAlias = Mapping[str, Sequence[str]]
"""Kernel name -> the graph nodes it computes, for comments and messages."""
Begun: TypeAlias = dict[tuple[int, str], Future[None]]
"""(process id, key of a unit) -> its compilation, started before `build` needs it. A forked child
ignores its parent's compilations."""


@dataclass(frozen=True)
class Units:
    """The units of one toolchain in one cache."""

    toolchain: Toolchain
    cache: Cache
    jobs: int
    begun: Begun
    entries: dict[str, Entry] = field(default_factory=dict)
    """Key -> unit found or built here: the entry in the cache may disappear at any time."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the running compilers' results are no longer needed: it stops them."""

    @classmethod
    def open(cls, config: Config, cache: Cache, begun: Begun) -> Units:
        """Raises ToolchainError where there is no compiler."""
        return cls(find_toolchain(config), cache, config.jobs, begun)

    def begin(self, groups: Iterable[Group]) -> None:
        """Start compiling the driver and the routines of `groups` in the background, as far as the
        cache lacks them; `build` waits."""
        units = {self._driver_key: self._compile_driver}
        units |= {self._routines_key(g): partial(self._compile_routines, g) for g in groups}
        missing = {key: job for key, job in units.items() if self._is_new(key)}
        if not missing:
            return
        pool = ThreadPoolExecutor(self.jobs)
        for key, job in missing.items():
            self.begun[os.getpid(), key] = pool.submit(job)
        pool.shutdown(wait=False)

    def _is_new(self, key: str) -> bool:
        return (os.getpid(), key) not in self.begun and not self._has(key)

    def _has(self, key: str) -> bool:
        entry = self.cache.get("unit", key)
        if entry is not None:
            self.entries[key] = entry
        return entry is not None

    def build(self, texts: Mapping[str, str], sources: Sources) -> dict[str, str]:
        """Kernel name -> key of the unit that holds it; compiles only what the cache lacks."""
        found = {name: group for name in texts if (group := group_of(name))}
        whole = without_parts(found.values())
        groups = {name: whole[group] for name, group in found.items()}
        units = self._known({n: t for n, t in texts.items() if n not in groups})
        missing = {n: t for n, t in texts.items() if n not in units and n not in groups}
        parts = _balanced(missing, self.jobs)
        wanted = sorted(set(groups.values()))
        with ThreadPoolExecutor(self.jobs) as pool, self._stopping_on_error():
            keys = [pool.submit(self.kernels, part, sources) for part in parts]
            driver = pool.submit(self.driver)
            made = {group: pool.submit(self.routines, group) for group in wanted}
            for part, key in zip(parts, keys, strict=True):  # first: its errors name operators
                units |= dict.fromkeys(part, key.result())
            units["driver"] = driver.result()
            return units | {name: made[group].result() for name, group in groups.items()}

    @contextlib.contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        """On an interrupt or an error in one unit, stops the compilers of the others."""
        try:
            yield
        except BaseException:
            self.stop.set()
            raise

    def _known(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Name of a generated kernel that the cache holds -> key of its unit."""
        entries = {n: self.cache.get("kernel", self._kernel_key(n, t)) for n, t in texts.items()}
        keys = {n: e.read("unit").decode() for n, e in entries.items() if e is not None}
        held = {key for key in set(keys.values()) if self._has(key)}
        return {name: key for name, key in keys.items() if key in held}

    def kernels(self, texts: Mapping[str, str], sources: Sources) -> str:
        """The key of a unit of generated kernels, compiled if the cache lacks it."""
        key = key_of(sorted(texts.items()), self._identity)
        nodes = [node for name in texts for node in sources.get(name, ())]
        text = unit_text("prelude.h", texts, sources)
        self._compile(key, text, self.toolchain, texts, sources=nodes)
        for name, text in texts.items():
            self.cache.put("kernel", self._kernel_key(name, text), {"unit": key.encode()})
        return key

    def routines(self, group: Group) -> str:
        """The key of the unit of a group of routines, compiled if the cache lacks it."""
        key = self._routines_key(group)
        self._finish(key, partial(self._compile_routines, group))
        return key

    def driver(self) -> str:
        """The key of the unit that launches kernels one after another."""
        self._finish(self._driver_key, self._compile_driver)
        return self._driver_key

    def _finish(self, key: str, job: Callable[[], None]) -> None:
        """Waits for the unit `key` if it was begun, else runs the `job` that compiles it."""
        begun = self.begun.pop((os.getpid(), key), None)
        if begun is None or begun.cancel() or begun.exception() or not self._has(key):
            job()

    def _compile_routines(self, group: Group) -> None:
        text = unit_text(group.header, group.bodies(), {})
        toolchain = self.toolchain.with_flags(group.flags)
        self._compile(self._routines_key(group), text, toolchain, group.bodies())

    def _compile_driver(self) -> None:
        text = _driver_text()
        self._compile(self._driver_key, text, self.toolchain, ("dicp_run",), "driver.cpp")

    def _compile(
        self,
        key: str,
        text: str,
        toolchain: Toolchain,
        symbols: Collection[str],
        name: str = "unit.cpp",
        sources: Sequence[str] = (),
    ) -> None:
        def build() -> dict[str, bytes]:
            files = {name: text, **header_texts()}
            shared = compile_shared(toolchain, files, name, tuple(symbols), self.stop, sources)
            return {"unit.so": shared, name: text.encode()}

        self.entries[key] = self.cache.get_or_build("unit", key, build)

    def _routines_key(self, group: Group) -> str:
        bodies = sorted(group.bodies().items())
        return key_of(group.header, bodies, list(group.flags), self._identity)

    @cached_property
    def _driver_key(self) -> str:
        return key_of("driver", _driver_text(), self.toolchain.identity)

    def _kernel_key(self, name: str, text: str) -> str:
        return key_of(name, text, self._identity)

    @cached_property
    def _identity(self) -> str:
        return build_key(self.toolchain)


@lru_cache(maxsize=8)
def build_key(toolchain: Toolchain) -> str:
    """What every unit depends on besides its text: compiler, flags, headers."""
    return key_of(toolchain.identity, *header_texts().values())


REMAINDER = re.compile(r"\bd_(fmod|remainder|floor_div)\(")
"""Calls for which a unit needs the vectors of remainders in prelude.h."""


def unit_text(header: str, bodies: Mapping[str, str], sources: Sources) -> str:
    """The C++ of a unit: kernel name -> body, with what each computes as a comment."""
    return render_template(
        FOLDER / "unit.cpp.jinja", kernels=bodies, comments=sources, header=header,
        remainders=any(map(REMAINDER.search, bodies.values())),
    )  # fmt: skip


@lru_cache(maxsize=1)
def header_texts() -> dict[str, str]:
    """The C++ files a unit may include, by name."""
    own = {"prelude.h": (FOLDER / "prelude.h").read_text(), **headers()}
    return {spelling.SCALAR_HEADER: spelling.header_text(), **own}


@lru_cache(maxsize=1)
def _driver_text() -> str:
    return render_template(FOLDER / "driver.cpp.jinja", max_args=MAX_ARGS)


def _balanced(texts: Mapping[str, str], jobs: int) -> list[dict[str, str]]:
    """Kernels split into at most `jobs` units of about equal text."""
    total = sum(len(t) for t in texts.values())
    count = max(1, min(jobs, -(-total // UNIT_TEXT))) if texts else 0
    groups: list[dict[str, str]] = [{} for _ in range(count)]
    loads = [0] * count
    for name, text in sorted(texts.items(), key=lambda item: -len(item[1])):
        k = loads.index(min(loads))
        groups[k][name] = text
        loads[k] += len(text)
    return [g for g in groups if g]
