"""Graphs that are dropped give everything back: native code, executables, Python objects."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dicp import Backend
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.loop.ir.kernel import Kernel
from dicp.loop.lowering import RuleTable
from dicp.loop.runtime.executable import LoopExecutable
from dicp.vendor.cpu import CpuTarget
from dicp.vendor.cpu.calibration import PROBLEMS
from dicp.vendor.cpu.target import rules_by

pytestmark = pytest.mark.usefixtures("shared_builds", "own_objects")
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


def mapped(folder: Path) -> int:
    """Parts of files under `folder` that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count(str(folder))


def alive() -> Counter[type]:
    gc.collect()
    kinds = (LoopExecutable, Kernel, fx.GraphModule)
    return Counter(kind for item in gc.get_objects() for kind in kinds if type(item) is kind)


def function(k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.softmax(x * (k + 0.5), -1).square().sum(-1)


@pytest.mark.sweep
@linux
def test_dropped_graphs_give_everything_back(tmp_path: Path) -> None:
    torch._dynamo.reset()
    start = alive()[LoopExecutable]
    backend = Backend("cpu", cache_dir=tmp_path)
    warm = torch.compile(function(99), backend=backend, dynamic=False)
    warm(torch.rand(3, 8, requires_grad=True)).sum().backward()
    before, kept = alive(), mapped(tmp_path)
    assert kept > 0
    compiled = [torch.compile(function(k), backend=backend, dynamic=False) for k in range(4)]
    for run in compiled:
        run(torch.rand(3, 8, requires_grad=True)).sum().backward()
    assert mapped(tmp_path) > kept, "each brings code of its own"
    assert alive()[LoopExecutable] == before[LoopExecutable] + 8
    del compiled, warm, run
    torch._dynamo.reset()
    assert alive()[LoopExecutable] == start
    assert mapped(tmp_path) == 0
    assert alive()[fx.GraphModule] <= before[fx.GraphModule]


@linux
def test_an_emulated_kernel_gives_its_memory_back(tmp_path: Path) -> None:
    """Stacks of the threads of a block, and records of the addresses that a launch accesses."""

    def anonymous() -> int:
        """KiB of memory that belongs to no file."""
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return int(re.search(r"Anonymous: *(\d+) kB", rollup)[1])  # type: ignore[index]

    def run(k: int) -> None:
        compiled = torch.compile(function(k), backend=backend, dynamic=False)
        compiled(torch.rand(256, 256))
        torch._dynamo.reset()
        gc.collect()

    backend = Backend("maca", cache_dir=tmp_path, maca_checked=True)
    run(99)
    before = anonymous()
    for k in range(2):
        run(k)
    assert mapped(tmp_path) == 0
    assert anonymous() - before < 24 << 10, "the records of two are 40 MiB at least"


class Routines(CpuTarget):
    """The host where every product goes to a routine, whose unit keeps memory from call to call."""

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        return rules_by(frozenset(PROBLEMS))


@linux
def test_routines_are_unloaded_with_their_graphs(tmp_path: Path) -> None:
    torch._dynamo.reset()
    start, config = alive()[LoopExecutable], Config(cache_dir=tmp_path)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, Routines(), config, lambda report: None)

    compiled = torch.compile(torch.matmul, backend=backend)
    x = torch.rand(200, 300)
    torch.testing.assert_close(compiled(x, x.T), x @ x.T)
    assert mapped(tmp_path) > 0
    del compiled
    torch._dynamo.reset()
    assert alive()[LoopExecutable] <= start and mapped(tmp_path) == 0


@linux
def test_code_that_runs_stays(tmp_path: Path) -> None:
    torch._dynamo.reset()
    start = alive()[LoopExecutable]
    made: list[Any] = []
    backend = Backend("cpu", cache_dir=tmp_path)

    def capture(gm: fx.GraphModule, inputs: Any) -> Any:
        made.append(backend(gm, inputs))
        return made[-1]

    fn, x = function(7), torch.rand(64, 4096)
    torch.compile(fn, backend=capture)(x)
    results: list[Tensor] = []
    runs, collected = Event(), Event()

    def run(compiled: Any) -> None:
        while not collected.is_set():
            results[:] = compiled(x)
            runs.set()

    thread = Thread(target=run, args=(made.pop(),))
    thread.start()
    torch._dynamo.reset()
    assert runs.wait(60)
    for _ in range(3):
        gc.collect()
    collected.set()
    thread.join()
    torch.testing.assert_close(results[-1], fn(x))
    del thread
    assert alive()[LoopExecutable] <= start and mapped(tmp_path) == 0
