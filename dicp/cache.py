"""The disk cache: entries of a few files each, found by key, verified on every read.

    folder/<kind>/<key[:2]>/<key>/{files..., manifest.json}
    folder/locks/<kind>/<key>     held by the process that builds the entry
    folder/tmp/                   entries being written
    folder/user.key               secret of this user, 0600

A manifest lists size and SHA-256 of each file and carries an HMAC under the user's secret, so an
entry that is damaged, truncated or written by somebody else is rebuilt with a warning and never
loaded. Entries appear by one rename. A folder that cannot be trusted or written costs one warning;
results then go to a private temporary folder, and to memory where even that fails.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from dicp.config import Config
from dicp.errors import CacheFolderError, CacheWarning

_FORMAT = 1
_MANIFEST = "manifest.json"
_SECRET = "user.key"
_SECRET_BYTES = 32
_RESERVED = frozenset({"locks", "tmp"})
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_LOCK_SECONDS = 600  # a build that holds the lock for longer is taken to hang
_SPARE_SECONDS = 600  # an entry just handed out may not be loaded yet
_STALE_SECONDS = 24 * 3600  # what an interrupted process left behind


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
    _store: _Store | None = field(repr=False)

    def read(self, name: str) -> bytes:
        """The verified content of a file. Raises KeyError for a name the entry does not have."""
        return self.files[name]

    def path(self, name: str) -> Path:
        """A file with that content, to be given to a loader or a compiler.

        Raises KeyError for a name the entry does not have.
        """
        content = self.files[name]
        if self._store is not None:
            path = self._store.entry_folder(self.kind, self.key) / name
            if path.is_file():
                return path
        return _private_file(content, name)


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


class _Damaged(Exception):
    """An entry that must not be loaded; the text says why."""


class _Untrusted(Exception):
    """A folder that must not be used; the text says why."""


@dataclass(frozen=True)
class _Found:
    """An entry seen by a scan, for accounting and eviction."""

    kind: str
    folder: Path
    used: float
    bytes: int


class _Store:
    """Entries in one folder. Raises OSError and _Untrusted; the Cache decides what follows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry_folder(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / key

    def prepare(self) -> bytes:
        """Make the folder if need be, check who can write it, and return the user's secret."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise _Untrusted("it is not a folder")
        if found.st_uid != os.geteuid():
            raise _Untrusted(f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _Untrusted(f"other users can write it (mode {found.st_mode & 0o7777:o})")
        return self._read_secret() or self._make_secret()

    def load(self, kind: str, key: str, secret: bytes) -> dict[str, bytes] | None:
        """The files of an entry, verified; None if there is none. Raises _Damaged."""
        folder = self.entry_folder(kind, key)
        try:
            manifest = _read_own(folder / _MANIFEST)
        except FileNotFoundError:
            if folder.is_dir():
                raise _Damaged("it has no manifest") from None
            return None
        expected = _verified_manifest(manifest, kind, key, secret)
        files: dict[str, bytes] = {}
        for name, (size, digest) in expected.items():
            try:
                content = _read_own(folder / name)
            except FileNotFoundError:
                raise _Damaged(f"{name} is missing") from None
            if len(content) != size:
                raise _Damaged(f"{name} has {len(content)} bytes instead of {size}")
            if hashlib.sha256(content).hexdigest() != digest:
                raise _Damaged(f"{name} was changed")
            files[name] = content
        with contextlib.suppress(OSError):
            os.utime(folder / _MANIFEST)
        return files

    def save(self, kind: str, key: str, files: Mapping[str, bytes], secret: bytes) -> None:
        """Write an entry aside and rename it into place, over whatever is there."""
        target = self.entry_folder(kind, key)
        aside = self._aside()
        try:
            aside.mkdir(mode=0o700)
            for name, content in files.items():
                _write_new(aside / name, content)
            _write_new(aside / _MANIFEST, _signed_manifest(files, kind, key, secret))
            self._make_folders(kind, key[:2])
            self._swap(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def discard(self, folder: Path) -> None:
        """Take an entry out by one rename, then delete it: no reader sees half of it."""
        aside = self._aside()
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def lock(self, *parts: str) -> FileLock:
        parent = self._make_folders("locks", *parts[:-1])
        return FileLock(parent / parts[-1], timeout=_LOCK_SECONDS, mode=0o600)

    def scan(self) -> Iterator[_Found]:
        for kind in sorted(_subfolders(self.folder)):
            if kind.name in _RESERVED:
                continue
            for shard in _subfolders(kind):
                yield from (_found(kind.name, folder) for folder in _subfolders(shard))

    def sweep(self) -> None:
        """Delete locks and half-written entries that are long abandoned."""
        oldest = time.time() - _STALE_SECONDS
        for path in [*self.folder.glob("locks/*/*"), *self.folder.glob("tmp/*")]:
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink() if not path.is_dir() else shutil.rmtree(path)

    def _aside(self) -> Path:
        return self._make_folders("tmp") / secrets.token_hex(16)

    def _make_folders(self, *names: str) -> Path:
        path = self.folder
        for name in names:  # not mkdir(parents=True), whose mode is for the last one only
            path /= name
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    def _swap(self, aside: Path, target: Path) -> None:
        for _ in range(10):  # another process may put the same entry between the two steps
            with contextlib.suppress(FileExistsError):
                return _rename_folder(aside, target)
            self.discard(target)
        raise OSError(f"{target} is replaced without end by other processes")

    def _read_secret(self) -> bytes | None:
        """The secret, or None if there is none that others cannot know."""
        path = self.folder / _SECRET
        try:
            found = path.lstat()
            secret = _read_own(path)
        except (FileNotFoundError, _Damaged):
            return None
        return secret if len(secret) == _SECRET_BYTES and not found.st_mode & 0o077 else None

    def _make_secret(self) -> bytes:
        """A new secret, or the one of the process that made it first."""
        path = self.folder / _SECRET
        secret = secrets.token_bytes(_SECRET_BYTES)
        aside = self._aside()
        _write_new(aside, secret)
        try:
            if self._read_secret() is None:
                path.unlink(missing_ok=True)
            os.link(aside, path)  # fails where another process was first
        except FileExistsError:
            return self._read_secret() or secret
        except OSError:  # a file system without hard links
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return secret


class Cache:
    """The entries of one cache folder, and what this process could not keep there.

    Safe to share between threads and processes. No method raises because of the disk.
    """

    def __init__(self, folder: Path, max_bytes: int, *, persistent: bool = True) -> None:
        self.folder = folder
        self.trouble = ""
        self._max_bytes = max_bytes
        self._store = _Store(folder) if persistent else None
        self._writable = persistent
        self._collected = False
        self._own_secret = secrets.token_bytes(_SECRET_BYTES)
        self._overflow: _Store | None = None
        self._memory: dict[tuple[str, str], Mapping[str, bytes]] | None = None

    @classmethod
    def open(cls, config: Config) -> Cache:
        """The cache of `config`; the same object for the same folder within a process.

        With `config.cache` off: an empty one that nobody shares and that goes with the process.
        """
        if not config.cache:
            return cls(config.cache_dir, config.cache_bytes, persistent=False)
        return _opened(config.cache_dir, config.cache_bytes, os.getpid())

    def get(self, kind: str, key: str) -> Entry | None:
        """The entry, verified, or None. A damaged one is removed with a CacheWarning."""
        _check_names(kind, key)
        if self._memory is not None and (kind, key) in self._memory:
            return Entry(kind, key, True, self._memory[kind, key], None)
        for store, secret in self._readable():
            files = self._verified(store, kind, key, secret)
            if files is not None:
                return Entry(kind, key, True, files, store)
        return None

    def keys(self, kind: str) -> list[str]:
        """The keys of the entries of `kind` on disk."""
        return [
            found.folder.name for store, _ in self._readable() for found in store.scan()
            if found.kind == kind
        ]  # fmt: skip

    def put(self, kind: str, key: str, files: Mapping[str, bytes]) -> Entry:
        """Keep `files` (name to content) under the key, replacing what is there."""
        _check_names(kind, key, *files)
        if _MANIFEST in files:
            raise ValueError(f"{_MANIFEST!r} is the cache's own file name")
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

        What `build` raises passes through and nothing is kept. `build` may ask for other entries
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

    def clear(self) -> CacheInfo:
        """Remove every entry; returns what was removed."""
        self._memory = None
        removed: list[_Found] = []
        for store, _ in self._readable():
            removed += self._remove(store, list(store.scan()))
        return self._info(removed)

    def gc(self, max_bytes: int | None = None) -> CacheInfo:
        """Remove the least recently used entries until at most `max_bytes` (the configured cap)
        are left; returns what was removed."""
        return self._collect(self._max_bytes if max_bytes is None else max_bytes, 0)

    def sign(self, data: bytes) -> bytes:
        """A tag that only this user can make for `data`, for content kept elsewhere."""
        return _tag(self._secret(), b"data", data)

    def verify(self, data: bytes, tag: bytes) -> bool:
        """Whether `tag` is `sign(data)`, made by this user."""
        return hmac.compare_digest(self.sign(data), tag)

    def _secret(self) -> bytes:
        return next((secret for _, secret in self._readable()), self._own_secret)

    def _readable(self) -> Iterator[tuple[_Store, bytes]]:
        if self._store is not None:
            try:
                secret = self._store.prepare()
            except _Untrusted as refusal:
                self._store = None
                self._degrade(f"it is not used, because {refusal}")
            except OSError as error:
                self._store = None
                self._degrade(f"it cannot be used: {_reason(error)}")
            else:
                yield self._store, secret
        if self._overflow is not None:
            yield self._overflow, self._own_secret

    def _verified(
        self, store: _Store, kind: str, key: str, secret: bytes
    ) -> dict[str, bytes] | None:
        try:
            return store.load(kind, key, secret)
        except (_Damaged, OSError) as damage:
            reason = _reason(damage) if isinstance(damage, OSError) else str(damage)
        folder = store.entry_folder(kind, key)
        _warn(f"cache entry {str(folder)!r} is not used and is built again: {reason}")
        with contextlib.suppress(OSError):
            store.discard(folder)
        return None

    def _save(self, kind: str, key: str, files: Mapping[str, bytes]) -> _Store | None:
        """Write to the folder, else to the private one; None where neither takes it."""
        if self._writable:
            for store, secret in self._readable():
                try:
                    store.save(kind, key, files, secret)
                except OSError as error:
                    self._degrade(f"it cannot be written: {_reason(error)}")
                else:
                    return store
                break
        try:
            if self._overflow is None:
                self._overflow = _private_store()
            self._overflow.save(kind, key, files, self._own_secret)
        except OSError:
            return None
        return self._overflow

    def _degrade(self, trouble: str) -> None:
        self._writable = False
        if self.trouble:
            return
        self.trouble = trouble
        _warn(
            f"cache folder {str(self.folder)!r}: {trouble}. What is compiled now is lost when the "
            "process ends. Point DICP_CACHE_DIR (option cache_dir) at a folder with space left "
            "that belongs to you and that nobody else can write."
        )

    @contextlib.contextmanager
    def _building(self, kind: str, key: str) -> Iterator[None]:
        """Hold the entry's lock; go on without it where locks cannot be had."""
        with contextlib.ExitStack() as held:
            if self._writable and self._store is not None:
                # Timeout: the holder hangs. NotImplementedError: a file system without locks.
                with contextlib.suppress(OSError, NotImplementedError, Timeout):
                    held.enter_context(self._store.lock(kind, key))
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
                newest = time.time() - spare_seconds
                evicted = []
                for entry in found:
                    if excess <= 0 or entry.used > newest:
                        break
                    evicted.append(entry)
                    excess -= entry.bytes
                return self._info(self._remove(store, evicted))
        except (OSError, NotImplementedError, Timeout):  # another process collects, or none can
            return self._info(())

    def _remove(self, store: _Store, entries: Sequence[_Found]) -> list[_Found]:
        removed = []
        for entry in entries:
            try:
                store.discard(entry.folder)
            except OSError as error:
                self._degrade(f"it cannot be written: {_reason(error)}")
                break
            removed.append(entry)
        return removed

    def _info(self, found: Iterator[_Found] | Sequence[_Found]) -> CacheInfo:
        kinds: dict[str, list[_Found]] = {}
        for entry in found:
            kinds.setdefault(entry.kind, []).append(entry)
        rows = (
            KindInfo(kind, len(group), sum(entry.bytes for entry in group))
            for kind, group in sorted(kinds.items())
        )
        return CacheInfo(self.folder, tuple(rows), self.trouble)


@functools.lru_cache(maxsize=64)
def _opened(folder: Path, max_bytes: int, process: int) -> Cache:
    """One Cache per folder and process: `process` keeps a fork from using its parent's."""
    return Cache(folder, max_bytes)


def _check_names(kind: str, key: str, *names: str) -> None:
    for name in (kind, key, *names):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for a cache kind, key or file")
    if kind in _RESERVED or kind == _SECRET:
        raise ValueError(f"{kind!r} is not a cache kind: the cache itself uses this name")


def _tag(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + data, "sha256")


def _signed_manifest(files: Mapping[str, bytes], kind: str, key: str, secret: bytes) -> bytes:
    listing = {
        name: [len(content), hashlib.sha256(content).hexdigest()]
        for name, content in sorted(files.items())
    }
    body = json.dumps({"format": _FORMAT, "kind": kind, "key": key, "files": listing})
    tag = _tag(secret, b"manifest", body.encode()).hex()
    return json.dumps({"body": body, "hmac": tag}).encode()


def _verified_manifest(
    manifest: bytes, kind: str, key: str, secret: bytes
) -> dict[str, tuple[int, str]]:
    """Size and digest per file name. Raises _Damaged unless this user wrote it for this key."""
    try:
        signed = json.loads(manifest)
        body, tag = str(signed["body"]), bytes.fromhex(signed["hmac"])
    except (ValueError, KeyError, TypeError):
        raise _Damaged("its manifest is damaged") from None
    if not hmac.compare_digest(_tag(secret, b"manifest", body.encode()), tag):
        raise _Damaged("its manifest was not written by this user")
    listing = json.loads(body)
    if (listing["format"], listing["kind"], listing["key"]) != (_FORMAT, kind, key):
        raise _Damaged("its manifest belongs to another entry")
    return {name: (size, digest) for name, (size, digest) in listing["files"].items()}


def _read_own(path: Path) -> bytes:
    """A regular file of this user's; never through a symbolic link. Raises _Damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _Damaged(f"{path.name} cannot be read: {_reason(error)}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Damaged(f"{path.name} is not a regular file")
        if found.st_uid != os.geteuid():
            raise _Damaged(f"{path.name} belongs to another user")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise _Damaged(f"{path.name} cannot be read: {_reason(error)}") from None
    finally:
        os.close(descriptor)


def _write_new(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)


def _rename_folder(source: Path, target: Path) -> None:
    """Rename over nothing or an empty folder. Raises FileExistsError if there is something."""
    try:
        source.rename(target)
    except OSError:
        if target.exists() or target.is_symlink():
            raise FileExistsError(target) from None
        raise


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return [Path(item.path) for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:  # removed meanwhile
        return []


def _found(kind: str, folder: Path) -> _Found:
    used, total = 0.0, 0
    for path in (folder / _MANIFEST, *folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.name != _MANIFEST:
                total += status.st_size
            elif not used:
                used, total = status.st_mtime, total + status.st_size
    return _Found(kind, folder, used, total)


def _private_store() -> _Store:
    """A store in a temporary folder, which goes with its last entry or with the process."""
    store = _Store(Path(tempfile.mkdtemp(prefix="dicp-")))
    weakref.finalize(store, _remove_private, store.folder, os.getpid())
    return store


def _remove_private(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a fork's exit leaves its parent's folder alone
        shutil.rmtree(folder, ignore_errors=True)


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


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
