"""Programs that a server of the tests starts: arguments, streams, ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.forked import server
from support.processes import gone

PROGRAM = "import os, sys; print(sys.argv, os.getcwd(), os.environ['GIVEN']); "


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'last'); atexit.register(sys.stderr.write, 'x')",
         0, "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("teardown", [False, True])
def test_a_program_ends_as_python_does(
    teardown: bool, end: str, status: int, message: str, tmp_path: Path
) -> None:
    env = {**os.environ, "GIVEN": "value"}
    words = ["-c", PROGRAM + end, "an argument"]
    done = server().run(words, cwd=tmp_path, env=env, teardown=teardown)
    assert done.returncode == status and done.stderr.endswith(message), done.stderr
    shown = f"['-c', 'an argument'] {tmp_path} value\n" + ("last\n" if "last" in end else "")
    assert done.stdout == shown or status == -9


def test_scripts_modules_and_warnings(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "script.py").write_text("import beside; print(__name__, __file__, beside.VALUE)")
    done = server().run([tmp_path / "script.py"], check=True)
    assert done.stdout == f"__main__ {tmp_path / 'script.py'} 7\n"
    assert server().run(["-m", "beside"], cwd=tmp_path, check=True).stdout == ""
    warned = server().run(["-W", "error", "-c", "import warnings; warnings.warn('now')"])
    assert warned.returncode == 1 and warned.stderr.endswith("UserWarning: now\n")


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(TimeoutError):
        server().run(["-c", program], cwd=tmp_path, timeout=1)
    pid = (tmp_path / "pid").read_text()
    (tmp_path / "pids").write_text(f"{pid}\n")
    assert gone(tmp_path / "pids")


def test_shells_run_programs_by_a_command(tmp_path: Path) -> None:
    server().write_command(tmp_path / "python")
    script = "python -c 'import sys; print(sys.stdin.read()); sys.exit(4)' <<< text"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "text\n\n"), done.stderr
