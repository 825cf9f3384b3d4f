"""`python -m benchmarks.sass`: the machine instructions of two GPU targets' kernels, compared.

No GPU is needed: kernels are compiled for sm_90 by Triton and by NVRTC (the package
nvidia-cuda-nvrtc) and disassembled by the nvdisasm that Triton brings. The shapes are such that no
kernel loops over a row, so that what is counted once is executed once: instructions of a thread,
times the threads of a block, divided by the elements of a block. Slow paths, as of a division,
count in full on both sides.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.serialize import evaluate_size
from dicp.target import Artifact, Executable, Source, Target
from dicp.vendor.maca import MacaTarget
from dicp.vendor.maca.toolchain import Nvrtc
from dicp.vendor.maca.units import unit_text
from dicp.vendor.triton import TritonTarget
from dicp.vendor.triton.builder import Builder, Plan, Workers
from dicp.vendor.triton.facts import GPU as NVIDIA

ARCH = 90
WAVE = 32
"""Lanes that a launch of the thread-by-thread target counts its warps in."""
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")
MOVED = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Modifier of a load or store of global memory -> the bytes it moves; without one, 4."""


def _half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


FUNCTIONS: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "softmax": (lambda x: x.softmax(-1), [_half(8192, 1024)]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        [_half(8192, 1024), _half(1024), _half(1024)],
    ),
    "gelu": (F.gelu, [_half(8192, 1024)]),
    "dropout_residual_norm": (
        lambda x, r, w, b: F.layer_norm(F.dropout(x, 0.1) + r, (1024,), w, b),
        [_half(8192, 1024), _half(8192, 1024), _half(1024), _half(1024)],
    ),
    "cross_entropy": (
        partial(F.cross_entropy, reduction="none"),
        [_half(8192, 1024), torch.zeros(8192, dtype=torch.int64)],
    ),
}


class _Kept(Target):
    """Records the programs of a target, which run operator by operator; a mixin before a target."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Any] = []

    def build(self, program: Any, source: Source, cache: Cache, config: Config) -> Artifact:
        self.programs.append(program)
        return Artifact(self.name, {}, {}, objects=("not stored",))

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        raise NotImplementedError("only compiled")

    def fingerprint(self, config: Config) -> str:
        return "kept"


class _Triton(_Kept, TritonTarget):
    """Programs of tiles."""


class _Threads(_Kept, MacaTarget):
    """Programs written thread by thread."""


@dataclass(frozen=True)
class Count:
    """The instructions that one program's kernels execute per element of the function's first
    input."""

    instructions: float
    bytes: float
    """Bytes that loads and stores of global memory move."""


def programs(target: _Kept, fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, given, target, _config(target), lambda report: None)

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    except Exception:
        if not target.programs:
            raise
    return target.programs


def _config(target: Target) -> Config:
    own = {"DICP_MACA_NVIDIA": str(ARCH)} if isinstance(target, _Threads) else {}
    return Config.from_env({"DICP_CACHE": "0", **own}, target.options)


def tiles_listings(program: Any) -> dict[str, list[str]]:
    """The instructions of each kernel that Triton compiles."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(cache_dir=Path(folder))
        workers = Workers()
        try:
            jobs = Plan(program.serialized, program.kernel_texts, ARCH).jobs()
            found = Builder(Cache.open(config), workers, config.jobs).build(jobs)
        finally:
            workers.close()
    return {job.name: _listing(binary.code) for job, binary in zip(jobs, found, strict=True)}


def threads_listings(program: Any) -> dict[str, list[str]]:
    """The instructions of each kernel that NVRTC compiles."""
    compiler = Nvrtc(ARCH, ("-DD_NARROW", "-DD_ALIGNED"))
    return {
        name: _listing(compiler.compile(unit_text({name: text}, {}), [name]))
        for name, text in program.kernel_texts.items()
    }


def _listing(code: bytes) -> list[str]:
    """The instructions of a kernel without the padding after its end."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(NVDISASM), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in INSTRUCTION.findall(text) if name != "NOP"]


def _moved(instruction: str) -> int:
    """Bytes that one thread loads from global memory or stores there."""
    name, *modifiers = instruction.split(".")
    if name not in ("LDG", "STG", "LDGSTS", "ATOMG", "RED"):
        return 0
    return next((MOVED[m] for m in modifiers if m in MOVED), 4)


def _total(
    plain: Mapping[str, Any], listings: Mapping[str, list[str]], lanes: int, elements: int
) -> Count:
    instructions = moved = 0.0
    for step in plain["steps"]:
        if "kernel" not in step:
            continue
        launch = step["launch"]
        sizes = {name: evaluate_size(a["size"], {}) for name, a in launch["axes"].items()}
        blocks = math.prod(
            -(-sizes[name] // launch["axes"][name]["block"]) for name in launch["grid"]
        )
        threads = blocks * launch["warps"] * lanes
        listing = listings[step["kernel"]]
        instructions += threads * len(listing)
        moved += threads * sum(map(_moved, listing))
    return Count(instructions / elements, moved / elements)


def programs_of(fn: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """The program of a function for either target."""
    (tiles,), (threads,) = (programs(t(), fn, inputs) for t in (_Triton, _Threads))
    return tiles, threads


def compared(name: str) -> tuple[Count, Count]:
    """What the kernels of one of FUNCTIONS execute: those of tiles, those of threads."""
    fn, inputs = FUNCTIONS[name]
    elements = inputs[0].numel()
    tiles, threads = programs_of(fn, inputs)
    return (
        _total(tiles.serialized, tiles_listings(tiles), NVIDIA.lanes, elements),
        _total(threads.serialized, threads_listings(threads), WAVE, elements),
    )


def main() -> None:
    for name in FUNCTIONS:
        a, b = compared(name)
        print(
            f"{name:24} triton {a.instructions:7.2f} instructions, {a.bytes:6.3f} bytes; "
            f"threads {b.instructions:7.2f}, {b.bytes:6.3f}; "
            f"ratio {b.instructions / a.instructions:.2f}, {b.bytes / a.bytes:.2f}"
        )


if __name__ == "__main__":
    main()
