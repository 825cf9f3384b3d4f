"""Results stay in a C locale, with little memory, across forks and without the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, shutil, sys, threading
import torch
WHAT, FOLDER = sys.argv[1:]

def compiled(k):
    return torch.compile(lambda x: torch.exp(x) * k + x.sum(), backend="cpugraph")

def check(k):
    x = torch.randn(50)
    assert torch.allclose(compiled(k)(x), torch.exp(x) * k + x.sum(), atol=1e-4)

if WHAT == "fork":
    # The child has its own first compilation while another thread's is under way.
    worker = threading.Thread(target=check, args=(2.0,))
    worker.start()
    child = os.fork()
    if child == 0:
        x = torch.randn(50)
        assert torch.equal(x + 1, 1 + x)
        os._exit(0)
    worker.join()
    assert os.waitpid(child, 0)[1] == 0
elif WHAT == "memory":
    check(1.0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
elif WHAT == "deleted":
    run, x = compiled(3.0), torch.randn(50)
    first = run(x)
    shutil.rmtree(FOLDER)
    assert torch.equal(run(x), first)
check(4.0)
print("right")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and fork")
@pytest.mark.parametrize("what", ["locale", "fork", "memory", "deleted"])
def test_results_stay(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cache"
    given = {"DICP_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    if what == "locale":
        given |= {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, what, folder],
        env={**os.environ, **given}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-2000:]
