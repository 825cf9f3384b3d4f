"""The cache's folder on disk: entries, their locks and a secret.

    folder/CACHEDIR.TAG              the mark: dicp made this folder, in this format
    folder/user.key                  secret of this user, 0600
    folder/<kind>/<key[:2]>/<key>/   an entry: files and manifest.json
    folder/locks/<kind>/<key>        held by the process that builds the entry
    folder/tmp/<32 hex digits>       entries being written or removed

A manifest lists size and SHA-256 of each file and carries an HMAC under the user's secret. Entries
appear and disappear by one rename. A folder with files in it and without the mark is never used.
Folders are opened one below the other and links are not followed, so that nothing outside of this
folder is ever read or removed; inside, only what has the form of an entry is removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from dicp.errors import CacheWarning
from dicp.private_files import (
    FOLDER_FLAGS,
    SHORTAGES,
    Damaged,
    Untrusted,
    check_own,
    check_parents,
    is_at,
    opened_in,
    read_own,
    reason_of,
    write_new,
)

FORMAT = 2
FOLDER_NAME = f"dicp-cache-v{FORMAT}"
"""The cache's own folder inside the one the user names, which may hold other files."""
MARK = "CACHEDIR.TAG"
MARK_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    f"# dicp cache, format {FORMAT}. For cache directory tags see https://bford.info/cachedir/\n"
).encode()
MANIFEST = "manifest.json"
SECRET = "user.key"
SECRET_BYTES = 32
RESERVED = frozenset({"locks", "tmp"})
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_KEY = re.compile(r"[0-9a-f]{40,128}")
_STAGED = re.compile(r"[0-9a-f]{32}")
_UNFINISHED_MARK = re.compile(rf"{re.escape(MARK)}\.[0-9a-f]{{32}}")
_MANIFEST_BYTES = 1 << 20
_LOCK_SECONDS = 600  # a build that holds the lock for longer is considered hung
_STALE_SECONDS = 24 * 3600  # older leftovers of interrupted processes are deleted


@dataclass(frozen=True)
class Found:
    """An entry seen by a scan, for accounting and eviction."""

    kind: str
    key: str
    used: float
    bytes: int


class Store:
    """Entries in one folder. Raises OSError and Untrusted; the Cache decides what follows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._checked: tuple[int, int] | None = None

    def entry_folder(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / key

    # ---- the folder itself ----------------------------------------------------------------------

    def prepare(self) -> bytes:
        """Create the folder if it is missing, check its owner, and return the user's secret."""
        if not os.path.lexists(self.folder):
            self._make()
        found = self.folder.lstat()
        check_own(found)
        if self._checked != (found.st_dev, found.st_ino):
            check_parents(self.folder)
            self._checked = found.st_dev, found.st_ino
        with self._opened() as root:
            _check_mark(root)
            return _read_secret(root) or self._make_secret(root)

    def _make(self) -> None:
        for parent in reversed(self.folder.parents):
            if not parent.exists():
                with contextlib.suppress(FileExistsError):
                    parent.mkdir(mode=0o700)
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            return
        if self.folder.name == FOLDER_NAME and (self.folder.parent / SECRET).is_file():
            warn(
                f"{str(self.folder.parent)!r} holds the cache of an older dicp. It is not used any "
                f"more and is left as it is; new entries are in {str(self.folder)!r}. Remove the "
                "rest when you have no other use for it."
            )

    @contextlib.contextmanager
    def _opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """The descriptor of a folder inside this one; no link in its path is followed."""
        descriptor = os.open(self.folder, FOLDER_FLAGS)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                inner = os.open(name, FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_secret(self, root: int) -> bytes:
        """A new secret, or the one of the process that made it first."""
        secret, staged = secrets.token_bytes(SECRET_BYTES), secrets.token_hex(16)
        with self._opened("tmp", make=True) as tmp:
            write_new(tmp, staged, secret)
            try:
                os.link(staged, SECRET, src_dir_fd=tmp, dst_dir_fd=root)
                return secret
            except FileExistsError:
                if (first := _read_secret(root)) is not None:
                    return first
                os.rename(staged, SECRET, src_dir_fd=tmp, dst_dir_fd=root)
            except OSError:  # a file system without hard links
                os.rename(staged, SECRET, src_dir_fd=tmp, dst_dir_fd=root)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(staged, dir_fd=tmp)
        return _read_secret(root) or secret

    # ---- entries --------------------------------------------------------------------------------

    def load(self, kind: str, key: str, secret: bytes) -> dict[str, bytes] | None:
        """The files of an entry, verified; None if there is none. Raises Damaged."""
        with contextlib.ExitStack() as opened:
            try:
                shard = opened.enter_context(self._opened(kind, key[:2]))
                entry = _open_entry(shard, key)
            except FileNotFoundError:
                return None
            opened.callback(os.close, entry)
            try:
                files = _verified_files(entry, kind, key, secret)
            except Damaged:
                if is_at(shard, key, entry):
                    raise
                return None  # another process removed it between two files
            with contextlib.suppress(OSError):
                os.utime(MANIFEST, dir_fd=entry, follow_symlinks=False)
            return files

    def save(self, kind: str, key: str, files: Mapping[str, bytes], secret: bytes) -> None:
        """Write an entry in `tmp` and rename it into place, replacing one that exists."""
        staged = secrets.token_hex(16)
        with self._opened("tmp", make=True) as tmp:
            os.mkdir(staged, 0o700, dir_fd=tmp)
            try:
                with opened_in(tmp, staged) as entry:
                    for name, content in files.items():
                        write_new(entry, name, content)
                    write_new(entry, MANIFEST, _signed_manifest(files, kind, key, secret))
                with self._opened(kind, key[:2], make=True) as shard:
                    _swap(tmp, staged, shard, key)
            finally:
                _remove(tmp, staged)

    def discard(self, kind: str, key: str) -> None:
        """Move an entry to `tmp` by one rename, then delete it: no reader sees half of it.

        Raises OSError for a folder that holds others, which is no entry.
        """
        with contextlib.suppress(FileNotFoundError):
            with self._opened("tmp", make=True) as tmp, self._opened(kind, key[:2]) as shard:
                _discard(tmp, shard, key)

    def scan(self) -> Iterator[Found]:
        """Everything that has the form of an entry."""
        for kind in sorted(self._subfolders() - RESERVED):
            for shard in sorted(self._subfolders(kind)):
                for key in self._subfolders(kind, shard):
                    if _KEY.fullmatch(key) and key[:2] == shard:
                        found = self._found(kind, key)
                        if found is not None:
                            yield found

    def _found(self, kind: str, key: str) -> Found | None:
        """Size and time of last use of an entry; None for a folder that is not one."""
        total, used = 0, None
        with contextlib.suppress(OSError), self._opened(kind, key[:2], key) as entry:
            for name in os.listdir(entry):
                status = os.stat(name, dir_fd=entry, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) or not NAME.fullmatch(name):
                    return None
                total += status.st_size
                if name == MANIFEST:
                    used = status.st_mtime
        return None if used is None else Found(kind, key, used, total)

    def _subfolders(self, *names: str) -> set[str]:
        try:
            with self._opened(*names) as folder, os.scandir(folder) as items:
                return {i.name for i in items if i.is_dir(follow_symlinks=False)}
        except OSError:  # removed meanwhile, or not readable
            return set()

    # ---- locks, and what is left over -----------------------------------------------------------

    def lock(self, *parts: str) -> FileLock:
        with self._opened("locks", *parts[:-1], make=True):
            path = self.folder.joinpath("locks", *parts)
            return FileLock(path, timeout=_LOCK_SECONDS, mode=0o600)

    def sweep(self) -> None:
        """Delete locks and half-written entries that are long abandoned."""
        self._sweep("tmp", form=_STAGED, ours=_is_staged)
        for kind in self._subfolders("locks"):
            self._sweep("locks", kind, form=_KEY, ours=_is_lock)

    def _sweep(
        self, *names: str, form: re.Pattern[str], ours: Callable[[os.stat_result], bool]
    ) -> None:
        now = time.time()
        with contextlib.suppress(OSError), self._opened(*names) as folder:
            for name in filter(form.fullmatch, os.listdir(folder)):
                with contextlib.suppress(OSError):
                    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    # A clock that was wrong may have dated it in the future.
                    if abs(found.st_mtime - now) > _STALE_SECONDS and ours(found):
                        _remove(folder, name)


def _is_staged(found: os.stat_result) -> bool:
    """Whether it may be an entry or a secret that was never renamed into place."""
    secret = stat.S_ISREG(found.st_mode) and found.st_size <= SECRET_BYTES
    return secret or stat.S_ISDIR(found.st_mode)


def _is_lock(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == 0


# ---- the mark and the secret ---------------------------------------------------------------------


def _check_mark(root: int) -> None:
    """Mark a new folder. Raises Untrusted for one with other files and no mark."""
    for _ in range(2):  # another process may mark it between the two checks
        with contextlib.suppress(FileNotFoundError):
            if not _is_marked(root):
                raise Untrusted(
                    f"{MARK} in it is not that of this format (delete the folder if it is a cache "
                    "of dicp's)"
                )
            return
        if all(map(_UNFINISHED_MARK.fullmatch, os.listdir(root))):
            unfinished = f"{MARK}.{secrets.token_hex(16)}"
            write_new(root, unfinished, MARK_TEXT)
            os.rename(unfinished, MARK, src_dir_fd=root, dst_dir_fd=root)
            return
    raise Untrusted("it holds files and no mark of dicp's")


def _is_marked(root: int) -> bool:
    try:
        return read_own(root, MARK, len(MARK_TEXT)) == MARK_TEXT
    except Damaged:
        return False


def _read_secret(root: int) -> bytes | None:
    """The secret; None if there is no valid one, or other users may have read it."""
    try:
        found = os.stat(SECRET, dir_fd=root, follow_symlinks=False)
        secret = read_own(root, SECRET, SECRET_BYTES)
    except (FileNotFoundError, Damaged):
        return None
    return secret if len(secret) == SECRET_BYTES and not found.st_mode & 0o077 else None


# ---- entries -------------------------------------------------------------------------------------


def _open_entry(shard: int, key: str) -> int:
    """The folder of an entry. Raises FileNotFoundError, and Damaged if it cannot be opened."""
    try:
        return os.open(key, FOLDER_FLAGS, dir_fd=shard)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in SHORTAGES:
            raise
        raise Damaged(f"it cannot be read: {reason_of(error)}") from None


def _verified_files(entry: int, kind: str, key: str, secret: bytes) -> dict[str, bytes]:
    try:
        manifest = read_own(entry, MANIFEST, _MANIFEST_BYTES)
    except FileNotFoundError:
        raise Damaged("it has no manifest") from None
    files: dict[str, bytes] = {}
    for name, (size, digest) in _verified_manifest(manifest, kind, key, secret).items():
        try:
            content = read_own(entry, name, size)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if len(content) != size:
            raise Damaged(f"{name} has {len(content)} bytes instead of {size}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise Damaged(f"{name} was changed")
        files[name] = content
    return files


def signature(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    """An HMAC of `data` that only this user can make; it differs between purposes."""
    return hmac.digest(secret, purpose + b"\0" + data, "sha256")


def _signed_manifest(files: Mapping[str, bytes], kind: str, key: str, secret: bytes) -> bytes:
    listing = {
        name: [len(content), hashlib.sha256(content).hexdigest()]
        for name, content in sorted(files.items())
    }
    body = json.dumps({"format": FORMAT, "kind": kind, "key": key, "files": listing})
    tag = signature(secret, b"manifest", body.encode()).hex()
    return json.dumps({"body": body, "hmac": tag}).encode()


def _verified_manifest(
    manifest: bytes, kind: str, key: str, secret: bytes
) -> dict[str, tuple[int, str]]:
    """Size and digest per file name. Raises Damaged unless this user wrote it for this key."""
    try:
        signed = json.loads(manifest)
        body, tag = str(signed["body"]), bytes.fromhex(signed["hmac"])
        expected = signature(secret, b"manifest", body.encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("its manifest is damaged") from None
    if not hmac.compare_digest(expected, tag):
        raise Damaged("its manifest was not written by this user")
    listing = json.loads(body)
    if (listing["format"], listing["kind"], listing["key"]) != (FORMAT, kind, key):
        raise Damaged("its manifest belongs to another entry")
    return {name: (size, digest) for name, (size, digest) in listing["files"].items()}


def _swap(tmp: int, staged: str, shard: int, key: str) -> None:
    """Rename an entry into place; one that exists is removed first."""
    for _ in range(10):
        try:
            os.rename(staged, key, src_dir_fd=tmp, dst_dir_fd=shard)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        with contextlib.suppress(FileNotFoundError):
            _discard(tmp, shard, key)
    # Other processes put the same entry, each time between the two steps: theirs is the newer one.


def _discard(tmp: int, shard: int, key: str) -> None:
    if _holds_folders(shard, key):
        raise OSError(errno.ENOTEMPTY, f"{key} holds folders that are not the cache's")
    staged = secrets.token_hex(16)
    os.rename(key, staged, src_dir_fd=shard, dst_dir_fd=tmp)
    _remove(tmp, staged)


def _holds_folders(shard: int, key: str) -> bool:
    """Whether an entry contains a nonempty folder, which the cache never makes."""
    try:
        with opened_in(shard, key) as entry:
            for name in os.listdir(entry):
                with contextlib.suppress(NotADirectoryError), opened_in(entry, name) as inner:
                    if os.listdir(inner):
                        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def _remove(parent: int, name: str) -> None:
    """Remove an entry or a file as far as possible; links are not followed, full folders stay."""
    with contextlib.suppress(OSError):
        try:
            with opened_in(parent, name) as entry:
                for inner in os.listdir(entry):
                    with contextlib.suppress(OSError):
                        _remove_one(entry, inner)
        except NotADirectoryError:
            pass
        _remove_one(parent, name)


def _remove_one(parent: int, name: str) -> None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    remove = os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink
    remove(name, dir_fd=parent)


def private_store() -> Store:
    """A store in a temporary folder."""
    return Store(Path(tempfile.mkdtemp(prefix="dicp-")))


def warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
