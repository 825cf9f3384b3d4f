"""What a kernel is compiled for, and what comes out: the same for every GPU vendor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Variant:
    """What one kernel is compiled for."""

    arch: int
    wide: bool
    """Whether indices have 64 bits."""
    aligned: tuple[bool, ...]
    """Per pointer, whether its address is known to be a multiple of 16."""
    even: bool = False
    """Whether every size handed over is a multiple of 16, which lets loads be wide."""

    def __str__(self) -> str:
        flags = "".join("01"[a] for a in self.aligned)
        even = " even" if self.even else ""
        return f"sm_{self.arch} {'64' if self.wide else '32'} {flags}{even}"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what its launch must know."""

    code: bytes
    entry: str
    shared: int
    """Bytes of dynamic shared memory."""
    warps: int
    blocks: Mapping[str, int]
    """Elements per block of each axis."""


@dataclass(frozen=True)
class Job:
    """A kernel to be built; a vendor adds its key and what its compiler is fed."""

    name: str
    body: str
    launch: Mapping[str, Any]
    sizes: int
    variant: Variant
    origins: Sequence[str] = ()

    def blocks(self) -> dict[str, int]:
        return {name: axis["block"] for name, axis in self.launch["axes"].items()}

    def smaller(self, blocks: Mapping[str, int]) -> dict[str, int] | None:
        """Blocks that need half the memory, where the kernel's form allows any."""
        fixed = {"r"} if self.launch["whole"] else set()
        least = {name: axis.get("least", 1) for name, axis in self.launch["axes"].items()}
        free = [n for n in blocks if n not in fixed and blocks[n] > least[n]]
        if not free:
            return None
        largest = max(free, key=lambda n: blocks[n])
        return {**blocks, largest: blocks[largest] // 2}


class Builder(Protocol):
    """Compiles kernels, or takes them from the cache."""

    def build(self, jobs: Sequence[Any]) -> list[Binary]:
        """Every job's binary. Raises CompilerError."""


class Driver(Protocol):
    """A vendor's driver library, as far as launching kernels needs it."""

    target: str
    device_type: str
    """What PyTorch calls the device."""
    lanes: int
    no_context: int
    """The status of a launch by a thread that has no context of the device yet."""

    @property
    def launch(self) -> Any:
        """The native launch function: function, grid, block, shared bytes, stream, parameters."""

    def function(self, device: int, binary: Binary) -> int:
        """The kernel's handle on `device`. Raises ToolchainError."""

    def enter(self, device: int) -> None:
        """Make the device's context current for this thread."""

    def describe(self, result: int) -> str:
        """A status as text."""
