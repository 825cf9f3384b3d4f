"""The compiler from top to bottom: Dynamo's FX graph in, a callable out."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
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
from dicp.dynamo_bridge.decompose import decompositions
from dicp.dynamo_bridge.fuse.families import FUSE
from dicp.dynamo_bridge.layout import LAYOUT
from dicp.dynamo_bridge.observe import GraphReport, Observer
from dicp.dynamo_bridge.passes.base import Pass, PassContext, run_passes
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.dynamo_bridge.passes.freeze import FrozenExecutable, split_frozen, static_positions
from dicp.errors import (
    CompilerError,
    FallbackWarning,
    GraphRejectedError,
    PrototypeError,
    ToolchainError,
)
from dicp.target import Artifact, Executable, KernelReport, LowerContext, NodeReport, Target
from dicp.torch_private import disable_current_modes, free_unbacked_symbols, write_out_traces
from dicp.version import VERSION


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    target: Target,
    config: Config,
    on_report: Callable[[GraphReport], None],
) -> Callable[..., Any]:
    """Compile Dynamo's graph for `target`.

    Raises ToolchainError or CompilerError where no code can be built (with
    `on_compile_error="eager"` the graph then runs eagerly, with one warning), and
    UnsupportedOperatorError where `fallback="error"` and an operator has no rule.
    """
    cache = Cache.open(config)
    try:
        fingerprint = target.fingerprint(config)
    except ToolchainError as error:
        if config.on_compile_error == "raise":
            raise
        warnings.warn(FallbackWarning(f"running eagerly: {error}"), stacklevel=2)
        report = GraphReport("dynamo", f"graph{key_of(str(id(gm)))[:8]}")
        report.nodes = _left_to_eager(gm, "the code could not be built")
        on_report(report)
        return gm.forward
    write_out_traces(gm)
    identity = key_of(own_version(), torch.__version__, target.name, fingerprint, config.key())

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], info: GraphInfo) -> CompiledGraph:
        report = GraphReport(info.kind, f"graph{key_of(str(id(graph)))[:8]}")
        observer = Observer(config, report)
        try:
            return _compile_graph(graph, info, target, config, cache, identity, observer)
        except (ToolchainError, CompilerError, GraphRejectedError, PrototypeError) as error:
            if config.on_compile_error == "raise":
                raise
            warnings.warn(FallbackWarning(f"running eagerly: {error}"), stacklevel=2)
            return run_eagerly(graph, report, "the code could not be built")
        finally:
            observer.finish()
            on_report(report)

    def load_graph(text: str) -> CompiledGraph:
        report = GraphReport("loaded")
        observer = Observer(config, report)
        try:
            return _load(text, "aot", target, config, cache, observer)
        finally:
            observer.finish()
            on_report(report)

    def joint_passes(joint: fx.GraphModule, inputs: Any) -> None:
        context = PassContext(target.facts, config, "joint", Inference.of(joint))
        run_passes(joint, graph_passes(config, "joint"), context)

    def prepare() -> None:
        target.prepare(gm, wants_gradients(example_inputs), cache, config)

    return compile_graphs(
        gm,
        example_inputs,
        decompositions=decompositions(target),
        compile_graph=compile_graph,
        load_graph=load_graph,
        identity=identity,
        joint_passes=joint_passes,
        recompute_operands=target.facts.recomputes_operands,
        cache=cache if not config.freeze else None,
        before_capture=prepare,
    )


def _compile_graph(
    gm: fx.GraphModule,
    info: GraphInfo,
    target: Target,
    config: Config,
    cache: Cache,
    identity: str,
    observer: Observer,
) -> CompiledGraph:
    """One functional ATen graph: passes, program, source, artifact, executable."""
    report = observer.report
    observer.graph("aten", gm)
    if has_data_dependent_sizes(gm):
        return run_eagerly(gm, report, "sizes depend on data")

    with observer.stage("graph key"):
        key = graph_key(gm, info, identity)
    entry = cache.get("graph", key) if config.dump is None else None
    if entry is not None:
        text = entry.read("artifact.json").decode()
        return _load(text, "graph", target, config, cache, observer)

    context = PassContext(
        target.facts, config, info.kind, Inference.of(gm), frozenset(info.static_inputs)
    )
    run_passes(gm, graph_passes(config, info.kind), context, observer.after_pass)
    frozen = split_frozen(gm, context) if config.freeze and info.kind == "inference" else None
    if frozen is not None:
        static = (), static_positions(frozen[1], info)  # in the first part nothing is kept
        once, rest = (
            _build(part, replace(info, static_inputs=kept), target, config, cache, observer)
            for part, kept in zip(frozen, static, strict=True)
        )
        return CompiledGraph(None, FrozenExecutable(once[1], rest[1]))
    artifact, executable = _build(gm, info, target, config, cache, observer)
    if artifact.objects:
        return CompiledGraph(None, executable)
    text = encode(artifact, report)
    cache.put("graph", key, {"artifact.json": text.encode()})
    return CompiledGraph(text, executable)


def _build(
    gm: fx.GraphModule,
    info: GraphInfo,
    target: Target,
    config: Config,
    cache: Cache,
    observer: Observer,
) -> tuple[Artifact, Executable]:
    """The target's part: lower, render, build, load."""
    report = observer.report
    with observer.stage("lower"):
        lower = LowerContext(config, info.kind, frozenset(info.static_inputs), target.name)
        program = target.lower(gm, lower)
    report.nodes = [*report.nodes, *program.nodes]
    report.kernels = [*report.kernels, *program.kernels()]
    if config.dump is not None:
        observer.text("program.txt", program.text())
        for name, text in target.render(program, config).files.items():
            observer.text(name, text)
    with observer.stage("build"):
        artifact = target.build(program, cache, config)
    with observer.stage("load"):
        return artifact, target.load(artifact, cache, config)


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


def run_eagerly(gm: fx.GraphModule, report: GraphReport, reason: str) -> CompiledGraph:
    """The graph as it is, operator by operator."""
    report.nodes = _left_to_eager(gm, reason)
    gm.recompile()

    def run(inputs: list[Any]) -> Any:
        args = list(inputs)
        inputs.clear()
        return gm(*args)

    return CompiledGraph(None, run)


def _left_to_eager(gm: fx.GraphModule, reason: str) -> list[NodeReport]:
    return [
        NodeReport(n.name, str(n.target), "eager", reason, "")
        for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")
    ]  # fmt: skip


@lru_cache(maxsize=1)
def own_version() -> str:
    """dicp's version and its files as installed: another dicp's results are never taken."""
    package = Path(__file__).parent.parent
    files = sorted(p for p in package.rglob("*") if p.suffix in (".py", ".h", ".jinja"))
    stats = [(str(p.relative_to(package)), p.stat()) for p in files]
    return key_of(VERSION, [f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats])


def has_data_dependent_sizes(gm: fx.GraphModule) -> bool:
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(item, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                if free_unbacked_symbols(item):
                    return True
    return False


def wants_gradients(inputs: Sequence[Any]) -> bool:
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def graph_key(gm: fx.GraphModule, info: GraphInfo, identity: str) -> str:
    """What the compiled code depends on: operators, arguments, every input's layout, constants."""
    inputs, constants = [], []
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            inputs.append(_layout(val))
        elif node.op == "get_attr":
            constants.append(_constant_digest(gm, str(node.target)))
    gm.recompile()
    return key_of(identity, info.kind, list(map(str, info.static_inputs)), gm.code, inputs,
                  constants)  # fmt: skip


def _layout(val: Any) -> str:
    if isinstance(val, torch.Tensor) and val.layout == torch.strided:
        return f"{val.dtype} {list(val.shape)} {list(val.stride())} {val.device}"
    return f"{type(val).__name__} {val}"


def _constant_digest(gm: fx.GraphModule, name: str) -> str:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        return value.code
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return str(id(value))
    with disable_current_modes():
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    return key_of(data, _layout(value))


def _load(
    text: str, level: str, target: Target, config: Config, cache: Cache, observer: Observer
) -> CompiledGraph:
    """A graph stored by an earlier compilation, with its report."""
    report = observer.report
    with observer.stage("load"):
        stored = json.loads(text)
        kind, nodes, kernels = stored.pop("report")
        report.cache, report.kind = level, kind
        report.nodes = [NodeReport(*row) for row in nodes]
        report.kernels = [KernelReport(name, tuple(sources)) for name, sources in kernels]
        return CompiledGraph(text, target.load(Artifact(**stored), cache, config))


def encode(artifact: Artifact, report: GraphReport) -> str:
    """An artifact and the report of its graph as JSON."""
    kernels = [(k.name, k.sources) for k in report.kernels]
    nodes = [(n.name, n.op, n.decision, n.reason, n.user_line) for n in report.nodes]
    return json.dumps(
        {
            "target": artifact.target,
            "program": artifact.program,
            "units": dict(artifact.units),
            "report": (report.kind, nodes, kernels),
        }
    )
