"""The disk cache: entries of a few files each, found by key, verified on every read.

An entry that is damaged, truncated or written by another user is rebuilt with a warning and never
loaded. A folder that cannot be trusted or written costs one warning; results then go to a private
temporary folder, and to memory where even that fails. `dicp.store` defines the layout on disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout

from dicp.config import Config
from dicp.errors import CacheFolderError
from dicp.private_files import Damaged, Untrusted, reason_of, remove_with
from dicp.store import (
    FOLDER_NAME,
    MANIFEST,
    MARK,
    NAME,
    RESERVED,
    SECRET,
    SECRET_BYTES,
    Found,
    Store,
    private_store,
    signature,
    warn,
)

_SPARE_SECONDS = 600  # entries used within them are not evicted: they may not be loaded yet


def key_of(*parts: object) -> str:
    """SHA-256 (hex) of `parts`: text, bytes, numbers, None, mappings and sequences of these.

    Different parts give different encodings: every value carries its type and its length.
    Raises TypeError for any other type.
    """
    return hashlib.sha256(_encoded(parts)).hexdigest()


def _encoded(value: object) -> bytes:
    match value:
        case str():
            tag, body = b"s", value.encode("utf-8", "surrogatepass")
        case bytes() | bytearray():
            tag, body = b"b", bytes(value)
        case None | bool() | int() | float():
            tag, body = b"n", f"{type(value).__name__}:{value!r}".encode()
        case Mapping():
            pairs = sorted((_encoded(key), _encoded(item)) for key, item in value.items())
            tag, body = b"m", b"".join(part for pair in pairs for part in pair)
        case set() | frozenset():
            tag, body = b"u", b"".join(sorted(map(_encoded, value)))
        case Sequence():
            tag, body = b"l", b"".join(map(_encoded, value))
        case _:
            raise TypeError(f"a cache key cannot be made of {type(value).__name__}: {value!r}")
    return tag + str(len(body)).encode() + b":" + body


@dataclass(frozen=True, eq=False)
class Entry:
    """Files of one cached result, as verified when they were read or built.

    `hit` tells whether they were found (True) or have just been built.
    """

    kind: str
    key: str
    hit: bool
    files: Mapping[str, bytes] = field(repr=False)
    _store: Store | None = field(repr=False)

    def read(self, name: str) -> bytes:
        """The verified content of a file. Raises KeyError for a name the entry does not have."""
        return self.files[name]

    def path(self, name: str) -> Path:
        """A file with that content. Raises KeyError for a name the entry does not have."""
        content, path = self.files[name], self.path_on_disk(name)
        if path is not None and path.is_file():
            return path
        return _private_file(content, name)

    def path_on_disk(self, name: str) -> Path | None:
        """The file's path in the cache; None for one in memory. Other processes may remove it."""
        if self._store is None:
            return None
        return self._store.entry_folder(self.kind, self.key) / name

    def discard(self) -> None:
        """Remove it from disk, where it can be; what was read stays usable."""
        if self._store is not None:
            with contextlib.suppress(OSError):
                self._store.discard(self.kind, self.key)


@dataclass(frozen=True)
class KindInfo:
    """How much of one kind the cache holds."""

    kind: str
    entries: int
    bytes: int


@dataclass(frozen=True)
class CacheInfo:
    """What the cache holds, or what was removed from it. `trouble` is empty if all is well."""

    folder: Path
    kinds: tuple[KindInfo, ...]
    trouble: str = ""

    @property
    def entries(self) -> int:
        return sum(kind.entries for kind in self.kinds)

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in self.kinds)


class Cache:
    """The entries of one cache folder, and those that this process could not write there.

    Safe to share between threads and processes. No method raises because of the disk.
    """

    def __init__(self, folder: Path, max_bytes: int, *, persistent: bool = True) -> None:
        self.folder = folder
        self.trouble = ""
        self._telling = threading.Lock()
        self._max_bytes = max_bytes
        self._store = Store(folder) if persistent else None
        self._writable = persistent
        self._collected = False
        self._own_secret = secrets.token_bytes(SECRET_BYTES)
        self._overflow: Store | None = None
        self._memory: dict[tuple[str, str], Mapping[str, bytes]] | None = None

    @classmethod
    def open(cls, config: Config) -> Cache:
        """The cache of `config`; the same object for the same folder within a process.

        With `config.cache` off: an empty one, not shared, whose entries end with the process.
        """
        folder = config.cache_dir / FOLDER_NAME
        if not config.cache:
            return cls(folder, config.cache_bytes, persistent=False)
        return _opened(folder, config.cache_bytes, os.getpid())

    def get(self, kind: str, key: str) -> Entry | None:
        """The entry, verified, or None. A damaged one is removed with a CacheWarning."""
        _check_names(kind, key)
        held = (self._memory or {}).get((kind, key))
        if held is not None:
            return Entry(kind, key, True, held, None)
        for store, secret in self._readable():
            files = self._verified(store, kind, key, secret)
            if files is not None:
                return Entry(kind, key, True, files, store)
        return None

    def keys(self, kind: str) -> list[str]:
        """The keys of the entries of `kind` on disk."""
        return [
            found.key for store, _ in self._readable() for found in store.scan()
            if found.kind == kind
        ]  # fmt: skip

    def put(self, kind: str, key: str, files: Mapping[str, bytes]) -> Entry:
        """Store `files` (name to content) under the key, replacing an entry that exists."""
        _check_names(kind, key, *files)
        if MANIFEST in files:
            raise ValueError(f"{MANIFEST!r} is the cache's own file name")
        files = {name: bytes(content) for name, content in files.items()}
        store = self._save(kind, key, files)
        if store is None:
            if self._memory is None:
                self._memory = {}
            self._memory[kind, key] = files
        elif store is self._store and not self._collected:
            self._collected = True
            self._collect(self._max_bytes, _SPARE_SECONDS)
        return Entry(kind, key, False, files, store)

    def get_or_build(self, kind: str, key: str, build: Callable[[], Mapping[str, bytes]]) -> Entry:
        """The entry, built by `build` if it is missing; processes that race build it once.

        Exceptions of `build` propagate, and nothing is stored. `build` may request other entries
        as long as no two entries need each other.
        """
        entry = self.get(kind, key)
        if entry is not None:
            return entry
        with self._building(kind, key):
            return self.get(kind, key) or self.put(kind, key, build())

    def info(self) -> CacheInfo:
        """What the disk cache holds, by kind."""
        return self._info(found for store, _ in self._readable() for found in store.scan())

    def clear(self, *kinds: str) -> CacheInfo:
        """Remove the entries of these kinds, or every entry; returns what was removed from disk."""
        held = self._memory or {}
        self._memory = {at: files for at, files in held.items() if kinds and at[0] not in kinds}
        removed: list[Found] = []
        trouble = ""
        for store, _ in self._readable():
            found = [each for each in store.scan() if not kinds or each.kind in kinds]
            gone, failed = _remove(store, found)
            removed, trouble = removed + gone, failed or trouble
        return self._info(removed, trouble)

    def gc(self, max_bytes: int | None = None) -> CacheInfo:
        """Remove the least recently used entries until at most `max_bytes` (the configured cap)
        are left; returns what was removed."""
        return self._collect(self._max_bytes if max_bytes is None else max_bytes, 0)

    def sign(self, data: bytes) -> bytes:
        """A tag that only this user can make for `data`, for content kept elsewhere."""
        return signature(self._secret(), b"data", data)

    def verify(self, data: bytes, tag: bytes) -> bool:
        """Whether `tag` is `sign(data)`, made by this user."""
        return hmac.compare_digest(self.sign(data), tag)

    def _secret(self) -> bytes:
        return next((secret for _, secret in self._readable()), self._own_secret)

    def _readable(self) -> Iterator[tuple[Store, bytes]]:
        store, overflow = self._store, self._overflow  # other threads may change them
        if store is not None:
            try:
                secret = store.prepare()
            except Untrusted as refusal:
                self._store = None
                self._degrade(f"it is not used, because {refusal}")
            except OSError as error:
                self._store = None
                self._degrade(f"it cannot be used: {reason_of(error)}")
            else:
                yield store, secret
        if overflow is not None:
            yield overflow, self._own_secret

    def _verified(
        self, store: Store, kind: str, key: str, secret: bytes
    ) -> dict[str, bytes] | None:
        try:
            return store.load(kind, key, secret)
        except OSError as error:
            self._degrade(f"it cannot be read: {reason_of(error)}")
            return None
        except Damaged as damage:
            reason = str(damage)
        folder = store.entry_folder(kind, key)
        warn(f"cache entry {str(folder)!r} is not used and is built again: {reason}")
        with contextlib.suppress(OSError):
            store.discard(kind, key)
        return None

    def _save(self, kind: str, key: str, files: Mapping[str, bytes]) -> Store | None:
        """Write to the folder, else to the private one; None where neither can be written."""
        store = self._save_in_folder(kind, key, files)
        if store is not None:
            return store
        try:
            overflow = self._overflow = self._overflow or _temporary_store()
            overflow.save(kind, key, files, self._own_secret)
        except OSError:
            return None
        return overflow

    def _save_in_folder(self, kind: str, key: str, files: Mapping[str, bytes]) -> Store | None:
        trouble = ""
        for _ in range(2):  # another process may remove the folder during the write
            store, secret = next(self._readable(), (None, b""))
            if not self._writable or store is None or store is not self._store:
                return None
            try:
                store.save(kind, key, files, secret)
                return store
            except OSError as error:
                trouble = reason_of(error)
                if not isinstance(error, FileNotFoundError):
                    break
        self._degrade(f"it cannot be written: {trouble}")
        return None

    def _degrade(self, trouble: str) -> None:
        self._writable = False
        with self._telling:
            if self.trouble:
                return
            self.trouble = trouble
        warn(
            f"cache folder {str(self.folder)!r}: {trouble}. What is compiled now is lost when the "
            "process ends. Point DICP_CACHE_DIR (option cache_dir) at a folder with space left "
            "that belongs to you and that nobody else can write."
        )

    @contextlib.contextmanager
    def _building(self, kind: str, key: str) -> Iterator[None]:
        """Hold the entry's lock; continue without it where locks are not available."""
        with contextlib.ExitStack() as held:
            store = self._store
            if self._writable and store is not None:
                # Timeout: the holder hangs. NotImplementedError: a file system without locks.
                with contextlib.suppress(OSError, NotImplementedError, Timeout):
                    held.enter_context(store.lock(kind, key))
            yield

    def _collect(self, max_bytes: int, spare_seconds: float) -> CacheInfo:
        store = next((store for store, _ in self._readable()), None)
        if store is None or not self._writable:
            return self._info(())
        try:
            with store.lock("gc").acquire(blocking=False):
                store.sweep()
                found = sorted(store.scan(), key=lambda entry: entry.used)
                excess = sum(entry.bytes for entry in found) - max_bytes
                now = time.time()
                evicted = []
                for entry in found:
                    if excess <= 0:
                        break
                    # A time further in the future is that of a clock that was wrong.
                    if abs(entry.used - now) < spare_seconds:
                        continue
                    evicted.append(entry)
                    excess -= entry.bytes
                return self._info(*_remove(store, evicted))
        except Timeout:
            return self._info((), "another process is removing entries")
        except (OSError, NotImplementedError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "no locks here"
            return self._info((), f"entries cannot be removed: {reason}")

    def _info(self, found: Iterable[Found], trouble: str = "") -> CacheInfo:
        kinds: dict[str, list[Found]] = {}
        for entry in found:
            kinds.setdefault(entry.kind, []).append(entry)
        rows = (
            KindInfo(kind, len(group), sum(entry.bytes for entry in group))
            for kind, group in sorted(kinds.items())
        )
        return CacheInfo(self.folder, tuple(rows), self.trouble or trouble)


@functools.lru_cache(maxsize=64)
def _opened(folder: Path, max_bytes: int, process: int) -> Cache:
    """One Cache per folder and process: `process` keeps a fork from using its parent's."""
    return Cache(folder, max_bytes)


def _remove(store: Store, entries: Sequence[Found]) -> tuple[list[Found], str]:
    """The entries removed, up to the first that cannot be, and why it cannot (empty: all are)."""
    for position, entry in enumerate(entries):
        try:
            store.discard(entry.kind, entry.key)
        except OSError as error:
            return list(entries[:position]), f"entries cannot be removed: {reason_of(error)}"
    return list(entries), ""


def _check_names(kind: str, key: str, *names: str) -> None:
    for name in (kind, key, *names):
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for a cache kind, key or file")
    if kind in RESERVED or kind in (SECRET, MARK):
        raise ValueError(f"{kind!r} is not a cache kind: the cache itself uses this name")


def _temporary_store() -> Store:
    """A private store, deleted when it is garbage-collected or the process ends."""
    store = private_store()
    remove_with(store, store.folder)
    return store


@functools.lru_cache(maxsize=1024)
def _memory_file(content: bytes, name: str) -> int:
    """Descriptor of a file in memory; open until the process ends, as loaders may keep its path."""
    descriptor = os.memfd_create(name[:64])
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def _private_file(content: bytes, name: str) -> Path:
    if not hasattr(os, "memfd_create"):
        raise CacheFolderError(tempfile.gettempdir(), "no folder can be written")
    return Path(f"/proc/self/fd/{_memory_file(content, name)}")
