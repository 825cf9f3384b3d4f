"""Compilers that misbehave, and shared objects that must not be loaded: `dicp.toolchain`."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import alive, gone, script

from dicp import toolchain as host
from dicp.cache import Cache, key_of
from dicp.elf import fault_of
from dicp.errors import CacheWarning, CompilerError, ToolchainError
from dicp.toolchain import (
    OUTPUT,
    compile_shared,
    find_compiler,
    load_content,
    load_library,
    run_tool,
)

SOURCE = 'extern "C" int seven() { return 7; }\nextern "C" int printf(const char*, ...);\n'
FLAGS = ("-shared", "-fPIC", "a.cpp", "-o", OUTPUT)


@pytest.fixture(scope="module")
def compiler() -> str:
    (path, *_), _ = find_compiler("cpu", "")
    return path


@pytest.fixture(scope="module")
def library(compiler: str) -> bytes:
    return compile_shared("cpu", [compiler, *FLAGS], {"a.cpp": SOURCE}, ["seven"])


# ---- shared objects ------------------------------------------------------------------------------


def changed(content: bytes, form: str, offset: int, value: int) -> bytes:
    size = struct.calcsize(form)
    return content[:offset] + struct.pack(form, value) + content[offset + size :]


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "it is not a shared object"),
    "text": (lambda b: b"#!/bin/sh\nexit\n", "it is not a shared object"),
    "half": (lambda b: b[: len(b) // 2], "it is cut off"),
    "one byte less": (lambda b: b[:-1], "it is cut off"),
    "header alone": (lambda b: b[:64], "it is cut off"),
    "start of the header": (lambda b: b[:5], "it is cut off or damaged"),
    "another processor": (lambda b: changed(b, "H", 18, 243), "it was built for another machine"),
    "32 bits": (lambda b: changed(b, "B", 4, 1), "it was built for another machine"),
    "other byte order": (lambda b: changed(b, "B", 5, 2), "it was built for another machine"),
    "no byte order": (lambda b: changed(b, "B", 5, 9), "it is cut off or damaged"),
    "a program's object": (lambda b: changed(b, "H", 16, 1), "it is not a shared object"),
    "segments far away": (lambda b: changed(b, "Q", 32, 1 << 40), "it is cut off or damaged"),
    "no segments": (lambda b: changed(b, "H", 56, 0), "it has nothing to load"),
    "rows of nothing": (lambda b: changed(b, "H", 54, 0), "it is cut off or damaged"),
    "zeros after the header": (lambda b: b[:64] + bytes(len(b) - 64), "it has nothing to load"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are ELF files")
@pytest.mark.parametrize("name", FAULTS)
def test_a_library_that_cannot_be_loaded(library: bytes, name: str) -> None:
    spoil, reason = FAULTS[name]
    assert fault_of(library, ["seven"]) == ""
    assert fault_of(spoil(library), ["seven"]).startswith(reason)
    with pytest.raises(ToolchainError, match="target 'cpu' needs a compiled library"):
        load_content("cpu", spoil(library), ["seven"])


def test_a_library_without_the_kernels(library: bytes) -> None:
    assert fault_of(library, ["seven", "kernel", "b", "printf"]) == (
        "it does not define b, kernel, printf"
    )


def test_damage_anywhere_is_no_crash_of_the_reader(library: bytes) -> None:
    """Whatever the bytes are, reading them ends, with an answer."""
    rng = random.Random(1)
    for _ in range(300):
        spoiled = bytearray(library[: rng.choice([len(library), rng.randrange(4096)])])
        for _ in range(rng.randrange(8)):
            place = rng.randrange(min(len(spoiled), 4096) or 1)
            spoiled[place : place + 1] = rng.randbytes(1)
        assert isinstance(fault_of(bytes(spoiled), ["seven"]), str)


# ---- compilers -----------------------------------------------------------------------------------

COMPILERS = {
    "no text": (r"head -c 5000 /dev/urandom; head -c 999 /dev/urandom >&2; exit 1", ""),
    "nothing": ("exit 0", "it ended with status 0 and wrote no unit.so"),
    "a folder": ("mkdir unit.so", "something else than a shared object"),
    "a link": ("ln -s /bin/sh unit.so", "something else than a shared object"),
    "a pipe": ("mkfifo unit.so", "something else than a shared object"),
    "a huge file": ("truncate -s 64G unit.so", "something else than a shared object"),
    "text": ("echo text > unit.so", "it is not a shared object"),
    "half": ("cp $LIBRARY unit.so; truncate -s 6000 unit.so", "it is cut off"),
    "no kernels": ("cp $LIBRARY unit.so", "it does not define eight"),
    "a crash": ("kill -SEGV $$", "ended by signal 11"),
    "nothing readable": ("cp $LIBRARY unit.so; chmod 0 unit.so; rm -r .", ""),
    "words without end": ("yes", "it prints without end"),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bytes, name: str
) -> None:
    monkeypatch.setattr(host, "_MAX_OUTPUT", 1 << 16)
    body, reason = COMPILERS[name]
    (tmp_path / "library").write_bytes(library)
    bad = script(tmp_path / "bad", body.replace("$LIBRARY", str(tmp_path / "library")))
    cache = Cache(tmp_path / "cache", 1 << 30)

    def build() -> dict[str, bytes]:
        return {OUTPUT: compile_shared("cpu", [bad], {"a.cpp": SOURCE}, ["eight"])}

    with pytest.raises(CompilerError) as caught:
        cache.get_or_build("unit", key_of(name), build)
    assert reason in str(caught.value)
    assert cache.info().entries == 0, "nothing bad is stored"


def test_an_environment_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ looks for the linker in PATH, which services and schedulers may leave unset."""
    monkeypatch.delenv("PATH")
    command, _ = host.find_compiler("cpu", "g++")
    parts = [*command, "-shared", "-fPIC", "a.cpp", "-o", OUTPUT]
    assert compile_shared("cpu", parts, {"a.cpp": SOURCE}, ["seven"])


def test_what_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_program").write_bytes(b"\x7fELF not really")
    (tmp_path / "no_program").chmod(0o755)
    cases = {
        str(tmp_path / "no_program"): "it cannot be started",
        script(tmp_path / "waits", "read line; echo $line"): "--version fails",
        script(tmp_path / "silent", ""): "--version fails",
    }
    for command, reason in cases.items():
        with pytest.raises(ToolchainError, match=f"needs {command}: .*{reason}"):
            find_compiler("cpu", command)
    hangs = script(tmp_path / "hangs", "sleep 60")
    reason = r"it did not end in time \(0.3 seconds\), and was killed"
    for name, value in (("VERSION_SECONDS", 0.3), ("run_tool", None)):
        monkeypatch.setattr(host, name, value)  # a failure is kept until the program changes
        with pytest.raises(ToolchainError, match=f"needs {hangs}: .*{reason}"):
            find_compiler("cpu", hangs)
    monkeypatch.undo()
    script(tmp_path / "hangs", "printf 'good \\377 1.0'")
    os.utime(tmp_path / "hangs", (1, 1))
    assert find_compiler("cpu", str(tmp_path / "hangs"))[1] == "good \N{REPLACEMENT CHARACTER} 1.0"


def hanging(folder: Path) -> tuple[str, Path]:
    """A tool that starts another one and never ends; and the file that lists both."""
    log = folder / "pids"
    body = f"sleep 60 &\necho $$ $! > {log}.new; mv {log}.new {log}; wait"
    return script(folder / "hangs", body), log


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["time", "stop", "interrupt"])
def test_a_tool_that_hangs_leaves_no_process(tmp_path: Path, how: str) -> None:
    command, log = hanging(tmp_path)
    stop = threading.Event()

    def end() -> None:
        while not log.exists():
            time.sleep(0.01)
        main = threading.main_thread().ident or 0
        stop.set() if how == "stop" else signal.pthread_kill(main, signal.SIGINT)

    if how == "interrupt" and threading.current_thread() is not threading.main_thread():
        pytest.skip("interrupts go to the main thread")
    if how != "time":
        threading.Thread(target=end).start()
    error = KeyboardInterrupt if how == "interrupt" else host._Unusable
    with pytest.raises(error):
        run_tool([command], tmp_path, 0.5 if how == "time" else 30, stop=stop)
    assert gone(log), "both are ended"


PARENT = """
import pathlib, sys, threading
from dicp.toolchain import run_tool
run = lambda: run_tool([sys.argv[1]], pathlib.Path(sys.argv[2]), 60)
threading.Thread(target=run).start() if sys.argv[3] == "thread" else run()
"""


@pytest.mark.skipif(not host._ended_with_parent(), reason="Linux with util-linux and coreutils")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_tool_ends_with_the_process_that_runs_it(
    tmp_path: Path, number: signal.Signals, where: str
) -> None:
    command, log = hanging(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, command, tmp_path, where])
    while not log.exists():
        time.sleep(0.01)
    parent.send_signal(number)
    assert parent.wait(30) == -number
    assert gone(log), "both are ended"


def test_a_tool_may_leave_a_server_running(tmp_path: Path) -> None:
    """Such as a compiler cache's: it keeps our pipe open, and nobody waits for that."""
    log = tmp_path / "pids"
    server = script(tmp_path / "server", f"sleep 60 &\necho $! > {log}; echo done")
    began = time.perf_counter()
    assert run_tool([server], tmp_path, 30) == host.Result(0, "done\n")
    assert time.perf_counter() - began < 5 and len(alive(log)) == 1
    os.kill(int(log.read_text()), signal.SIGKILL)


def test_an_interrupt_of_the_terminal_does_not_reach_the_compiler(tmp_path: Path) -> None:
    tool = script(tmp_path / "tool", "cat /proc/$$/stat")
    fields = run_tool([tool], tmp_path, 30).output.rpartition(")")[2].split()
    assert int(fields[3]) != os.getsid(0), "a session of its own"


# ---- folders -------------------------------------------------------------------------------------


def test_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ToolchainError, match="needs a temporary folder.*TMPDIR"):
        compile_shared("cpu", ["true"], {"a.cpp": SOURCE}, [])


@pytest.mark.parametrize("name", ["$ORIGIN", "${LIB} $PLATFORM", "a:b;c d"])
def test_paths_that_the_loader_reads_otherwise(tmp_path: Path, library: bytes, name: str) -> None:
    cache = Cache(tmp_path / name, 1 << 30)
    entry = cache.put("unit", key_of(name), {OUTPUT: library})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_library("cpu", entry, ["seven"]).seven() == 7


@pytest.mark.parametrize(("length", "warned"), [(4000, 0), (5000, 1)])
def test_a_path_that_is_too_long(tmp_path: Path, library: bytes, length: int, warned: int) -> None:
    """The first is too long for a library inside the folder, the second for the folder."""
    parts = ["x" * 99] * (length // 100 - 2)
    folder = tmp_path.joinpath(*parts)
    folder = folder / ("y" * (length - len(str(folder)) - 1))
    cache = Cache(folder, 1 << 30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            entry = cache.get_or_build("unit", key_of("long"), lambda: {OUTPUT: library})
            assert load_library("cpu", entry, ["seven"]).seven() == 7
    messages = [str(w.message) for w in caught]
    assert len(messages) == warned and all("File name too long" in m for m in messages)


def test_a_library_that_vanishes_is_loaded_from_memory(tmp_path: Path, library: bytes) -> None:
    cache = Cache(tmp_path / "cache", 1 << 30)
    entry = cache.put("unit", key_of("gone"), {OUTPUT: library})
    cache.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_library("cpu", entry, ["seven"]).seven() == 7


def test_libraries_in_memory_are_told_apart(compiler: str) -> None:
    """Numbers of open files come again, and loaders know libraries by their names."""
    found = []
    for k in range(4):
        text = SOURCE.replace("7", str(k))
        content = compile_shared("cpu", [compiler, *FLAGS], {"a.cpp": text}, ["seven"])
        found.append(load_content("cpu", content, ["seven"]))
    assert [library.seven() for library in found] == [0, 1, 2, 3]
    assert len(os.listdir("/proc/self/fd")) < 500


def test_a_file_system_that_does_not_execute(
    tmp_path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for a folder, and kernels from memory; an error where that does not go either."""
    cache = Cache(tmp_path / "cache", 1 << 30)
    entry = cache.put("unit", key_of("noexec"), {OUTPUT: library})
    load = ctypes.CDLL

    def refuse(path: str, mode: int = 0) -> ctypes.CDLL:
        if str(path).startswith("/proc/self/fd"):
            return load(path, mode)
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.warns(CacheWarning, match="failed to map segment.*noexec") as caught:
        for _ in range(3):
            assert load_library("cpu", entry, ["seven"]).seven() == 7
    assert len(caught) == 1
    monkeypatch.setattr(host, "_from_memory", refuse)
    with pytest.raises(ToolchainError, match="noexec"):
        load_library("cpu", entry, ["seven"])


def test_a_limit_of_file_sizes(tmp_path: Path, compiler: str, library: bytes) -> None:
    """Neither the compiler nor the cache can write: an error of ours, and nothing is stored."""
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from dicp.cache import Cache, key_of\n"
        "from dicp.errors import CompilerError, ToolchainError\n"
        "from dicp.toolchain import OUTPUT, compile_shared, load_library\n"
        "cache, text = Cache(Path(sys.argv[1]), 1 << 30), Path(sys.argv[3]).read_text()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "def build():\n"
        "    command = [sys.argv[2], '-shared', '-fPIC', 'a.cpp', '-o', OUTPUT]\n"
        "    return {OUTPUT: compile_shared('cpu', command, {'a.cpp': text}, ['seven'])}\n"
        "try:\n"
        "    cache.get_or_build('unit', key_of('a'), build)\n"
        "except (CompilerError, ToolchainError) as error:\n"
        "    print(type(error).__name__)\n"
        "entry = cache.put('unit', key_of('b'), {OUTPUT: Path(sys.argv[4]).read_bytes()})\n"
        "try:\n"
        "    print(load_library('cpu', entry, ['seven']).seven())\n"
        "except ToolchainError as error:\n"
        "    print(type(error).__name__)\n"
        "print(cache.info().entries)\n"
    )
    (tmp_path / "a.cpp").write_text(SOURCE)
    (tmp_path / "library").write_bytes(library)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "cache", compiler, tmp_path / "a.cpp",
         tmp_path / "library"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["CompilerError", "ToolchainError", "0"], done.stderr
    assert done.stderr.count("CacheWarning") == 1


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts")
def test_a_real_mount_that_is_full_or_does_not_execute(
    tmp_path: Path, compiler: str, library: bytes
) -> None:
    (tmp_path / "library").write_bytes(library)
    (tmp_path / "mount").mkdir()
    program = (
        "import sys, tempfile\n"
        "from pathlib import Path\n"
        "from dicp.cache import Cache, key_of\n"
        "from dicp.errors import CompilerError, ToolchainError\n"
        "from dicp.toolchain import OUTPUT, compile_shared, load_library\n"
        "mount, library = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()\n"
        "entry = Cache(mount / 'c', 1 << 30).put('unit', key_of('b'), {OUTPUT: library})\n"
        "found = load_library('cpu', entry, ['seven'])\n"
        "print(entry.path_on_disk(OUTPUT).exists(), found.seven())\n"
        "tempfile.tempdir = str(mount)\n"
        "try:\n"
        "    compile_shared('cpu', [sys.argv[3]], {'a.cpp': ' ' * 100000}, ['seven'])\n"
        "except (CompilerError, ToolchainError) as error:\n"
        "    print(type(error).__name__)\n"
    )
    mount = f"mount -t tmpfs -o size=64k,noexec,mode=0700 tmpfs {tmp_path / 'mount'}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} || exit 77; exec "$@"', "sh", sys.executable, "-c",
         program, tmp_path / "mount", tmp_path / "library", compiler],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode in (1, 77) and "CacheWarning" not in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr[-200:]}")
    assert done.stdout.split() == ["True", "7", "ToolchainError"], done.stderr
    assert done.stderr.count("CacheWarning") == 1 and "noexec" in done.stderr
