"""Huawei Ascend: GE graphs written as C++, built offline, run through ACL or in the simulator."""

from __future__ import annotations

import ctypes
import json
import re
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.errors import (
    FallbackWarning,
    GraphRejectedError,
)
from dicp.graphop.assemble import assemble
from dicp.graphop.hoist import hoisted
from dicp.graphop.inplace import in_place
from dicp.graphop.lower import Lowering
from dicp.graphop.partition import Partition, remove_dead
from dicp.graphop.program import Graph, GraphProgram, Slot
from dicp.graphop.runtime import GraphExecutable
from dicp.serialize import evaluate_size
from dicp.target import (
    Artifact,
    Check,
    Decision,
    Executable,
    Facts,
    LowerContext,
    RuleTarget,
    Source,
    tensors_of,
)
from dicp.toolchain import load_content
from dicp.torch_private import FakeTensorMode
from dicp.vendor.ascend.codegen import (
    ENTRY,
    at_sizes,
    input_shapes,
    node_names,
    render_graph,
    render_static,
)
from dicp.vendor.ascend.doctor import checks
from dicp.vendor.ascend.fuse import fuse
from dicp.vendor.ascend.fuse.inplace import WRITING
from dicp.vendor.ascend.gears import refusal
from dicp.vendor.ascend.installation import operators_of
from dicp.vendor.ascend.layout import with_formats
from dicp.vendor.ascend.prototypes import DTYPES
from dicp.vendor.ascend.rules import RULES
from dicp.vendor.ascend.rules.core import Ge
from dicp.vendor.ascend.runtime import Driver, Model
from dicp.vendor.ascend.sink import sunk
from dicp.vendor.ascend.toolchain import (
    Toolchain,
    compile_shared,
    find_toolchain,
    load_driver,
)

PRECISION_MODES = {
    "keep": "must_keep_origin_dtype",
    "fast": "must_keep_origin_dtype",
    "half": "allow_mix_precision",
}
"""GE's names for what `precision` says: which dtypes it keeps."""
HOST_TENSORS = "a tensor of the host, where there is a device; runs_on='device' has it copied"


class AscendTarget(RuleTarget):
    """Compiles for Ascend chips; without CANN, for the simulator."""

    name = "ascend"
    device_type = "npu"
    facts = Facts(
        dtypes=frozenset(DTYPES),
        symbolic_shapes=True,
        keep=RULES.ops(),
        fusions=frozenset({"attention", "layer_norm", "rms_norm", "gelu"}),
        frozen_fusions=frozenset({"conv_bn"}),
    )
    rules = RULES

    def __init__(self) -> None:
        self._drivers: dict[str, Driver] = {}

    # ---- lower, render, build, load -------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> GraphProgram:
        return self._lower(gm, context, frozenset())

    def _lower(
        self, gm: fx.GraphModule, context: LowerContext, refused: frozenset[str]
    ) -> GraphProgram:
        """The program with the nodes in `refused` left to eager."""
        config = context.config

        def decide(node: fx.Node) -> Decision:
            if node.name in refused:
                return Decision("eager", "the graph compiler refused it")
            if not (toolchain.simulated or config.runs_on == "device") and _is_on_host(node):
                return Decision("eager", HOST_TENSORS)
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if config.fallback_random and random:
                return Decision("eager", "fallback_random asks for eager's own numbers")
            return self.decide(node)

        toolchain = find_toolchain(config)
        builder = Ge(_fake_mode(gm), operators_of(toolchain.cann))
        lowering = Lowering(gm, context, builder, RULES, decide).run()
        items = remove_dead(lowering.items, lowering.outputs)
        if config.fuse:
            items = fuse(builder, items, lowering.outputs)
            items, moved = sunk(builder, items)
            items = fuse(builder, items, lowering.outputs) if moved else items
        items = in_place(builder, items, WRITING)
        steps = Partition(builder, items).steps()
        static = _static_slots(lowering, context)
        if config.layout:
            steps = [
                with_formats(builder, step, static) if isinstance(step, Graph) else step
                for step in steps
            ]
        once, steps = hoisted(builder, steps, static)
        for step in steps:
            if isinstance(step, Graph) and not step.inputs:
                step.nodes.insert(0, builder.ints_input([0]).node)
            if config.gears and isinstance(step, Graph):
                step.gears = refusal(step)
        program = assemble(lowering, steps, once)
        program.retry = lambda more: self._lower(gm, context, refused | more)
        return program

    def render(self, program: GraphProgram, config: Config) -> Source:
        ports = operators_of(find_toolchain(config).cann).ports
        texts = {graph.name: render_graph(graph, ports) for graph in program.graphs}
        return Source(texts, lambda: {f"{name}.cpp": text for name, text in texts.items()})

    def build(
        self, program: GraphProgram, source: Source, cache: Cache, config: Config
    ) -> Artifact:
        toolchain = find_toolchain(config)
        while True:
            try:
                return self._build(program, source, toolchain, cache, config)
            except GraphRejectedError as error:
                if config.rejected == "error" or not error.node or program.retry is None:
                    raise
                warnings.warn(
                    FallbackWarning(f"{error.aten} runs eagerly: {error.message}"), stacklevel=2
                )
                program = program.retry(frozenset({error.node}))
                source = self.render(program, config)

    def _build(
        self, program: GraphProgram, source: Source, toolchain: Toolchain, cache: Cache,
        config: Config,
    ) -> Artifact:  # fmt: skip
        ports = operators_of(toolchain.cann).ports
        shapes = {graph.name: input_shapes(graph) for graph in program.graphs}
        units = {}
        for graph in program.graphs:
            try:
                units[graph.name] = self._build_graph(
                    graph.name,
                    source.texts[graph.name],
                    shapes[graph.name],
                    toolchain,
                    cache,
                    config,
                ).key
            except GraphRejectedError as error:
                raise _located(error, graph) from error
        geared = [graph for graph in program.graphs if graph.gears is None]
        static = {graph.name: render_static(graph, ports) for graph in geared}
        plain = {
            "program": program.plain,
            "texts": source.texts,
            "shapes": shapes,
            "static": static,
        }
        return Artifact(self.name, plain, units, program.objects)

    def _build_graph(
        self, name: str, text: str, shapes: str, toolchain: Toolchain, cache: Cache, config: Config
    ) -> Entry:
        """A graph's offline model, built if the cache does not have it."""
        driver = self._driver(toolchain, cache)
        precision = PRECISION_MODES[config.precision]
        key = key_of("model", text, shapes, toolchain.identity, driver.soc(), precision)

        def build() -> dict[str, bytes]:
            shared = compile_shared(toolchain, text, symbols=(ENTRY,))
            library = load_content(self.name, shared, (ENTRY,))
            define = ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value
            assert define is not None
            model = driver.build(define, name, precision, shapes)
            facts = {"soc": driver.soc()}
            return {"graph.cpp": text.encode(), "graph.om": model,
                    "facts.json": json.dumps(facts).encode()}  # fmt: skip

        return cache.get_or_build("model", key, build)

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        toolchain = find_toolchain(config)
        plain = artifact.program
        program = plain["program"]
        steps = [step for step in (*program["once"], *program["steps"]) if "graph" in step]
        written = {step["graph"]: step["written"] for step in steps}

        def entry_of(name: str, key: str) -> Entry:
            found = cache.get("model", key)  # it may be gone since the program was stored
            text, shapes = plain["texts"][name], plain["shapes"][name]
            return found or self._build_graph(name, text, shapes, toolchain, cache, config)

        def loaded(name: str, entry: Entry, dynamic: bool) -> Model:
            soc = json.loads(entry.read("facts.json"))["soc"]
            driver = self._driver(toolchain, cache)
            return Model(driver, entry.read("graph.om"), soc, dynamic, written[name])

        models = {
            name: loaded(name, entry_of(name, key), bool(plain["shapes"][name]))
            for name, key in artifact.units.items()
        }
        geared: dict[tuple[str, str], Model] = {}

        def launch(
            name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
            gears: Mapping[str, int] | None,
        ) -> None:  # fmt: skip
            if gears is None:
                models[name](inputs, outputs)
                return
            text = at_sizes(plain["static"][name], lambda size: evaluate_size(size, gears))
            if (name, text) not in geared:
                entry = self._build_graph(name, text, "", toolchain, cache, config)
                geared[name, text] = loaded(name, entry, False)
            geared[name, text](inputs, outputs)

        return GraphExecutable(plain["program"], launch, artifact.objects)

    def _driver(self, toolchain: Toolchain, cache: Cache) -> Driver:
        if toolchain.identity not in self._drivers:
            self._drivers[toolchain.identity] = Driver(
                load_driver(toolchain, cache), toolchain.simulated
            )
        return self._drivers[toolchain.identity]

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        toolchain = find_toolchain(config)
        if toolchain.simulated:
            return key_of(toolchain.identity)
        return key_of(toolchain.identity, self._driver(toolchain, Cache.open(config)).soc())

    def simulated_counts(self) -> Mapping[str, int]:
        """What the simulator has run in this process: launches, operators, transposes."""
        return next((d.simulator.counts for d in self._drivers.values() if d.simulator), {})

    def doctor(self, config: Config) -> list[Check]:
        return checks(config, self._soc)

    def _soc(self, config: Config) -> str:
        return self._driver(find_toolchain(config), Cache.open(config)).soc()


def _static_slots(lowering: Lowering, context: LowerContext) -> set[Slot]:
    """The tensors that are the same in every run: constants, and frozen parameters."""
    static = set(lowering.constants)
    if context.config.freeze and context.kind == "inference":
        frozen = (lowering.inputs[position] for position in context.static_inputs)
        static |= {slot for slot in frozen if slot is not None}
    return static


def _located(error: GraphRejectedError, graph: Graph) -> GraphRejectedError:
    """The error with the operator that GE's message names, and where that comes from."""
    words = set(re.findall(r"\w+", error.message))
    for node, name in node_names(graph).items():
        if name in words and node.origin is not None:
            origin = node.origin
            return GraphRejectedError(
                error.target, error.message, f"{name} ({node.kind})", origin.op, origin.user_line,
                origin.node,
            )  # fmt: skip
    return error


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode | None:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, (tuple, list)) else [val]:
            mode = getattr(item, "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    return None


def _is_on_host(node: fx.Node) -> bool:
    """Whether a call works on tensors of the host alone."""
    found = tensors_of(node)
    return bool(found) and all(tensor.device.type == "cpu" for tensor in found)
