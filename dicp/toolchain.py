"""Host compilers: finding one, running it, and loading the shared objects it builds.

A compiler's output is checked before it is stored and again before it is loaded; every failure is a
ToolchainError or a CompilerError that names the target.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dicp.cache import Entry
from dicp.config import tools_environment
from dicp.elf import fault_of
from dicp.errors import CacheWarning, CompilerError, ToolchainError

COMPILERS = ("g++", "clang++")
OUTPUT = "unit.so"
"""The file a compiler must write, in the folder it runs in."""
COMPILE_SECONDS = 600
VERSION_SECONDS = 20
_LOOK_SECONDS = 0.1  # between checks whether a compilation is still wanted
_NOT_STARTED = (125, 126, 127)  # statuses of `timeout` that are not the tool's
_MAX_OUTPUT = 16 << 20
_MAX_BUILT = 1 << 30


class _Unusable(Exception):
    """A tool that did not do what it was run for; the text says why."""


@dataclass(frozen=True)
class Result:
    """A tool's exit status (negative: the signal that ended it), and its messages."""

    status: int
    output: str


# ---- compilers -----------------------------------------------------------------------------------


def find_compiler(target: str, requested: str) -> tuple[tuple[str, ...], str]:
    """The command of the C++ compiler `requested`, else of the first one found, and its version.

    Raises ToolchainError.
    """
    names = (requested,) if requested else COMPILERS
    for name in names:
        program, *arguments = shlex.split(name)
        path = shutil.which(program)
        if path is not None:
            command = (path, *arguments)
            version, fault = _version(command, _changed(path))
            if fault:
                raise ToolchainError(target, name, fault, "Reinstall the compiler.")
            return command, version
    raise ToolchainError(
        target,
        "a C++ compiler",
        f"none of {', '.join(names)} is on the PATH",
        "Install g++ (Debian: apt install g++), or name a compiler in DICP_CXX.",
    )


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=16)
def _version(command: tuple[str, ...], changed: int) -> tuple[str, str]:
    """The compiler's version line, and why it cannot be used: one of them is empty.

    Failures are cached too, as one may take long to occur; a new mtime `changed` drops them.
    """
    try:
        result = run_tool([*command, "--version"], None, VERSION_SECONDS, errors=subprocess.DEVNULL)
    except _Unusable as fault:
        return "", f"{shlex.join(command)} --version: {fault}"
    lines = result.output.split("\n", 1)
    if result.status != 0 or not lines[0].strip():
        return "", f"{shlex.join(command)} --version fails"
    return lines[0].strip()[:200], ""


def compile_shared(
    target: str,
    command: Sequence[str],
    files: Mapping[str, str | bytes],
    symbols: Collection[str],
    *,
    sources: Sequence[str] = (),
    cautious: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> bytes:
    """The shared object that `command` writes to `OUTPUT`, run in a folder with `files`.

    symbols: what it must define.
    sources: the graph nodes it computes, for the message of an error.
    cautious: arguments for a second try where the compiler itself crashes.
    stop: once set, the compiler is ended.

    Raises CompilerError with the compiler's first messages, and ToolchainError where there is no
    temporary folder to work in.
    """
    content = compile_file(target, command, files, sources=sources, cautious=cautious, stop=stop)
    if fault := fault_of(content, symbols):
        text = f"error: the compiler wrote a shared object that cannot be used: {fault}"
        raise CompilerError(target, command, text, sources)
    return content


def compile_file(
    target: str,
    command: Sequence[str],
    files: Mapping[str, str | bytes],
    *,
    sources: Sequence[str] = (),
    cautious: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> bytes:
    """As `compile_shared`, for an output of whatever format, such as a device's."""
    with _folder_with(target, files) as folder:
        try:
            result = run_tool(command, folder, COMPILE_SECONDS, stop=stop)
            if cautious and "internal compiler error" in result.output:
                command = [*command, *cautious]
                result = run_tool(command, folder, COMPILE_SECONDS, stop=stop)
            if result.status != 0:
                ended = f"\nerror: ended by signal {-result.status}" if result.status < 0 else ""
                raise CompilerError(target, command, result.output + ended, sources)
            if not os.path.lexists(folder / OUTPUT):
                text = f"{result.output}\nerror: it ended with status 0 and wrote no {OUTPUT}"
                raise CompilerError(target, command, text, sources)
            return _built(folder / OUTPUT)
        except _Unusable as fault:
            raise CompilerError(target, command, f"error: {fault}", sources) from fault


@contextlib.contextmanager
def _folder_with(target: str, files: Mapping[str, str | bytes]) -> Iterator[Path]:
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(_temporary_folder())
            for name, content in files.items():
                Path(folder, name).write_bytes(
                    content.encode() if isinstance(content, str) else content
                )
        except OSError as error:
            raise no_space(target, error) from error
        yield Path(folder)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder that forks leave alone as they end: see `dicp.private_files.remove_with`."""
    folder = tempfile.mkdtemp(prefix="dicp-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def no_space(target: str, error: OSError) -> ToolchainError:
    """The error for a temporary folder that cannot be written."""
    return ToolchainError(
        target, "a temporary folder", error.strerror or str(error),
        "Set TMPDIR to a folder that can be written and has space left.",
    )  # fmt: skip


def _built(path: Path) -> bytes:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BUILT:
            raise _Unusable("the compiler wrote something else than a shared object")
        return path.read_bytes()
    except OSError as error:
        raise _Unusable(f"the shared object cannot be read: {error}") from error


# ---- running a tool ------------------------------------------------------------------------------


def run_tool(
    command: Sequence[str],
    folder: Path | None,
    seconds: float,
    *,
    errors: int = subprocess.STDOUT,
    stop: threading.Event | None = None,
) -> Result:
    """Run a program without a shell, in its own session: keyboard interrupts reach only this
    process, and the program's child processes are killed with it. On Linux they end with this
    process, too, however that ends.

    Raises _Unusable where it cannot be started or does not end in time.
    """
    guard = _ended_with_parent()
    try:
        process = subprocess.Popen(
            [*guard, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors, start_new_session=True, env=tools_environment(),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise _Unusable(f"it cannot be started: {error}") from error
    try:
        output = _output_of(process, _Limit(seconds, stop))
    except BaseException:
        _end(process)
        raise
    finally:
        assert process.stdout is not None
        process.stdout.close()
    text = output.decode(errors="replace")
    if guard and process.returncode in _NOT_STARTED:
        raise _Unusable(f"it cannot be started: {text.strip()}")
    return Result(process.returncode, text)


@lru_cache(maxsize=1)
def _ended_with_parent() -> tuple[str, ...]:
    """The command before a tool's by which the system ends it and its children with this process.

    Util-linux asks for a signal at the parent's death, before it becomes the next program; that of
    coreutils passes it on to all processes of its group, and has no time limit with 0. In Python,
    code between fork and exec may deadlock if there are threads. Empty where they are missing.
    """
    setpriv, timeout = shutil.which("setpriv"), shutil.which("timeout")
    if setpriv is None or timeout is None:
        return ()
    found = (setpriv, "--pdeathsig", "TERM", timeout, "--kill-after=1", "0")
    try:
        tried = subprocess.run(
            [*found, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=VERSION_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return found if tried.returncode == 0 else ()


class _Limit:
    """Until when a tool may run: for some seconds, or until an event is set."""

    def __init__(self, seconds: float, stop: threading.Event | None) -> None:
        self.seconds, self.stop = seconds, stop
        self.deadline = time.monotonic() + seconds

    def check(self) -> None:
        """Raises _Unusable where the tool is to be ended."""
        if self.stop is not None and self.stop.is_set():
            raise _Unusable("it was interrupted")
        if time.monotonic() > self.deadline:
            raise _Unusable(f"it did not end in time ({self.seconds:g} seconds), and was killed")


def _output_of(process: subprocess.Popen[bytes], limit: _Limit) -> bytes:
    assert process.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            piece = (
                os.read(process.stdout.fileno(), 1 << 16) if ready.select(_LOOK_SECONDS) else None
            )
            output += piece or b""
            if piece == b"" or (piece is None and process.poll() is not None):
                break  # closed; or held open by processes it left running
            limit.check()
            if len(output) > _MAX_OUTPUT:
                raise _Unusable("it prints without end")
    while process.poll() is None:
        limit.check()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
    return bytes(output)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- loading -------------------------------------------------------------------------------------


def load_library(
    target: str,
    entry: Entry,
    symbols: Collection[str],
    *,
    name: str = OUTPUT,
    mode: int = ctypes.DEFAULT_MODE,
) -> ctypes.CDLL:
    """The shared object in a cache entry, checked, from disk or else from memory.

    Raises ToolchainError, and removes an entry that cannot be loaded.
    """
    content, path = entry.read(name), entry.path_on_disk(name)
    _check_loadable(target, content, symbols)
    if path is None or "$" in str(path):  # the loader expands $ORIGIN and the like
        return load_content(target, content, symbols, mode=mode)
    try:
        return ctypes.CDLL(str(path), mode)
    except OSError as error:
        # A missing path: another process cleared the cache, or it is too long for a loader.
        if os.path.lexists(path):
            reason = str(error).removeprefix(f"{path}: ")
            _warn_once(
                f"kernels in {str(path.parents[3])!r} are loaded from memory, because the loader "
                f"refuses them: {reason}. Point DICP_CACHE_DIR (option cache_dir) at a folder on a "
                "file system that is not mounted noexec."
            )
    try:
        return load_content(target, content, symbols, mode=mode)
    except ToolchainError:
        entry.discard()  # else it would fail again once the compiler is fixed
        raise


def load_content(
    target: str, content: bytes, symbols: Collection[str], *, mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL:
    """A shared object without a file. Raises ToolchainError."""
    _check_loadable(target, content, symbols)
    try:
        return _from_memory(content, mode)
    except OSError as error:
        trouble = error
    try:
        with _temporary_folder() as folder:
            path = Path(folder, OUTPUT)
            path.write_bytes(content)
            return ctypes.CDLL(str(path), mode)
    except OSError as error:
        raise ToolchainError(
            target, "to load compiled code", f"from memory: {trouble}; from a file: {error}",
            "Check that the compiler links all that its flags name; else point DICP_CACHE_DIR at a "
            "folder with space left that is not mounted noexec.",
        ) from error  # fmt: skip


def address_of(target: str, content: bytes, symbol: str) -> int:
    """Where a function of a shared object stands, which is loaded for good.

    Raises ToolchainError.
    """
    library = load_content(target, content, (symbol,))
    found = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    assert found is not None
    return found


def _check_loadable(target: str, content: bytes, symbols: Collection[str]) -> None:
    if fault := fault_of(content, symbols):
        raise ToolchainError(
            target, "a compiled library", fault,
            "Remove it with `python -m dicp cache clear`, and compile again.",
        )  # fmt: skip


def _from_memory(content: bytes, mode: int) -> ctypes.CDLL:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory")
    descriptor = os.memfd_create(OUTPUT)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(_new_name(descriptor), mode)
    finally:
        os.close(descriptor)


def _new_name(descriptor: int) -> str:
    """A path of an open file that no other file ever had.

    The loader returns an already loaded library for an equal path, and descriptor numbers are
    reused. So a random number is encoded in steps "." and "", which do not change the target.
    """
    steps = "/".join("." if bit == "1" else "" for bit in f"{secrets.randbits(64):064b}")
    return f"/proc/self/fd/{steps}/{descriptor}"


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
