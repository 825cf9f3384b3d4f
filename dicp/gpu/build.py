"""Kernel variants, build jobs, binaries, and the builder and driver protocols of a GPU vendor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel."""

    arch: int
    wide: bool
    """Whether indices have 64 bits."""
    aligned: tuple[bool, ...]
    """Per pointer, whether its address is known to be a multiple of 16 bytes."""
    even: bool = False
    """Whether every size argument is a multiple of 16, which allows vectorized loads."""

    def __str__(self) -> str:
        flags = "".join("01"[a] for a in self.aligned)
        even = " even" if self.even else ""
        return f"sm_{self.arch} {'64' if self.wide else '32'} {flags}{even}"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what its launch needs."""

    code: bytes
    entry: str
    shared: int
    """Bytes of dynamic shared memory."""
    warps: int
    blocks: Mapping[str, int]
    """Elements per block of each axis."""


@dataclass(frozen=True)
class Job:
    """A kernel to build; a vendor's subclass adds the cache key and the compiler's input."""

    name: str
    body: str
    launch: Mapping[str, Any]
    sizes: int
    variant: Variant
    origins: Sequence[str] = ()

    def blocks(self) -> dict[str, int]:
        return {name: axis["block"] for name, axis in self.launch["axes"].items()}

    def smaller(self, blocks: Mapping[str, int]) -> dict[str, int] | None:
        """Block sizes that need half the memory; None if no axis may shrink.

        A reduced axis that must fit one block (`whole`) may not.
        """
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
    """The part of a vendor's driver library that launching kernels needs."""

    target: str
    device_type: str
    """PyTorch's name of the device type."""
    lanes: int
    no_context: int
    """The status that a launch returns if the calling thread has no context of the device yet."""

    @property
    def launch(self) -> Any:
        """The native launch function: function, grid, block, shared bytes, stream, parameters."""

    def function(self, device: int, binary: Binary) -> int:
        """The kernel's handle on `device`, loaded while the value is referenced.

        Raises ToolchainError.
        """

    def keep(self, function: Any) -> None:
        """Keep a kernel loaded for good."""

    def enter(self, device: int) -> None:
        """Make the device's context current for this thread."""

    def describe(self, result: int) -> str:
        """A status as text."""
