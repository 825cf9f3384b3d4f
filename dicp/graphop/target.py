"""From an FX graph to an executable of vendor graphs, for every target with a graph compiler.

A vendor provides its operators (`make_builder`, `rules`), writes a graph as source
(`render_graph`), compiles the source (`compile`) and runs the result (`launch`). Everything between
is here: lowering, partitioning into graphs, graphs that run once, shape buckets, and eager calls
for operators that the compiler rejected. A vendor whose compiler takes no symbolic sizes states so
in its facts.
"""

from __future__ import annotations

import abc
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.effects import is_random
from dicp.errors import (
    FallbackWarning,
    GraphRejectedError,
    RunStatusError,
    TargetFailureError,
)
from dicp.graphop.assemble import assemble
from dicp.graphop.builder import Builder
from dicp.graphop.hoist import hoisted
from dicp.graphop.inplace import Writing, in_place
from dicp.graphop.lower import Lowering
from dicp.graphop.outline import outline
from dicp.graphop.partition import Partition, remove_dead
from dicp.graphop.program import Graph, GraphProgram, Item, Node, Slot, describe
from dicp.graphop.runtime import GraphExecutable
from dicp.graphop.text import Text
from dicp.graphop.thresholds import MAX_PADDED
from dicp.origin import Origin, lines_of
from dicp.outline import Outline
from dicp.rule_errors import definition_of, naming_operators, raise_run_failure, refusal, result_of
from dicp.serialize import evaluate_size
from dicp.specializations import Specializations
from dicp.target import (
    Artifact,
    Decision,
    Executable,
    LowerContext,
    RuleTarget,
    Source,
    tensors_of,
)
from dicp.torch_private import FakeTensorMode, disable_current_modes

_SHOWN_LINES = 8
UNIT = "model"
"""The kind of cache entry that holds a compiled graph."""
Run = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int]
"""Runs a compiled graph on row-major inputs, into row-major outputs; returns 0 for success.

It raises DeviceError for a known failure; any other status raises RunStatusError.
"""


@dataclass(frozen=True)
class GraphUnit:
    """One graph to compile: its source text, and the compiler's options.

    `options` is text in the vendor's format; `written` numbers the inputs that the graph writes to;
    `origins` are the user's operators that it computes, for messages.
    """

    name: str
    text: str
    options: str = ""
    written: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()

    @classmethod
    def of(cls, step: Mapping[str, Any], text: str, options: str) -> GraphUnit:
        """The graph that a serialized step runs."""
        return cls(step["graph"], text, options, tuple(step["written"]), tuple(step["origins"]))


class GraphTarget(RuleTarget):
    """A target whose vendor compiles graphs of operators."""

    writing: Writing | None = None
    """How results overwrite inputs; None: they are copied after the graph."""
    simulator = "a simulator on the CPU"
    """The simulator's name in the warning, where `simulated` is true."""
    needs_input = False
    """Whether the vendor's compiler rejects graphs without inputs."""

    # ---- what a vendor gives --------------------------------------------------------------------

    @abc.abstractmethod
    def make_builder(self, fake_mode: FakeTensorMode | None, config: Config) -> Builder:
        """A builder of the vendor's operators, for one FX graph."""

    @abc.abstractmethod
    def render_graph(self, graph: Graph, config: Config) -> str:
        """The source text of one graph."""

    @abc.abstractmethod
    def compile(self, unit: GraphUnit, cache: Cache, config: Config) -> Mapping[str, bytes]:
        """The files that the compiler writes for a graph's source.

        Tensors made here and in `launch` have numbers, although PyTorch is tracing.
        Raises GraphRejectedError with the compiler's message.
        """

    @abc.abstractmethod
    def launch(self, unit: GraphUnit, built: Entry, cache: Cache, config: Config) -> Run:
        """The function that runs a compiled graph, loaded in this process."""

    def identity(self, cache: Cache, config: Config) -> Sequence[str]:
        """What the compiled graphs depend on besides their source: toolchain, chip, options."""
        return [self.fingerprint(config)]

    # ---- what a vendor may override -------------------------------------------------------------

    def refuses(self, node: fx.Node, config: Config) -> str:
        """Why a call runs eagerly though it has a rule; empty where it does not."""
        return ""

    def fuse(
        self, builder: Builder, items: Sequence[Item], outputs: Sequence[object]
    ) -> Sequence[Item]:
        """`items` rewritten to fewer or better operators."""
        return items

    def assign_formats(self, builder: Builder, graph: Graph, static: Collection[Slot]) -> Graph:
        """`graph` in the vendor's memory formats; `static` are the same in every run."""
        return graph

    def mask_padding(self, builder: Builder, items: Sequence[Item]) -> Sequence[Item]:
        """`items` with operands masked where an operator works along a padded dimension."""
        return items

    def bucket_refusal(self, graph: Graph) -> str | None:
        """Why a graph does not run on inputs padded to a shape bucket; None if it does."""
        return "the target pads no inputs"

    def render_static(self, graph: Graph, config: Config) -> tuple[Text, Text]:
        """The source text for known sizes only and the options, with an expression for each
        symbolic size."""
        texts = self.render_graph(graph, config), self.graph_options(graph, config)
        return Text.of(texts[0]), Text.of(texts[1])

    def graph_options(self, graph: Graph, config: Config) -> str:
        """The options that `compile` gets for a graph."""
        return ""

    def node_names(self, graph: Graph) -> Mapping[Node, str]:
        """The names of a graph's nodes in the compiler's messages."""
        return {node: node.name for node in graph.nodes}

    # ---- lower ----------------------------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> GraphProgram:
        return self._lower(gm, context, frozenset())

    def padding_refusal(self, gm: fx.GraphModule, context: LowerContext) -> str | None:
        program = self.lower(gm, context)
        eager = [f"{node.op} runs eagerly" for node in program.nodes if node.decision == "eager"]
        return next((why for why in (*eager, *(g.bucket_refusal for g in program.graphs)) if why),
                    None)  # fmt: skip

    def _lower(
        self, gm: fx.GraphModule, context: LowerContext, refused: frozenset[str]
    ) -> GraphProgram:
        """The program in which the nodes in `refused` run eagerly."""
        config = context.config
        builder = self.make_builder(_fake_mode(gm), config)
        result_of(self, "make_builder", builder, Builder)

        def decide(node: fx.Node) -> Decision:
            if node.name in refused:
                return Decision("eager", "the graph compiler refused it")
            if any(t.device.type == "meta" for t in tensors_of(node)):
                return Decision("eager", "tensor on meta, which has no memory")
            reason = self.refuses(node, config)
            if reason:
                return Decision("eager", reason)
            if config.fallback_random and is_random(node.target):
                return Decision("eager", "fallback_random asks for eager's own numbers")
            return self.decide(node)

        lowering = Lowering(gm, context, builder, self.rules, decide).run()
        items: Sequence[Item] = remove_dead(lowering.items, lowering.outputs)
        if config.shape_buckets:
            items = self.mask_padding(builder, items)
        if config.fuse:
            items = self.fuse(builder, items, lowering.outputs)
        if self.writing is not None:
            items = in_place(builder, items, self.writing)
        steps = Partition(builder, items).steps()
        static = _static_slots(lowering, context)
        if config.layout:
            steps = [
                self.assign_formats(builder, step, static) if isinstance(step, Graph) else step
                for step in steps
            ]
        once, steps = hoisted(builder, steps, static)
        for step in steps:
            if isinstance(step, Graph):
                self._finish(builder, step, config)
        program = assemble(lowering, steps, once, not self.facts.symbolic_shapes)
        program.retry = lambda more: self._lower(gm, context, refused | more)
        return program

    def _finish(self, builder: Builder, graph: Graph, config: Config) -> None:
        if self.needs_input and not graph.inputs:
            graph.nodes.insert(0, builder.ints_input([0]).node)
        if config.shape_buckets:
            graph.bucket_refusal = self.bucket_refusal(graph)

    # ---- render and build -----------------------------------------------------------------------

    def render(self, program: GraphProgram, config: Config) -> Source:
        texts = {graph.name: self._rendered(graph, config) for graph in program.graphs}
        return Source(texts, lambda: {f"{name}.cpp": text for name, text in texts.items()})

    def _rendered(self, graph: Graph, config: Config) -> str:
        origins = dict.fromkeys(node.origin for node in graph.nodes if node.origin)
        with naming_operators(self, list(origins)):
            text = self.render_graph(graph, config)
        return result_of(self, "render_graph", text, str)

    def build(
        self, program: GraphProgram, source: Source, cache: Cache, config: Config
    ) -> Artifact:
        while True:
            try:
                return self._build(program, source, cache, config)
            except GraphRejectedError as error:
                if config.rejected == "error" or not error.node or program.retry is None:
                    raise
                warnings.warn(
                    FallbackWarning(f"{error.aten} runs eagerly: {error.message}"), stacklevel=2
                )
                program = program.retry(frozenset({error.node}))
                source = self.render(program, config)

    def _build(
        self, program: GraphProgram, source: Source, cache: Cache, config: Config
    ) -> Artifact:
        plain: dict[str, Any] = {"program": program.serialized, "units": {}, "static": {}}
        keys = {}
        steps = _graph_steps(program.serialized)
        for graph in program.graphs:
            if graph.bucket_refusal is None:
                texts = self.render_static(graph, config)
                plain["static"][graph.name] = [each.encode() for each in texts]
                if not self.facts.symbolic_shapes:
                    continue  # compiled for each bucket when it occurs
            text, options = source.texts[graph.name], self.graph_options(graph, config)
            unit = GraphUnit.of(steps[graph.name], text, options)
            plain["units"][graph.name] = [text, options]
            try:
                keys[graph.name] = self._compiled(unit, cache, config).key
            except GraphRejectedError as error:
                raise self._located(error, graph, unit) from error
        return Artifact(self.name, plain, keys, program.objects)

    def _compiled(self, unit: GraphUnit, cache: Cache, config: Config) -> Entry:
        """A compiled graph, built if the cache does not have it."""
        key = key_of(UNIT, unit.text, unit.options, *self.identity(cache, config))

        def build() -> dict[str, bytes]:
            with disable_current_modes():
                files = result_of(self, "compile", self.compile(unit, cache, config), Mapping)
                return {k: result_of(self, "compile", v, bytes) for k, v in files.items()}

        return cache.get_or_build(UNIT, key, build)

    def _launched(self, unit: GraphUnit, cache: Cache, config: Config, key: str = "") -> Run:
        """The function that runs a compiled graph, which is compiled where the cache lacks it."""
        built = (cache.get(UNIT, key) if key else None) or self._compiled(unit, cache, config)
        with disable_current_modes():
            run = result_of(self, "launch", self.launch(unit, built, cache, config), Callable)
        if why := refusal(run, ("inputs", "outputs")):
            problem = f"returns a function that does not take (inputs, outputs): {why}"
            raise TargetFailureError(self.name, "launch", problem, definition_of(run))
        return run

    def _located(
        self, error: GraphRejectedError, graph: Graph, unit: GraphUnit
    ) -> GraphRejectedError:
        """The error with the operator that the compiler's message names, and where that comes
        from; with lines of the graph where it names none."""
        words = set(re.findall(r"\w+", error.message))
        for node, name in self.node_names(graph).items():
            if name in words and node.origin is not None:
                origin = node.origin
                return GraphRejectedError(
                    error.target, error.message, f"{name} ({node.kind})", origin.op,
                    origin.user_line, origin.node, describe(node),
                )  # fmt: skip
        lines = lines_of(unit.origins[:_SHOWN_LINES])
        return GraphRejectedError(error.target, error.message, user_line=lines)

    # ---- load and run ---------------------------------------------------------------------------

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        if self.simulated(config):
            self.warn_of_simulator(self.simulator)
        plain = artifact.program
        steps = _graph_steps(plain["program"])
        units = {name: GraphUnit.of(steps[name], *texts) for name, texts in plain["units"].items()}
        sources = {name: list(map(str, step["origins"])) for name, step in steps.items()}
        static = {name: list(map(Text.decode, texts)) for name, texts in plain["static"].items()}
        runs = {
            name: self._launched(unit, cache, config, artifact.units[name])
            for name, unit in units.items()
        }
        padded: Specializations[GraphUnit, Run] = Specializations(
            MAX_PADDED, plain["program"]["symbols"], each=len(static)
        )

        def padded_run(name: str, sizes: Mapping[str, int]) -> Run:
            text, options = (t.at(lambda size: evaluate_size(size, sizes)) for t in static[name])
            unit = GraphUnit.of(steps[name], text, options)
            return padded.find(unit, lambda: self._launched(unit, cache, config))

        def launch(
            name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
            sizes: Mapping[str, int] | None,
        ) -> None:  # fmt: skip
            run = runs[name] if sizes is None else padded_run(name, sizes)
            try:
                status = run(inputs, outputs)
            except Exception as error:
                raise_run_failure(error, run, self.name, f"graph {name}", sources[name])
            if status != 0:
                raise RunStatusError(self.name, f"graph {name}", status, "0", sources[name])

        return GraphExecutable(plain["program"], launch, artifact.objects)

    def outline(self, program: GraphProgram, sizes: Mapping[str, int]) -> Outline:
        return outline(program, sizes)


def _graph_steps(program: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Graph -> the step of a serialized program that runs it."""
    steps = (*program["once"], *program["steps"])
    return {step["graph"]: step for step in steps if "graph" in step}


def _static_slots(lowering: Lowering, context: LowerContext) -> set[Slot]:
    """The tensors that are the same in every run: constants, and frozen parameters."""
    static = set(lowering.constants)
    if context.config.freeze and context.kind == "inference":
        frozen = (lowering.inputs[position] for position in context.static_inputs)
        static |= {slot for slot in frozen if slot is not None}
    return static


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode | None:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, (tuple, list)) else [val]:
            mode = getattr(item, "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    return None
