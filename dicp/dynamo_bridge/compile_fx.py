"""The compiler from top to bottom: Dynamo's FX graph in, a callable out.

capture     Dynamo's graph -> forward and backward or inference graphs, by AOTAutograd
partition   nodes that depend on data run eagerly, between regions that are compiled
passes      canonicalize, fuse, assign layouts
lower       graph -> the target's program
render      program -> source text
build       source text -> artifact, by the target's compiler
load        artifact -> executable
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.aot import CompiledGraph, GraphInfo, compile_graphs
from dicp.dynamo_bridge.attention.masks import MASKS
from dicp.dynamo_bridge.attention.training import TRAINING_ATTENTION
from dicp.dynamo_bridge.decompose import (
    decompose_traces,
    decompositions,
    replace_wrong_decompositions,
)
from dicp.dynamo_bridge.fuse.families import FUSE
from dicp.dynamo_bridge.graph_cache import StoredGraph, find_graph, store_graph
from dicp.dynamo_bridge.inspection import InspectedGraph, active_inspector, around
from dicp.dynamo_bridge.layout import LAYOUT
from dicp.dynamo_bridge.observe import GraphReport, Observer
from dicp.dynamo_bridge.partition import (
    DATA_DEPENDENT,
    PartitionedExecutable,
    is_eager_operator,
    split_data_dependent,
)
from dicp.dynamo_bridge.passes.base import Pass, PassContext, run_passes
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.dynamo_bridge.passes.freeze import FrozenExecutable, split_frozen, static_positions
from dicp.dynamo_bridge.provenance import DYNAMO, dynamo_nodes
from dicp.dynamo_bridge.specialize import (
    PerSizeExecutable,
    Sources,
    symbol_sources,
    traced_sizes,
)
from dicp.errors import FallbackWarning, UnsupportedOperatorError
from dicp.operator_choice import OperatorChoice, check_eager, hidden
from dicp.origin import mark_lines, origin_of, user_lines
from dicp.target import Artifact, Executable, LowerContext, NodeReport, Target
from dicp.torch_private import TorchDynamoException
from dicp.version import VERSION


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
    return Compilation(gm, target, config, on_report).run(example_inputs)


def compile_aten(
    gm: fx.GraphModule, example_inputs: Sequence[Any], target: Target, config: Config
) -> tuple[CompiledGraph, GraphReport]:
    """Compile a functional ATen graph without gradients, traced outside of Dynamo.

    Its output is a list. The eager device compiles its operators by this. Raises every error.
    """
    reports: list[GraphReport] = []
    compiling = Compilation(gm, target, replace(config, on_compile_error="raise"), reports.append)
    compiling.identify()
    graph = compiling.compile_graph(gm, example_inputs, GraphInfo("inference"))
    return graph, reports[-1]


class Compilation:
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
        self.lines: Mapping[str, str] = user_lines(gm)
        self.identity = ""
        self.inspected = active_inspector() is not None
        self.choice = OperatorChoice.of(config)
        self.functions: Mapping[str, Any] = {n.name: n.target for n in gm.graph.nodes}

    def run(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable that Dynamo uses instead of its graph."""
        report = GraphReport("dynamo", _name_of(self.gm))

        def eagerly() -> Callable[..., Any]:
            report.nodes = _left_to_eager(self.gm)
            self.on_report(report)
            return self.gm.forward

        return around(self._attempt(lambda: self._capture(example_inputs), eagerly))

    def _attempt(self, work: Callable[[], Any], eagerly: Callable[[], Any]) -> Any:
        """Does `work`; where that fails, raises or runs eagerly as `on_compile_error` says."""
        try:
            return work()
        except (TorchDynamoException, UnsupportedOperatorError):
            raise  # Dynamo restarts tracing, or the user forbade eager operators
        except Exception as error:
            if self.config.on_compile_error == "raise":
                raise
            message = f"running eagerly: {str(error) or type(error).__name__}"
            warnings.warn(FallbackWarning(message), stacklevel=2)
        return eagerly()

    # ---- Dynamo's graph -------------------------------------------------------------------------

    def _capture(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        target, config = self.target, self.config
        decompose_traces(self.gm)
        replace_wrong_decompositions(self.gm)
        self.identify()
        train = wants_gradients(example_inputs)
        return compile_graphs(
            self.gm,
            example_inputs,
            decompositions=decompositions(target, self.choice),
            compile_graph=self.compile_graph,
            load_graph=self._load_graph,
            identity=self.identity,
            joint_passes=self._joint_passes,
            recompute_operands=target.facts.recomputes_operands,
            cache=self.cache if not config.freeze and not self.inspected else None,
            before_capture=lambda: target.prepare(self.gm, train, self.cache, config),
        )

    def identify(self) -> None:
        """Set `identity`, the key of everything outside of the graph that changes the code."""
        target, config = self.target, self.config
        self.identity = key_of(
            own_version(),
            source_of(type(target)),
            torch.__version__,
            target.name,
            target.fingerprint(config),
            config.key(target.options),
        )

    def _joint_passes(self, joint: fx.GraphModule, inputs: Any) -> None:
        context = PassContext(self.target.facts, self.config, "joint", Inference.of(joint))
        self.choice.mark(joint.graph, self.functions, DYNAMO)
        with hidden(joint.graph):
            run_passes(joint, graph_passes(self.config, "joint"), context)

    def compile_graph(self, gm: fx.GraphModule, inputs: Any, info: GraphInfo) -> CompiledGraph:
        """Compile one functional ATen graph: forward, backward or inference."""
        # A pass that fails leaves its graph half rewritten.
        original = _copy(gm) if self.config.on_compile_error == "eager" else gm
        with self._observed(GraphReport(info.kind, _name_of(gm))) as observer:
            observer.graph("aten", gm)

            def eagerly() -> CompiledGraph:
                observer.report.nodes, observer.report.kernels = _left_to_eager(original), ()
                return CompiledGraph(None, _interpreted(original))

            return self._attempt(lambda: self._partition(gm, info, observer), eagerly)

    def _load_graph(self, text: str) -> CompiledGraph:
        """Load a graph of AOTAutograd's stored result."""
        with self._observed(GraphReport("loaded", cache="aot")) as observer:
            stored = StoredGraph.decode(text, self.lines)
            return CompiledGraph(text, self._load(stored, observer))

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
        self._check_eager_parts([part.gm for part in parts if not part.compiled])
        run: list[Any] = []
        for part in parts:
            if part.compiled:
                run.append(executable_of(self._compile(part.gm, part.info, observer)))
            else:
                nodes = _left_to_eager(part.gm, DATA_DEPENDENT)
                observer.report.nodes = [*observer.report.nodes, *nodes]
                run.append(_interpreted(part.gm))
        return CompiledGraph(None, PartitionedExecutable(gm, parts, run))

    def _check_eager_parts(self, parts: Sequence[fx.GraphModule]) -> None:
        """Raises UnsupportedOperatorError where a part that runs eagerly must not."""
        calls = [n for part in parts for n in part.graph.nodes if is_eager_operator(n)]
        for node in calls:
            others = [str(origin_of(other)) for other in calls if other is not node]
            rest = f" (as do {', '.join(others)})" if others else ""
            check_eager(node, DATA_DEPENDENT + rest, self.config, self.target.name)

    def _compile(self, gm: fx.GraphModule, info: GraphInfo, observer: Observer) -> CompiledGraph:
        """Load the graph from the cache, or run the passes and the target's stages."""
        config, facts, report = self.config, self.target.facts, observer.report
        if not facts.symbolic_shapes and (symbols := symbol_sources(gm)) != {}:
            return CompiledGraph(None, self._compile_per_size(gm, symbols, info, observer))
        mark_lines(gm)
        with observer.stage("graph key"):
            cache = self.cache if config.dump is None and not self.inspected else None
            slot = find_graph(cache, gm, info, self.identity)
        if slot.found is not None:
            report.cache = "graph"
            run = self._load(slot.found, observer)
            return CompiledGraph(slot.found.encode(), run)

        sources, nodes, kernels = dynamo_nodes(gm), len(report.nodes), len(report.kernels)
        context = PassContext(
            facts, config, info.kind, Inference.of(gm), frozenset(info.static_inputs)
        )
        captured = _copy(gm) if self.inspected else gm
        with hidden(gm.graph):
            run_passes(gm, graph_passes(config, info.kind), context, observer.after_pass)
        frozen = split_frozen(gm, context) if config.freeze and info.kind == "inference" else None
        if frozen is not None:
            static = (), static_positions(frozen[1], info)  # the first part runs only once
            once, rest = (
                self._build(part, replace(info, static_inputs=kept), observer)[1]
                for part, kept in zip(frozen, static, strict=True)
            )
            return CompiledGraph(None, FrozenExecutable(once, rest))
        artifact, run = self._build(gm, info, observer)
        if self.inspected:
            made_kernels = tuple(report.kernels[kernels:])
            parts = (gm, captured, info, made_kernels, self.target, config, self.cache, run)
            return CompiledGraph(None, InspectedGraph(*parts))
        made = (report.kind, tuple(report.nodes[nodes:]), tuple(report.kernels[kernels:]))
        stored = StoredGraph(artifact, made, sources)
        return CompiledGraph(store_graph(self.cache, slot, stored), run)

    def _compile_per_size(
        self, gm: fx.GraphModule, sources: Sources | None, info: GraphInfo, observer: Observer
    ) -> Executable:
        """Compile a symbolic graph for the sizes at hand, and later for others as they occur."""
        if sources is None:
            observer.report.nodes = _left_to_eager(gm, "a size is known only at run time")
            return _interpreted(gm)

        def later(fixed: fx.GraphModule) -> Executable:
            with self._observed(GraphReport(info.kind, _name_of(gm))) as new:
                work = partial(self._compile, fixed, info, new)
                eagerly = partial(CompiledGraph, None, _interpreted(gm))
                return executable_of(self._attempt(work, eagerly))

        run = PerSizeExecutable(gm, sources, later)
        traced = traced_sizes(gm, sources)
        if traced is not None:
            first = self._compile(run.graph_for(traced), info, observer)
            run.keep(traced, executable_of(first))
        return run

    def _build(
        self, gm: fx.GraphModule, info: GraphInfo, observer: Observer
    ) -> tuple[Artifact, Executable]:
        """Run the target's stages: lower, render, build, load."""
        target, config, report = self.target, self.config, observer.report
        with observer.stage("lower"):
            context = LowerContext(config, info.kind, frozenset(info.static_inputs), target.name)
            program = target.lower(gm, context)
        report.nodes = [*report.nodes, *program.nodes]
        report.kernels = [*report.kernels, *program.kernels()]
        with observer.stage("render"):
            source = target.render(program, config)
        observer.program(program, source)
        with observer.stage("build"):
            artifact = target.build(program, source, self.cache, config)
        with observer.stage("load"):
            return artifact, target.load(artifact, self.cache, config)

    def _load(self, stored: StoredGraph, observer: Observer) -> Executable:
        with observer.stage("load"):
            stored.restore(observer.report)
            return self.target.load(stored.artifact, self.cache, self.config)


def graph_passes(config: Config, kind: str) -> tuple[Pass, ...]:
    """The passes of one kind of graph, in order.

    Layouts of a training graph are assigned before it is split, so that what forward saves for
    backward is saved in the layout backward wants.
    """
    if kind == "joint":
        return (TRAINING_ATTENTION, MASKS, LAYOUT)
    masks = (MASKS,) if kind == "inference" else ()
    fusion = (*masks, FUSE, CANONICALIZE) if config.fuse else ()
    layout = (LAYOUT,) if kind == "inference" else ()
    return (CANONICALIZE, *fusion, *layout)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same parameters and constants."""
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return fx.GraphModule(gm, graph)


def executable_of(compiled: CompiledGraph) -> Executable:
    """What runs a graph that was just compiled."""
    assert compiled.executable is not None
    return compiled.executable  # type: ignore[return-value]


def _interpreted(gm: fx.GraphModule) -> Executable:
    """Runs the graph operator by operator."""
    gm.recompile()

    def run(inputs: list[Any]) -> Any:
        args = list(inputs)
        inputs.clear()
        return gm(*args)

    return run


def _left_to_eager(
    gm: fx.GraphModule, reason: str = "the code could not be built"
) -> list[NodeReport]:
    calls = ("call_function", "call_method", "call_module")
    return [NodeReport(origin_of(n), "eager", reason) for n in gm.graph.nodes if n.op in calls]


def _name_of(gm: fx.GraphModule) -> str:
    """A name that equal graphs share in every process."""
    return f"graph{key_of([node.name for node in gm.graph.nodes])[:8]}"


@lru_cache(maxsize=1)
def own_version() -> str:
    """A key of dicp's version and installed files: results of another dicp are never loaded."""
    return key_of(VERSION, _file_stats(Path(__file__).parent.parent))


@lru_cache(maxsize=32)
def source_of(kind: type[Target]) -> str:
    """The files of the package that brings a target: with a changed rule, results change.

    A target in one module outside any package counts with that file alone.
    """
    module = sys.modules[kind.__module__]
    name, file = module.__name__, getattr(module, "__file__", None)
    if file is None or name.startswith("dicp."):  # own_version counts dicp's own
        return ""
    package = sys.modules.get(name.partition(".")[0])
    folder = getattr(package, "__file__", None) if package is not module else None
    is_package = Path(file).name == "__init__.py"
    return key_of(_file_stats(Path(folder or file).parent if folder or is_package else Path(file)))


def _file_stats(place: Path) -> list[str]:
    """Name, size and time of every source file in a folder, or of one file."""
    found = [place] if place.is_file() else place.rglob("*")
    files = sorted(p for p in found if p.suffix in (".py", ".h", ".cpp", ".jinja"))
    stats = [(str(p.relative_to(place.parent)), p.stat()) for p in files]
    return [f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats]


def wants_gradients(inputs: Sequence[Any]) -> bool:
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
