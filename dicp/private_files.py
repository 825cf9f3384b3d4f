"""Files and folders of this user alone: opened one below the other, without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a process or machine that lacks something: they say nothing about the file."""


class Damaged(Exception):
    """An entry that must not be loaded; the text says why."""


class Untrusted(Exception):
    """A folder that must not be used; the text says why."""


@contextlib.contextmanager
def opened_in(parent: int, name: str) -> Iterator[int]:
    descriptor = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_at(parent: int, name: str, descriptor: int) -> bool:
    """Whether the open folder is the one that now has this name."""
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(descriptor)
        )
    except FileNotFoundError:
        return False


def read_own(folder: int, name: str, most: int) -> bytes:
    """A regular file of this user's, of at most `most` bytes; never through a symbolic link.

    Raises FileNotFoundError and Damaged, and OSError for a shortage.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in SHORTAGES:
            raise
        raise Damaged(f"{name} cannot be read: {reason_of(error)}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is not a regular file")
        if found.st_uid != os.geteuid():
            raise Damaged(f"{name} belongs to another user")
        if found.st_size > most:
            raise Damaged(f"{name} has {found.st_size} bytes, more than {most}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most + 1)
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {reason_of(error)}") from None
    finally:
        os.close(descriptor)


def write_new(folder: int, name: str, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)


def check_own(found: os.stat_result) -> None:
    """Raises Untrusted unless this is a folder of this user's that nobody else can write."""
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted("it is a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise Untrusted("it is not a folder")
    if found.st_uid != os.geteuid():
        raise Untrusted(f"it belongs to another user (uid {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"other users can write it (mode {found.st_mode & 0o7777:o})")


def check_parents(folder: Path) -> None:
    """Raises Untrusted where other users could replace this folder.

    Groups are trusted with all but the innermost parent: they are often the user's own.
    """
    users = {0, os.geteuid()}
    whole = folder.parent.resolve()
    for place in dict.fromkeys((*folder.parents, whole, *whole.parents)):
        try:
            found = place.lstat()
        except PermissionError:  # the process began below it
            continue
        innermost = place in (folder.parent, whole)
        link = stat.S_ISLNK(found.st_mode)
        if (link or innermost) and found.st_uid not in users:
            raise Untrusted(f"{str(place)!r} belongs to another user (uid {found.st_uid})")
        if link:
            continue
        writers = stat.S_IWOTH | (stat.S_IWGRP if innermost else 0)
        if found.st_mode & writers and not found.st_mode & stat.S_ISVTX:
            mode = found.st_mode & 0o7777
            raise Untrusted(f"other users can write {str(place)!r} (mode {mode:o})")


def remove_with(owner: object, folder: Path) -> None:
    """Remove the folder when its owner is garbage-collected or the process ends.

    `tempfile.TemporaryDirectory` would be removed by each fork of the process that ends, too.
    """
    weakref.finalize(owner, _remove, folder, os.getpid())


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def reason_of(error: OSError) -> str:
    return error.strerror or str(error)
