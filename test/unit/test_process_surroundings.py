"""Results stay in a C locale, with little memory, across forks and without the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dicp.config import Config
from dicp.vendor.cpu.toolchain import find_toolchain

PROGRAM = """
import os, resource, shutil, sys, threading, time
import torch
WHAT, FOLDER = sys.argv[1:]

def compiled(k):
    return torch.compile(lambda größe: torch.exp(größe) * k + größe.sum(), backend="cpugraph")

def check(run, k):
    x = torch.randn(50)
    assert torch.allclose(run(x), torch.exp(x) * k + x.sum(), atol=1e-4)

known = compiled(1.0)
check(known, 1.0)
if WHAT == "fork":
    # A fork runs what is compiled, and ends as Python does, while its parent's compiler runs.
    right = []
    worker = threading.Thread(target=lambda: right.append(check(compiled(2.0), 2.0)))
    open("wait", "w").close()
    worker.start()
    while not os.path.exists("waits"):
        time.sleep(0.01)
    child = os.fork()
    check(known, 1.0)
    if child == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    os.remove("wait")
    worker.join()
    assert right
elif WHAT == "memory":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
elif WHAT == "deleted":
    shutil.rmtree(FOLDER)
    check(known, 1.0)
check(compiled(3.0), 3.0)
assert os.listdir(FOLDER)
print("right")
"""
COMPILER = """#!/bin/sh
cd {folder} && [ -e wait ] && touch waits
while [ -e wait ]; do sleep 0.05; done
cd "$OLDPWD" && exec {compiler} "$@"
"""


@pytest.mark.sweep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and fork")
@pytest.mark.parametrize("what", ["fork", "memory", "deleted"])
def test_results_stay_in_a_c_locale(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "Gedächtnis"
    given = {
        "DICP_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "LC_ALL": "C", "LANG": "C",
        "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
    }  # fmt: skip
    script, compiler = tmp_path / "program.py", tmp_path / "compiler"
    script.write_text(PROGRAM, encoding="utf-8")
    real = find_toolchain(Config()).compiler
    compiler.write_text(COMPILER.format(folder=tmp_path, compiler=real))
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, script, what, folder], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **given, "DICP_CXX": str(compiler)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-2000:]
