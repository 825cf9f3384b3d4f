"""One functional graph of AOTAutograd: its metadata, its compiled form, its compiler."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor, fx

from dicp.cache import Cache
from dicp.target import Executable
from dicp.torch_private import (
    OutputCode,
    autocast_enabled,
    is_batched,
    is_complex,
    map_over_batch,
    without_autocast,
    without_real_base,
)

Kind = Literal["joint", "forward", "backward", "inference"]
T = TypeVar("T")


@dataclass(frozen=True)
class GraphInfo:
    """What AOTAutograd knows about a graph beyond its nodes.

    static_inputs: positions of placeholders that are parameters or buffers: the same storage at
        every call, so that values computed from them alone can be reused between calls.
    tangents: positions of the placeholders of a backward graph that are gradients of results.
    """

    kind: Kind
    static_inputs: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()


class OtherLinesError(Exception):
    """Stored code contains user lines, and the current graph comes from other lines."""


class CompiledGraph(OutputCode):
    """A compiled graph: `executable` runs it, `artifact_json` is its serialized form.

    Called with a list of inputs that it may clear (boxed calling), returns a sequence of outputs.
    A graph that cannot be serialized has `artifact_json` None: it works and is never stored.
    `tangents` are the positions of gradients that autograd passes in: their negative and conjugate
    bits are known only at the call.
    """

    def __init__(
        self,
        artifact_json: str | None,
        executable: Executable | None,
        tangents: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.artifact_json = artifact_json
        self.executable = executable
        self.tangents = tangents
        self._complex: tuple[int, ...] | None = None
        """Positions of complex results, from the first run on. Some are views of real tensors;
        AOTAutograd, which makes views of inputs as the results are, cannot make such a view."""
        self._boxed_call = True  # on the instance: wrappers copy an object's own attributes only

    @property
    def run(self) -> Executable:
        """The executable of a graph that was compiled or loaded."""
        assert self.executable is not None, "a stored graph runs after post_compile"
        return self.executable

    def __call__(self, inputs: Sequence[Any]) -> Any:
        if autocast_enabled():  # the graph has its conversions, and backward runs anywhere
            with without_autocast():
                return self(inputs)
        for position in self.tangents:
            tangent = inputs[position]
            if is_batched(tangent):  # `is_grads_batched` of torch.autograd.grad
                return map_over_batch(self, inputs)
            if tangent.is_neg() or tangent.is_conj():
                inputs = inputs if isinstance(inputs, list) else list(inputs)
                inputs[position] = unmarked(tangent)
        results = self.run(inputs)  # type: ignore[arg-type]
        if self._complex is None:
            self._complex = tuple(k for k, v in enumerate(results) if is_complex(v))
        if self._complex:
            results = list(results)
            for position in self._complex:
                results[position] = without_real_base(results[position])
        return results

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledGraph, (self.artifact_json, None, self.tangents)

    def prepare_for_serialization(self) -> None:
        self.executable = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Loads the executable of a graph from the cache."""
        self.executable = graph_kwargs["load_graph"](self.artifact_json).executable


def unmarked(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with the same strides if it is marked as a conjugate or a negative."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if 0 in tensor.stride():  # elements share memory
        return tensor.resolve_conj().resolve_neg()
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


CacheState = Literal["off", "hit", "miss", "stored", "bypass", "damaged"]


class GraphCompiler(abc.ABC):
    """The compiler as AOTAutograd's stages call it.

    identity: a key of everything else that results depend on: backend, target, versions, options.
    decompositions: the rules of the operators that are decomposed during the trace.
    result_cache: where AOTAutograd's results are stored; None compiles without a cache.
    recomputes_operands: whether the backward graph rematerializes an operand of a library call that
        elementwise operators compute from other saved tensors.
    """

    identity: str
    decompositions: Mapping[Any, Callable[..., Any]]
    result_cache: Cache | None = None
    recomputes_operands: bool = False

    def attempt(self, work: Callable[[], T], eagerly: Callable[[], T]) -> T:
        """The result of `work`, called while compiled code runs; that of `eagerly` if it fails."""
        return work()

    def before_capture(self) -> None:
        """Called before the graph is traced, where no stored result is found."""
        return None

    def joint_passes(self, joint: fx.GraphModule) -> None:
        """Rewrite the joint graph in place before it is split into forward and backward."""
        return None

    @abc.abstractmethod
    def compile_graph(
        self, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo
    ) -> CompiledGraph:
        """Compile a functional graph; the backward graph at the first backward run, or at once
        where its sizes are symbolic."""

    @abc.abstractmethod
    def load_graph(self, text: str) -> CompiledGraph:
        """Load a compiled graph from its stored `artifact_json`. Raises OtherLinesError."""

    def on_cache(self, state: CacheState, reason: str) -> None:
        """Called with what the cache did, and why."""
        return None
