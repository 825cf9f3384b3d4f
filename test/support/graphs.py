"""Real ATen graphs for the tests of graph passes, and the fp64 rule on a rewritten graph."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition

from dicp.config import Config
from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.passes.base import Pass, PassContext, run_passes
from dicp.fused_attention import ANY_ATTENTION
from dicp.target import Facts


@dataclass
class Graph:
    """A graph as AOTAutograd hands it to a backend, with the inputs of its first call."""

    kind: str
    gm: fx.GraphModule
    inputs: list[Any]

    def run(self, dtype: torch.dtype | None = None) -> Any:
        """Interpret the graph on the recorded inputs, floating point ones cast to `dtype`."""
        gm = self.gm
        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.inputs]
        if dtype is not None:
            inputs = [to_dtype(x, dtype) for x in inputs]
            gm = promoted(gm, dtype)
        with torch.no_grad():
            return fx.Interpreter(gm).run(*inputs)

    def counts(self) -> Counter[str]:
        return Counter(str(n.target) for n in self.gm.graph.nodes if n.op == "call_function")

    def __len__(self) -> int:
        return sum(n.op == "call_function" for n in self.gm.graph.nodes)


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return value.to(dtype) if floating else value


def promoted(gm: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    """The graph with every floating dtype argument replaced by `dtype`."""
    gm = copy.deepcopy(gm)

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.dtype) and value.is_floating_point
        return dtype if floating else value

    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(cast(value) for value in node.args)
            node.kwargs = {name: cast(value) for name, value in node.kwargs.items()}
    return gm


def capture(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = False,
    train: bool = False,
    keep: Sequence[Any] = (),
    again: Sequence[Any] = (),
) -> list[Graph]:
    """The graphs that torch.compile makes of `fn(*args)`, decomposed to core ATen.

    again: arguments of a second call, of other sizes, whose values are recorded in place of the
        first call's. With `train` the joint graph comes first, on random gradients of its results.
    """
    torch._dynamo.reset()
    graphs: list[Graph] = []
    decompositions = {op: fn for op, fn in core_aten_decompositions().items() if op not in keep}

    def compiler(kind: str) -> Any:
        def compile_graph(gm: fx.GraphModule, example: Any) -> Any:
            graph = Graph(kind, gm, [])
            graphs.append(graph)
            plain = copy.deepcopy(gm)

            def call(*inputs: Any) -> Any:
                graph.inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
                return fx.Interpreter(plain).run(*inputs)

            return make_boxed_func(call)

        return compile_graph

    def partition(joint: fx.GraphModule, inputs: Any, **known: Any) -> Any:
        graphs.append(Graph("joint", copy.deepcopy(joint), []))
        return min_cut_rematerialization_partition(joint, inputs, **known)

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        return aot_module_simplified(
            gm,
            example,
            partition_fn=partition,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            decompositions=decompositions,
        )

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.set_grad_enabled(train):
        out = compiled(*args)
        count = len(graphs)
        out = compiled(*again) if again else out
        assert len(graphs) == count, "the second call's sizes are outside of the graph's"
    if train:
        out = out[0] if isinstance(out, (tuple, list)) else out
        out.sum().backward()
        joint, forward, _ = graphs
        tangents = joint.gm.graph.find_nodes(op="placeholder")[len(forward.inputs) :]
        sized = forward.gm.graph.find_nodes(op="placeholder")
        known = {str(n.meta["val"]): v for n, v in zip(sized, forward.inputs, strict=True)}
        joint.inputs = forward.inputs + [_random_like(n.meta["val"], known) for n in tangents]
    return graphs


def _random_like(value: torch.Tensor, known: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of the traced shape; `known` maps symbols to sizes."""
    shape = [n if isinstance(n, int) else known[str(n)] for n in value.shape]
    return torch.randn(shape, dtype=value.dtype)


def context_of(graph: Graph, **facts: Any) -> PassContext:
    """Facts as given; of a target that wants fusions, with attention on the host."""
    facts.setdefault("attention", {"cpu": ANY_ATTENTION} if facts.get("fusions") else {})
    return PassContext(Facts(frozenset(), **facts), Config(), graph.kind, Inference.of(graph.gm))


def apply(graph: Graph, passes: Sequence[Pass], **facts: Any) -> bool:
    """Run passes on the graph, every step verified."""
    return run_passes(graph.gm, passes, context_of(graph, **facts), verify=True)


def check_same_numbers(before: Any, after: Any, exact: Any) -> None:
    """The fp64 rule: at most twice the error of the original, plus a floor."""
    for old, new, true in zip(before, after, exact, strict=True):
        if not isinstance(old, torch.Tensor):
            assert old == new
            continue
        assert (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride())
        if not old.dtype.is_floating_point:
            assert torch.equal(old, new)
            continue
        assert torch.equal(old.isnan(), new.isnan())
        assert torch.equal(old.isinf(), new.isinf())
        finite = old.isfinite()
        scale = max(1.0, float(true[finite].abs().max())) if finite.any() else 1.0
        floor = 8 * torch.finfo(old.dtype).eps * scale
        error_old = (old.double() - true)[finite].abs()
        error_new = (new.double() - true)[finite].abs()
        worst = float(error_old.max()) if finite.any() else 0.0
        assert not finite.any() or float(error_new.max()) <= 2 * worst + floor


def rewrite(graph: Graph, passes: Sequence[Pass], **facts: Any) -> tuple[Counter[str], bool]:
    """Apply `passes`, compare numbers and strides before and after; (operator counts, changed)."""
    before, exact = graph.run(), graph.run(torch.float64)
    changed = apply(graph, passes, **facts)
    check_same_numbers(before, graph.run(), exact)
    return graph.counts(), changed
