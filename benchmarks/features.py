"""Features that training and serving on a GPU need, each tried once and compared with eager."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOLERANCE = {"rtol": 2e-2, "atol": 2e-3}
WIDTH = 128


class Block(nn.Module):
    """Linear layers, a norm and an activation: every kind of kernel, and library calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Setting:
    """A model and inputs on a device, and one backend."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block()).to(device)
        self.x = torch.randn(64, WIDTH, device=device)

    def compile(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend=self.backend, **options)

    def gradients(self, run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
        """Of a loss on the output, with the output first."""
        model.zero_grad(set_to_none=True)
        out = run(self.x)
        out.float().square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    def same_training(self, wrap: Callable[[nn.Module], Any] = lambda model: model) -> None:
        """Three steps of the compiled model give eager's outputs and gradients."""
        expected = self.gradients(wrap(self.model), self.model)
        model = copy.deepcopy(self.model)
        run = self.compile(wrap(model))
        for _ in range(3):
            same(self.gradients(run, model), expected)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE)


def training(s: Setting) -> None:
    s.same_training()


def autocast(s: Setting) -> None:
    def wrap(model: nn.Module) -> Any:
        def run(x: Tensor) -> Tensor:
            with torch.autocast(s.device, torch.bfloat16):
                return model(x)

        return run

    s.same_training(wrap)


def checkpointing(s: Setting) -> None:
    s.same_training(lambda model: lambda x: model[1](checkpoint(model[0], x, use_reentrant=False)))


def dynamic_shapes(s: Setting) -> None:
    run = s.compile(s.model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 64, 1000, 17):
            x = torch.randn(rows, WIDTH, device=s.device)
            same(run(x), s.model(x))


def other_stream(s: Setting) -> None:
    run = s.compile(s.model)
    with torch.no_grad():
        expected = s.model(s.x * 3)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = s.x
            for _ in range(50):  # work that a launch on another stream would overtake
                x = x + 0.04 * s.x
            got = run(x)
        torch.cuda.current_stream().wait_stream(stream)
        same(got, expected)


def other_thread(s: Setting) -> None:
    """A thread whose first work on the device is a compiled graph."""
    run = s.compile(lambda x: F.gelu(x) * 2 + 1)
    found: list[Tensor] = [run(s.x)]
    thread = threading.Thread(target=lambda: found.append(run(s.x)))
    thread.start()
    thread.join()
    same(found[1], found[0])


def misaligned_input(s: Setting) -> None:
    run = s.compile(lambda x: torch.softmax(x, -1) + 1)
    whole = torch.randn(64 * WIDTH + 8, device=s.device)
    for offset in (0, 1, 2, 5):
        x = whole[offset : offset + 64 * WIDTH].view(64, WIDTH)
        same(run(x), torch.softmax(x, -1) + 1)


def dropout(s: Setting) -> None:
    run = s.compile(lambda x: F.dropout(x, 0.25))
    x = torch.ones(1 << 20, device=s.device)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    torch.manual_seed(1)
    assert torch.equal(run(x), first) and not torch.equal(first, second)
    kept = float((first != 0).float().mean())
    assert abs(kept - 0.75) < 0.01 and abs(float(first.mean()) - 1) < 0.01, kept


def optimizer_step(s: Setting) -> None:
    """Adam's step, compiled, writes parameters and state in place."""
    results = []
    for compiled in (False, True):
        model = copy.deepcopy(s.model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=s.device == "cuda")
        step = s.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(3):
            s.gradients(model, model)
            step()
        results.append([p.detach().clone() for p in model.parameters()])
    same(results[1], results[0])


def recorded(s: Setting) -> None:
    """mode="reduce-overhead": replayed with new inputs, results kept by the caller, no fallback."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        run = s.compile(s.model, mode="reduce-overhead")
        inputs = [torch.randn_like(s.x) for _ in range(6)]
        results = [run(x) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            same(result, s.model(x))
    reasons = [str(w.message) for w in caught if "CUDA graph" in str(w.message)]
    assert not reasons, reasons[0]


def recorded_random(s: Setting) -> None:
    run = s.compile(lambda x: F.dropout(x, 0.5), mode="reduce-overhead")
    x = torch.ones(1 << 16, device=s.device)
    draws = [run(x) for _ in range(6)]
    assert all(not torch.equal(a, b) for a, b in zip(draws, draws[1:], strict=False))


def recorded_mutation(s: Setting) -> None:
    def count(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return x * 2

    run = s.compile(count, mode="reduce-overhead")
    total, expected = (torch.zeros(WIDTH, device=s.device) for _ in range(2))
    for k in range(6):
        x = torch.full((4, WIDTH), float(k), device=s.device)
        same(run(x, total), x * 2)
        expected += x.sum(0)
    same(total, expected)


def recorded_training(s: Setting) -> None:
    expected = s.gradients(s.model, s.model)
    model = copy.deepcopy(s.model)
    run = s.compile(model, mode="reduce-overhead")
    for _ in range(5):
        same(s.gradients(run, model), expected)


def tuned_products(s: Setting) -> None:
    """mode="max-autotune": products and their epilogues, by either kernel."""
    model, x = s.model.to(torch.bfloat16), s.x.to(torch.bfloat16)
    with torch.no_grad():
        run = s.compile(model, mode="max-autotune-no-cudagraphs")
        torch.testing.assert_close(run(x), model(x), rtol=3e-2, atol=3e-2)


@contextlib.contextmanager
def one_process_group(s: Setting) -> Iterator[None]:
    """A group of one rank, over NCCL on a GPU."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        kind = "nccl" if s.device == "cuda" else "gloo"
        dist.init_process_group(kind, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def data_parallel(s: Setting) -> None:
    from torch.nn.parallel import DistributedDataParallel

    expected = s.gradients(s.model, s.model)
    with one_process_group(s):
        model = DistributedDataParallel(copy.deepcopy(s.model))
        run = s.compile(model)
        for _ in range(3):
            same(s.gradients(run, model), expected)


def fully_sharded(s: Setting) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = s.gradients(s.model, s.model)
    with one_process_group(s):
        model = copy.deepcopy(s.model)
        mesh = init_device_mesh(s.device, (1,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        run = s.compile(model)
        for _ in range(3):
            found = s.gradients(run, model)
            same([getattr(g, "full_tensor", lambda g=g: g)() for g in found], expected)


ANYWHERE = (
    training, autocast, checkpointing, dynamic_shapes, misaligned_input, dropout, other_thread,
    optimizer_step, data_parallel, fully_sharded,
)  # fmt: skip
ON_A_GPU = (other_stream, recorded, recorded_random, recorded_mutation, recorded_training,
            tuned_products)  # fmt: skip
FEATURES = {feature.__name__: feature for feature in (*ANYWHERE, *ON_A_GPU)}


def names(device: str) -> list[str]:
    """The features that can be tried on a device."""
    wanted = ANYWHERE if device == "cpu" else (*ANYWHERE, *ON_A_GPU)
    return [feature.__name__ for feature in wanted]


def measure(feature: str, backend: str, device: str) -> str:
    """Try one feature; raises its error."""
    torch.compiler.reset()
    FEATURES[feature](Setting(backend, device))
    if device == "cuda":
        torch.cuda.synchronize()
    return "as eager"
