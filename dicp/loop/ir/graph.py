"""The graph of a loop program: computations, library calls, inputs and outputs.

Lowering produces a flat list of `Compute` and `Call` nodes in graph order. Each `Compute` is one
operator's loop nest over its own domain, with an expression DAG as body; the scheduler then fuses
computes into kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dicp.loop.ir.expr import Expr, Load, Ref, walk
from dicp.loop.ir.index import Index, Size, indirect_exprs
from dicp.origin import Origin

ComputeKind = Literal["pointwise", "reduce", "scan", "scatter"]


@dataclass(eq=False)
class Compute:
    """One operator as a loop nest: for every point of `shape`, evaluate `body`.

    pointwise: store at the same coordinates of `out` (whose shape is `shape`).
    reduce: combine over `axes` with `op`; `out.shape` is `shape` with 1 at `axes`.
    scan: running `op` along `axes[0]` in the dtype of `body`, stored at every point.
    scatter: store or combine (`op`) into `out` at `target`; `out` aliases an initialized buffer.
    """

    out: Ref
    shape: tuple[Size, ...]
    body: Expr
    kind: ComputeKind = "pointwise"
    axes: tuple[int, ...] = ()
    op: str = ""
    target: tuple[Index, ...] = ()
    after: tuple[Any, ...] = ()
    """Nodes that must run earlier for reasons other than this node's loads."""
    origins: tuple[Origin, ...] = ()
    realize: bool = False
    """Whether the result must be stored: a call reads it, say, or it must be computed only once."""

    _found: tuple[Expr, tuple[Index, ...], list[Load]] | None = None

    def loads(self) -> list[Load]:
        """Every load of the body and of the store's coordinates; cached until either changes."""
        known = self._found
        if known is not None and known[0] is self.body and known[1] is self.target:
            return known[2]
        seen: set[Expr] = set()
        found = [e for e in walk(self.body, seen) if isinstance(e, Load)]
        for index in self.target:
            for inner in indirect_exprs(index):
                found += [e for e in walk(inner, seen) if isinstance(e, Load)]
        self._found = (self.body, self.target, found)
        return found

    def reads(self) -> list[Ref]:
        return [item.ref for item in self.loads()]


@dataclass(frozen=True)
class Routine:
    """A kernel whose source the target supplies; its arguments are a call's `args` and `outs`."""

    name: str
    body: str
    sizes: tuple[Size, ...]
    """Passed as arguments at every launch, in this order."""


@dataclass(eq=False)
class Call:
    """A library or eager ATen call. `args`/`kwargs` may hold Refs, Sizes and plain values."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Ref, ...]
    out_variant: Any = None
    """The overload that writes into given outputs, where there is one."""
    routine: Routine | None = None
    """Runs in place of `op`; `args` then holds Refs only."""
    kind: Literal["library", "eager"] = "library"
    mutates: bool = False
    after: tuple[Any, ...] = ()
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[Ref]:
        return list(refs_in((self.args, self.kwargs)))

    def read_buffers(self) -> set[Ref]:
        """The memory that it reads."""
        return {ref.root for ref in self.reads()}

    def written_buffers(self) -> set[Ref]:
        """The memory that it writes, or may write."""
        return {ref.root for ref in (*self.outs, *(self.reads() if self.mutates else ()))}


def refs_in(value: Any) -> Iterator[Ref]:
    """The buffers in arguments or outputs, however deeply nested."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)


Node = Compute | Call


@dataclass(frozen=True)
class Requirement:
    """A condition on the sizes of a run, checked before it starts.

    equal: `left` is `right`. indexable: a dimension of size `left` is not empty if there are
    `right` > 0 indices into it.
    """

    kind: Literal["equal", "indexable"]
    left: Size
    right: Size
    detail: str
    origin: Origin


@dataclass
class Graph:
    """A lowered graph before scheduling."""

    inputs: list[Ref] = field(default_factory=list)
    sizes: dict[int, Any] = field(default_factory=dict)
    """Graph input position -> sympy expression, for inputs that are sizes."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """Refs, Sizes, plain values or None, in order."""
