"""The outline of a compiled graph, for tools: steps in order, the tensors between them, memory.

Programs of both families provide one, for the sizes of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dicp.origin import Origin

StepKind = Literal["kernel", "library", "eager", "operator", "copy"]
MemoryOwner = Literal["caller", "constant", "workspace", "allocation", "call", "vendor"]
"""Where a tensor's memory comes from: the caller or a constant; the graph's workspace; an
allocation of its own; a library or eager call; the vendor's graph compiler, which plans by itself.
"""


@dataclass(frozen=True)
class Tensor:
    """A tensor that steps read and write; views count as their base.

    nbytes: bytes of memory. first, last: the steps between which it is alive, both included; -1 and
    the number of steps for tensors that outlive the run. offset: bytes from the start of the
    workspace.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: MemoryOwner
    first: int
    last: int
    result: bool = False
    offset: int | None = None


@dataclass(frozen=True)
class Access:
    """The bytes of a tensor that a step reads or writes, views counted once."""

    tensor: int
    nbytes: int


@dataclass(frozen=True)
class OutlineStep:
    """A kernel, a call, or an operator of a vendor's graph.

    name: of its source text where it has one. launch: the position in the program of what runs it;
    all operators of a vendor's graph share one. text: its line in the program, if it has one.
    """

    name: str
    kind: StepKind
    launch: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    origins: tuple[Origin, ...]
    text: str = ""
    group: str = ""
    """The vendor's graph that an operator belongs to."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(access.nbytes for access in (*self.reads, *self.writes))


@dataclass(frozen=True)
class Outline:
    """Steps in the order they run, and the tensors by number. workspace: its bytes."""

    steps: Sequence[OutlineStep]
    tensors: Sequence[Tensor]
    workspace: int = 0
