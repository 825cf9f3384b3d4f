"""Python programs in processes of their own, in which PyTorch is already imported.

Importing it takes up to six seconds of a processor. A server imports it once and forks a process
for every program, which sets its arguments, variables, folder and streams, imports everything else
(dicp too) and ends like a process that Python starts. Only variables that PyTorch reads when it is
imported, such as OMP_NUM_THREADS, are the server's. This file is also the server, and the command
`python` of shell scripts.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from types import ModuleType

TORCH = ("torch", "numpy")
COMPILER = (
    *TORCH, "sympy", "torch._dynamo", "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd.autograd_cache", "torch._inductor.output_code", "typer",
    "rich.table", "jinja2", "platformdirs",
)  # fmt: skip
"""Third-party modules that a compilation imports."""


class Server:
    """Starts programs of one interpreter, with `modules` imported."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self.socket = Path(mkdtemp()) / "socket"
        command = [python, __file__, "serve", str(self.socket), *modules]
        # It ends with this process, whose end of the pipe is closed then.
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(
        self, arguments: Sequence[object], *, cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None, timeout: float = 280, check: bool = False,
        teardown: bool = False,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """As `subprocess.run` of the interpreter with these arguments, its output captured.

        teardown: whether the interpreter frees its modules in the end, which takes half a second.
        """
        words = list(map(str, arguments))
        request = {"arguments": words, "cwd": str(cwd or os.getcwd()), "teardown": teardown,
                   "env": dict(env or os.environ)}  # fmt: skip
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err, open(os.devnull) as nothing:
            streams = [stream.fileno() for stream in (nothing, out, err)]
            status = _asked(self.socket, request, streams, timeout)
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(words, status, out.read(), err.read())
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def close(self) -> None:
        """End the server; running programs continue."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.socket.parent)

    def write_command(self, path: Path) -> None:
        """A command that replaces the interpreter in shell scripts."""
        client = f"{sys.executable} -I -S {__file__} ask {self.socket}"
        path.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
        path.chmod(0o755)


@cache
def server(*modules: str) -> Server:
    """The server of this process's interpreter with these modules."""
    made = Server(sys.executable, modules, os.environ)
    atexit.register(made.close)
    return made


def _asked(
    path: Path, request: Mapping[str, object], streams: Sequence[int], timeout: float | None
) -> int:
    """The exit status of a program that a server starts; raises TimeoutError and ends it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        socket.send_fds(connection, [b"."], list(streams))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as replies:
            pid = int(replies.readline())
            connection.settimeout(timeout)
            try:
                return int(replies.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise


# ---- the server ----------------------------------------------------------------------------------


def _serve(path: str, modules: Sequence[str]) -> None:
    """Answers until the process that started the server ends; returns in programs' processes."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # programs need not scan these modules when they end
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            os._exit(0)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        with suppress(OSError):  # the client may have ended
            connection.sendall(f"{pid}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.sendall(f"{status}\n".encode())
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    run = partial(_start, request["arguments"], request["cwd"], request["env"])
    if request["teardown"]:
        return run()
    status = _status(run)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(run: Callable[[], None]) -> int:
    """The exit status of Python where a program returns or raises this."""
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _start(arguments: list[str], cwd: str, env: Mapping[str, str]) -> None:
    """Run a command line of Python."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for folder in site.getsitepackages():  # packages that were installed after the server started
        site.addsitedir(folder)
    importlib.invalidate_caches()
    path = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = path
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings._processoptions([arguments[1]])  # type: ignore[attr-defined]
        del arguments[:2]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv, sys.path = rest, [cwd, *sys.path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments if kind != "-c" else ["-c", *rest[1:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.path.insert(0, "" if kind == "-c" else str(Path(kind).resolve().parent))
    text, name = (rest[0], "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    if kind != "-c":
        main.__file__ = kind
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    if sys.argv[1] == "serve":
        _serve(sys.argv[2], sys.argv[3:])
    else:
        asked = {"arguments": sys.argv[3:], "cwd": os.getcwd(), "teardown": False,
                 "env": dict(os.environ)}  # fmt: skip
        sys.exit(_asked(Path(sys.argv[2]), asked, (0, 1, 2), None))
