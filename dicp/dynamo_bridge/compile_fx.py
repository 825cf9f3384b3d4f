"""The compiler from top to bottom: Dynamo's FX graph in, a callable out.

capture     Dynamo's graph -> forward and backward or inference graphs, by AOTAutograd
partition   nodes that depend on data run eagerly, between regions that are compiled
passes      canonicalize, fuse, assign layouts

and the target's stages (`stages.py`):

lower       graph -> the target's program
render      program -> source text
build       source text -> artifact, by the target's compiler
load        artifact -> executable
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from dicp.adaptor import Adaptor, find_adaptor
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.aot import compile_graphs
from dicp.dynamo_bridge.aot_graph import CompiledGraph, GraphCompiler, GraphInfo
from dicp.dynamo_bridge.attempt import attempt
from dicp.dynamo_bridge.attention.masks import MASKS
from dicp.dynamo_bridge.attention.training import TRAINING_ATTENTION
from dicp.dynamo_bridge.decompose import (
    decompose_traces,
    decompositions_with_checks,
    keep_interpolation,
    replace_functions,
)
from dicp.dynamo_bridge.executables import (
    FrozenExecutable,
    PartitionedExecutable,
    PerSizeExecutable,
    interpreted,
)
from dicp.dynamo_bridge.fuse.families import FUSE
from dicp.dynamo_bridge.graph_cache import (
    StoredGraph,
    find_graph,
    graph_context_key,
    graph_name,
    store_graph,
)
from dicp.dynamo_bridge.inspection import InspectedGraph, active_inspector, around
from dicp.dynamo_bridge.layout import LAYOUT
from dicp.dynamo_bridge.observe import FrontEnd, GraphReport, Observer, eager_nodes
from dicp.dynamo_bridge.partition import DATA_DEPENDENT, check_eager_parts, split_data_dependent
from dicp.dynamo_bridge.passes.adapt import ADAPT
from dicp.dynamo_bridge.passes.base import Pass, PassContext, run_passes
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.dynamo_bridge.passes.complex_pairs import COMPLEX_PAIRS
from dicp.dynamo_bridge.passes.freeze import split_frozen, static_positions
from dicp.dynamo_bridge.provenance import DYNAMO, dynamo_nodes
from dicp.dynamo_bridge.specialize import Sizes, Sources, symbol_sources, traced_sizes
from dicp.dynamo_bridge.stages import Stages
from dicp.operator_choice import OperatorChoice, hidden
from dicp.origin import SourceLocation, mark_lines, user_locations
from dicp.target import Executable, Target

T = TypeVar("T")


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    target: Target,
    config: Config,
    on_report: Callable[[GraphReport], None],
) -> Callable[..., Any]:
    """Compile Dynamo's graph for `target`.

    Raises every error, or with `on_compile_error="eager"` warns once and runs the graph eagerly.
    Raises UnsupportedOperatorError where `fallback="error"` and an operator has no rule, regardless
    of `on_compile_error`.
    """
    reports: list[GraphReport] = []

    def record(report: GraphReport) -> None:
        on_report(report)
        reports.append(report)

    def compiled() -> Callable[..., Any]:
        front_end = FrontEnd()
        run = Compilation(gm, target, config, record).capture(example_inputs)
        front_end.finish(reports, config)
        return around(run)

    def eagerly() -> Callable[..., Any]:
        with contextlib.suppress(Exception):  # the report may fail as the compilation did
            on_report(GraphReport("dynamo", graph_name(gm), nodes=eager_nodes(gm)))
        return gm.forward

    return attempt(target, config, compiled, eagerly)


def compile_aten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], target: Target, config: Config
) -> tuple[CompiledGraph, GraphReport]:
    """Compile a functional ATen graph without gradients, traced outside of Dynamo.

    Its output is a list. The eager device compiles its operators by this. Raises every error.
    """
    reports: list[GraphReport] = []
    compilation = Compilation(gm, target, replace(config, on_compile_error="raise"), reports.append)
    graph = compilation.compile_graph(gm, example_inputs, GraphInfo("inference"))
    return graph, reports[-1]


class Compilation(GraphCompiler):
    """The compilation of one Dynamo graph to a callable."""

    def __init__(
        self,
        gm: fx.GraphModule,
        target: Target,
        config: Config,
        on_report: Callable[[GraphReport], None],
    ) -> None:
        self.gm, self.target, self.config, self.on_report = gm, target, config, on_report
        self.cache = Cache.open(config)
        self.stages = Stages(target, config, self.cache)
        self.inspected = active_inspector() is not None
        # A dump and an inspector need every stage to run: no compiled graph is loaded.
        self.graph_cache = None if self.inspected or config.dump is not None else self.cache
        self.result_cache = None if config.freeze else self.graph_cache
        self.recomputes_operands = target.facts.recomputes_operands
        self.choice = OperatorChoice.of(config)
        self.user_locations: Mapping[str, SourceLocation] = user_locations(gm)
        self.functions: Mapping[str, Any] = {n.name: n.target for n in gm.graph.nodes}
        self.train = False

    @cached_property
    def identity(self) -> str:  # type: ignore[override]
        return graph_context_key(self.target, self.config)

    @cached_property
    def adaptor(self) -> Adaptor | None:
        return find_adaptor(self.target, self.config, self.target.facts.dtypes)

    @cached_property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:  # type: ignore[override]
        return decompositions_with_checks(self.target, self.choice)

    # ---- Dynamo's graph -------------------------------------------------------------------------

    def attempt(self, work: Callable[[], T], eagerly: Callable[[], T]) -> T:
        return attempt(self.target, self.config, work, eagerly)

    def capture(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run AOTAutograd, which calls `joint_passes` and `compile_graph`; return a callable."""
        decompose_traces(self.gm)
        replace_functions(self.gm)
        self.train = wants_gradients(example_inputs)
        return compile_graphs(self.gm, example_inputs, self)

    def before_capture(self) -> None:
        keep_interpolation(self.gm, self.target, self.train)
        self.target.prepare(self.gm, self.train, self.cache, self.config)

    def joint_passes(self, joint: fx.GraphModule) -> None:
        self.choice.mark(joint.graph, self.functions, DYNAMO)
        self._passes(joint, GraphInfo("joint"))

    def compile_graph(
        self, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo
    ) -> CompiledGraph:

        def work(observer: Observer) -> CompiledGraph:
            Inference.of(gm).complete(gm.graph)
            observer.graph("aten", gm)
            graph = self._partition(gm, info, observer)
            graph.tangents = info.tangents
            return graph

        return self._reported(gm, info, work)

    def _reported(
        self, gm: fx.GraphModule, info: GraphInfo, work: Callable[[Observer], CompiledGraph]
    ) -> CompiledGraph:
        """The result of `work`, with a report; an eager run of `gm` where either fails."""
        original = gm

        def eagerly() -> CompiledGraph:
            return CompiledGraph(None, interpreted(original))

        def reported_eagerly(report: GraphReport) -> CompiledGraph:
            report.nodes, report.kernels = eager_nodes(original), ()
            return eagerly()

        def reported() -> CompiledGraph:
            nonlocal original
            if self.config.on_compile_error == "eager":  # a failing pass leaves gm half rewritten
                original = _copy(gm)
            with self._observed(GraphReport(info.kind, graph_name(gm))) as observer:
                return self.attempt(
                    lambda: work(observer), lambda: reported_eagerly(observer.report)
                )

        return self.attempt(reported, eagerly)

    def load_graph(self, text: str) -> CompiledGraph:
        with self._observed(GraphReport("loaded", cache="aot")) as observer:
            stored = StoredGraph.decode(text, self.user_locations)
            return CompiledGraph(text, self._restore(stored, observer))

    @contextlib.contextmanager
    def _observed(self, report: GraphReport) -> Iterator[Observer]:
        observer = Observer(self.config, report)
        try:
            yield observer
        finally:
            observer.finish()
            self.on_report(report)

    # ---- one functional graph -------------------------------------------------------------------

    def _partition(self, gm: fx.GraphModule, info: GraphInfo, observer: Observer) -> CompiledGraph:
        """Compile the graph, or only the regions of it that do not depend on data."""
        if info.kind == "inference":  # those of a training graph are marked before it is split
            self.choice.mark(gm.graph, self.functions, DYNAMO)
        parts = split_data_dependent(gm, info)
        if not parts:
            return self._compile(gm, info, observer)
        check_eager_parts(parts, self.config, self.target.name)
        run: list[Any] = []
        for part in parts:
            if part.compiled:
                run.append(self._compile(part.gm, part.info, observer).run)
            else:
                nodes = eager_nodes(part.gm, DATA_DEPENDENT)
                observer.report.nodes = [*observer.report.nodes, *nodes]
                run.append(interpreted(part.gm))
        return CompiledGraph(None, PartitionedExecutable(gm, parts, run))

    def _compile(self, gm: fx.GraphModule, info: GraphInfo, observer: Observer) -> CompiledGraph:
        """Load the graph from the cache, or run the passes and the target's stages."""
        if not self.target.facts.symbolic_shapes and (symbols := symbol_sources(gm)) != {}:
            if symbols is None or not self._pads(gm, info, observer.report):
                return CompiledGraph(None, self._compile_per_size(gm, symbols, info, observer))
        mark_lines(gm)
        with observer.stage("graph key"):
            lookup = find_graph(self.graph_cache, gm, info, self.identity)
        report = observer.report
        if lookup.found is not None:
            report.cache = "graph"
            return CompiledGraph(lookup.found.encode(), self._restore(lookup.found, observer))

        line_of, first_node, first_kernel = dynamo_nodes(gm), len(report.nodes), len(report.kernels)
        captured = _copy(gm) if self.inspected else gm
        parts = self._passes(gm, info, observer)
        built = [self.stages.run(part, part_info, observer) for part, part_info in parts]
        artifact, run = built[-1]
        if len(built) == 2:
            return CompiledGraph(None, FrozenExecutable(once=built[0][1], rest=run))
        kernels = tuple(report.kernels[first_kernel:])
        if self.inspected:
            inspected = InspectedGraph(gm, captured, info, kernels, self.stages, run)
            return CompiledGraph(None, inspected)
        own_report = report.kind, tuple(report.nodes[first_node:]), kernels
        stored = StoredGraph(artifact, own_report, line_of)
        return CompiledGraph(store_graph(self.cache, lookup, stored), run)

    def _passes(
        self, gm: fx.GraphModule, info: GraphInfo, observer: Observer | None = None
    ) -> list[tuple[fx.GraphModule, GraphInfo]]:
        """Run the graph's passes; return the graph, split in two where parameters are frozen."""
        static = frozenset(info.static_inputs)
        infer = Inference.of(gm)
        context = PassContext(
            self.target.facts, self.config, info.kind, infer, static, self.adaptor,
            lambda node: self.target.decide(node).kind != "eager",
        )  # fmt: skip
        with hidden(gm.graph):
            after_pass = observer.after_pass if observer else None
            run_passes(gm, graph_passes(self.config, info.kind), context, after_pass)
        freeze = self.config.freeze and info.kind == "inference"
        frozen = split_frozen(gm, context) if freeze else None
        if frozen is None:
            return [(gm, info)]
        once, rest = frozen  # the first part runs once: it has no values to keep between runs
        return [
            (once, replace(info, static_inputs=())),
            (rest, replace(info, static_inputs=static_positions(rest, info))),
        ]

    def _restore(self, stored: StoredGraph, observer: Observer) -> Executable:
        """Load a graph from the cache, and report what its compilation reported."""
        with observer.stage("load"):
            stored.restore(observer.report)
            return self.target.load(stored.artifact, self.cache, self.config)

    def _pads(self, gm: fx.GraphModule, info: GraphInfo, report: GraphReport) -> bool:
        """Whether shape buckets apply to a symbolic graph of a target without symbolic shapes."""
        if not self.config.shape_buckets:
            return False
        for part, part_info in self._passes(_copy(gm), info):
            refusal = self.target.padding_refusal(part, self.stages.context(part_info))
            if refusal is not None:
                report.notes.append(f"shape buckets do not apply: {refusal}")
                return False
        return True

    def _compile_per_size(
        self, gm: fx.GraphModule, sources: Sources | None, info: GraphInfo, observer: Observer
    ) -> Executable:
        """Compile a symbolic graph for the traced sizes, and for other sizes when they occur."""
        if sources is None:
            observer.report.nodes = eager_nodes(gm, "a size is known only at run time")
            return interpreted(gm)

        def later(sizes: Sizes) -> Executable:
            def work(new: Observer) -> CompiledGraph:
                return self._compile(run.graph_for(sizes), info, new)

            return self.attempt(lambda: self._reported(gm, info, work).run, lambda: interpreted(gm))

        run = PerSizeExecutable(gm, sources, later)
        traced = traced_sizes(gm, sources)
        if traced is not None:
            run.keep(traced, self._compile(run.graph_for(traced), info, observer).run)
        return run


def graph_passes(config: Config, kind: str) -> tuple[Pass, ...]:
    """The passes of one kind of graph, in order.

    Layouts of a training graph are assigned before it is split, so that what forward saves for
    backward is saved in the layout backward wants.
    """
    if kind == "joint":
        return (COMPLEX_PAIRS, TRAINING_ATTENTION, MASKS, LAYOUT)
    masks = (MASKS,) if kind == "inference" else ()
    pairs = (COMPLEX_PAIRS,) if kind == "inference" else ()
    fusion = (*masks, FUSE, CANONICALIZE) if config.fuse else ()
    layout = (LAYOUT,) if kind == "inference" else ()
    return (*pairs, CANONICALIZE, *fusion, *layout, ADAPT)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same parameters and constants."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return fx.GraphModule(gm, graph)


def wants_gradients(inputs: Sequence[Any]) -> bool:
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
