"""What stands around the kernels: streams, devices, compile processes, PyTorch's wrappers."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from recorder import TritonRecorder, record
from test_triton_launch import Named, StandIn, first_kernel, job, plan_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dicp import torch_private
from dicp.cache import Cache
from dicp.compare import Rule, assert_matches
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import CompilerError
from dicp.gpu.launch import Device, StreamPool
from dicp.vendor.triton import builder, simulator
from dicp.vendor.triton.builder import Builder, Workers
from dicp.vendor.triton.driver import Driver

# ---- streams and devices -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the current stream is said to be recorded."""
    state = {"on": False}
    monkeypatch.setattr(torch_private, "capturing", lambda: state["on"])
    return state


def test_a_stream_takes_again_what_it_gave_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = {"stream": 1}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_private, "current_stream", lambda device: current["stream"])
    pool = StreamPool(torch.device("cpu"))
    block = pool.take(100)
    pool.give(block)
    current["stream"] = 2
    other = pool.take(100)
    assert other is not block
    pool.give(other)
    current["stream"] = 1
    assert pool.take(100) is block
    assert all(pool.take(100) is not known for known in (block, other))


def test_a_larger_workspace_takes_the_place_of_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many graphs take turns, each run finds the one block that is large enough."""
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pool, seen = StreamPool(torch.device("cpu")), []
    for size in (100, 200, 300, 100, 200, 300):
        block = pool.take(size)
        seen.append(block.data_ptr())
        pool.give(block)
        assert sum(map(len, pool._free.values())) == 1
    assert len(set(seen[2:])) == 1


def test_what_a_program_records_itself_works_in_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, recording: dict[str, bool]
) -> None:
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pool = StreamPool(torch.device("cpu"))
    before = pool.take(100)
    pool.give(before)
    recording["on"] = True
    recorded = pool.take(100)
    pool.give(recorded)
    recording["on"] = False
    assert recorded is not before and pool.take(100) is before
    assert pool.take(100) is not recorded and recorded.untyped_storage().nbytes()


def test_kernels_are_launched_on_their_device_and_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [0]
    where: list[int] = []

    class Entering:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Entering)
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 70 + device)
    gpu = StandIn()
    launch = gpu.cuLaunchKernel.run
    gpu.cuLaunchKernel.run = lambda *args: (where.append(current[-1]), launch(*args))[1]
    plan = plan_of(torch.relu, torch.ones(64, 64))
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    segment = Device(plan, Named(), Driver(gpu), 1).segment([first_kernel(plan)], {}, table, None)
    assert segment.run() == 0
    assert [seen[4] for seen in gpu.launches] == [71]
    assert where == [1] and current == [0]


# ---- compile processes ---------------------------------------------------------------------------


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


def test_no_more_processes_than_are_allowed(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    at_once, pair = threading.Lock(), threading.Barrier(2, timeout=60)

    class Counted:
        messages: list[str] = []

        def __init__(self) -> None:
            with at_once:
                started.append(self)

        def ask(self, request: Any) -> dict[str, Any]:
            pair.wait()
            threading.Event().wait(0.02)  # a third one would be asked meanwhile
            return {"binary": "", "entry": "copy", "shared": 0, "warps": 4}

        def waits(self) -> bool:
            return True

        def kill(self) -> None:
            started.remove(self)

    monkeypatch.setattr(builder, "_Process", Counted)
    jobs = [job(axes={"x": {"size": "s0", "block": 2**k, "masked": True}}) for k in range(5, 11)]
    Builder(Cache.open(Config(cache_dir=tmp_path)), workers, 2).build(jobs)
    assert len(started) == 2


def test_workers_do_not_change_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that set a variable for their children would free what the other's child reads,
    and restore each other's value."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    starting, given, start = threading.Barrier(2, timeout=60), [], subprocess.Popen

    def wait_for_the_other(*args: Any, **options: Any) -> subprocess.Popen[str]:
        starting.wait()
        given.append((os.environ["TRITON_INTERPRET"], options["env"]["TRITON_INTERPRET"]))
        return start(*args, **options)

    monkeypatch.setattr(builder.subprocess, "Popen", wait_for_the_other)
    with ThreadPoolExecutor(2) as pool:
        for process in pool.map(lambda _: builder._Process(), range(2)):
            process.kill()
    assert given == [("1", "0")] * 2 and os.environ["TRITON_INTERPRET"] == "1"


def test_a_system_that_starts_no_process_is_named(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(builder.subprocess, "Popen", refuse)
    workers.warm_up(1)
    with pytest.raises(CompilerError, match="process cannot be started: .*temporarily unavailable"):
        Builder(Cache.open(Config(cache_dir=tmp_path)), workers, 1).build([job()])


def test_workers_that_are_busy_are_not_started_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    class Counted:
        def __init__(self) -> None:
            started.append(self)

        def kill(self) -> None:
            started.remove(self)

    monkeypatch.setattr(builder, "_Process", Counted)
    workers.warm_up(2)
    busy = workers._idle.get(), workers._idle.get()
    workers.warm_up(2)
    assert len(started) == 2 and workers._idle.empty()
    for process in busy:
        workers._idle.put(process)
    workers.close()
    workers.warm_up(2)
    assert len(started) == 2


def test_a_worker_whose_answer_nobody_waited_for_is_ended(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next request would be given this one's answer."""
    workers.warm_up(1)
    idle = workers._idle.get()
    workers._idle.put(idle)

    def interrupted(request: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(idle, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workers.compile(job().request(job().blocks()))
    assert idle.process.poll() is not None and workers._idle.empty()
    assert not Path(idle.folder.name).exists()


def test_a_worker_that_hangs_is_killed_after_the_time_of_a_compilation(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "COMPILE_SECONDS", 0.2)
    workers.warm_up(1)
    idle = workers._idle.get()
    workers._idle.put(idle)
    idle.process.send_signal(signal.SIGSTOP)
    dying = threading.Timer(10, idle.process.kill)  # were it waited for, it would die at last
    dying.start()
    answer = workers.compile(job().request(job().blocks()))
    dying.cancel()
    assert (
        answer["error"] == "error: the compiler did not end in time (0.2 seconds), and was killed"
    )
    assert idle.process.poll() is not None and workers._idle.empty()


def test_a_worker_ends_with_its_input(workers: Workers) -> None:
    workers.warm_up(1)
    worker = workers._idle.get()
    worker.process.stdin.close()
    assert worker.process.wait(60) == 0 and not Path(worker.folder.name).exists()


WARM = """
import sys
from pathlib import Path
import dicp.torch_private  # PyTorch itself loads parts of triton

def loaded():
    return {name for name in sys.modules if name.split(".")[0] == "triton"}

before = loaded()
from dicp.cache import Cache
from dicp.config import Config
from dicp.vendor.triton import TritonTarget, builder
from dicp.gpu.build import Binary, Variant
from dicp.vendor.triton.builder import Job, Plan

def refuse(*args):
    raise AssertionError("a compile process")

builder._Process = refuse
cache = Cache.open(Config(cache_dir=Path(sys.argv[1])))
target = TritonTarget()
assert target.fingerprint(Config())
print(target._builder(cache, Config()).build([eval(sys.argv[2])])[0].entry)
assert loaded() == before, sorted(loaded() - before)[:3]
"""


def test_a_warm_start_neither_starts_nor_imports_the_compiler(
    tmp_path: Path, workers: Workers
) -> None:
    Builder(Cache.open(Config(cache_dir=tmp_path)), workers, 1).build([job()])
    done = subprocess.run(
        [sys.executable, "-c", WARM, str(tmp_path), repr(job())], capture_output=True, text=True,
        timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["copy"], done.stderr[-2000:]


def test_threads_make_one_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are made at once take each other's modules."""
    made: list[None] = []

    @lru_cache(maxsize=1)
    def make() -> object:
        made.append(None)
        threading.Event().wait(0.02)
        return object()

    monkeypatch.setattr(simulator, "_interpreter", make)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: simulator.interpreter(), range(4)))
    assert len(made) == len(found) == 1


# ---- PyTorch's library ---------------------------------------------------------------------


def test_convolutions_get_and_give_channels_last() -> None:
    """What cuDNN reads and writes as it is; the caller sees eager's layout."""

    def images(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, w, padding=1))
        return F.conv2d(x, u, padding=1)

    inputs = [torch.randn(s) for s in ((2, 16, 8, 8), (32, 16, 3, 3), (24, 32, 3, 3))]
    (program,) = record(images, *inputs, target=TritonRecorder()).programs
    buffers = program.serialized["buffers"]
    calls = [s for s in program.serialized["steps"] if s.get("call") == "aten::convolution."]
    touched = [[*(a["ref"] for a in s["args"][:2]), *s["outs"]] for s in calls]
    assert len(touched) == 2
    for slot in sum(touched, []):
        _, channels, _, columns = buffers[slot]["shape"]
        assert buffers[slot]["strides"][1:] == [1, columns * channels, channels]
    assert [s.get("call", "kernel") for s in program.serialized["steps"]].count("kernel") == 5
    (result,) = (buffers[o["ref"]] for o in program.serialized["outputs"])
    assert result["strides"] == [24 * 64, 64, 8, 1]


# ---- PyTorch's wrappers --------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


class Mixed(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype != torch.float64):
            return super().forward(x).to(x.dtype)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Result and gradients of the second of two steps, with an update between them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for last in (False, True):
        optimizer.zero_grad()
        out = run(x)
        out.square().sum().backward()
        if not last:
            optimizer.step()
    found = [out, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


def check(
    model: nn.Module, folder: Path, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    backend = Backend("triton", cache_dir=folder / "cache")
    torch._dynamo.reset()
    plain, precise = copy.deepcopy(model), copy.deepcopy(model).double()
    eager = steps(plain, plain, x)
    truth = steps(precise, precise, x.double())
    mine = wrap(copy.deepcopy(model))
    got = steps(mine, torch.compile(mine, backend=backend), x)
    assert len(got) == 7 and len(backend.reports) >= 2
    for a, b, c in zip(got, eager, truth, strict=True):
        assert_matches(a, b, c, rule=Rule(floor=8.0, strides=False))


@pytest.mark.parametrize("kind", [Block, Checkpointed, Mixed])
def test_training(kind: type[nn.Module], tmp_path: Path) -> None:
    check(kind(), tmp_path)


@pytest.mark.usefixtures("group")
def test_data_parallel_training(tmp_path: Path) -> None:
    check(Block(), tmp_path, DistributedDataParallel)


@pytest.mark.usefixtures("group")
def test_sharded_training(tmp_path: Path) -> None:
    def shard(model: nn.Module) -> nn.Module:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    check(Block(), tmp_path, shard)
