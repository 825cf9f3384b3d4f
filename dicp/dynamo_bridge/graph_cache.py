"""Compiled graphs on disk: their keys, their guards, their serialized form.

An entry's key covers everything that was known when its graph was compiled. The entry is valid
where the guards that its own compilation added hold as well. A compilation that loads the entry
adds these guards too, so that it is as specialized as one that compiles anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from dicp.adaptor import adaptor_text
from dicp.cache import Cache, Entry, key_of
from dicp.config import Config
from dicp.dynamo_bridge.aot_graph import GraphInfo, OtherLinesError
from dicp.dynamo_bridge.observe import GraphReport
from dicp.dynamo_bridge.provenance import dynamo_nodes
from dicp.dynamo_bridge.thresholds import MAX_VARIANTS
from dicp.origin import Origin, SourceLocation, user_locations
from dicp.rule_errors import result_of
from dicp.serialize import bytes_of
from dicp.target import Artifact, KernelReport, NodeReport, Target
from dicp.torch_private import (
    ShapeFacts,
    fills_uninitialized,
    is_object,
)
from dicp.version import VERSION

_KIND: Final = "graph"
_ORIGIN: Final = "@origin"


class _NotStorable(Exception):
    """A graph has a constant that cannot be part of a key."""


@dataclass(frozen=True, eq=False)
class GraphLookup:
    """Where a graph's result is stored (no key: nowhere), and the result found there, if any."""

    facts: ShapeFacts
    key: str = ""
    found: StoredGraph | None = None


@dataclass(frozen=True)
class StoredGraph:
    """A compiled graph that can be serialized.

    `line_of` maps a node of the captured graph to the node of Dynamo's graph whose line it has.
    Lines themselves are not stored: equal graphs occur in different places of a program.
    """

    artifact: Artifact
    report: tuple[str, tuple[NodeReport, ...], tuple[KernelReport, ...]]
    line_of: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> str:
        """The graph as JSON. Raises TypeError for an artifact that cannot be serialized."""
        kind, nodes, kernels = self.report
        artifact = self.artifact
        plain = {
            "target": artifact.target,
            "program": artifact.program,
            "units": dict(artifact.units),
            "kind": kind,
            "nodes": [(n.origin, n.decision, n.reason) for n in nodes],
            "kernels": [(k.name, k.origins) for k in kernels],
            "line_of": dict(self.line_of),
            "baked": [(o, o.user_line) for o in artifact.baked],
        }
        return json.dumps(plain, default=_plain_origin)

    @classmethod
    def decode(cls, text: str, dynamo_locations: Mapping[str, SourceLocation]) -> StoredGraph:
        """The graph stored as `text`, with the lines of the current Dynamo graph.

        Raises OtherLinesError.
        """
        line_of = json.loads(text)["line_of"]
        locations = {
            name: dynamo_locations.get(source, SourceLocation()) for name, source in line_of.items()
        }
        return cls._decoded(text, locations, line_of)

    @classmethod
    def decode_for(cls, text: str, gm: fx.GraphModule) -> StoredGraph:
        """The graph stored as `text`, with the lines of the captured graph `gm`."""
        return cls._decoded(text, user_locations(gm), dynamo_nodes(gm))

    @classmethod
    def _decoded(
        cls, text: str, locations: Mapping[str, SourceLocation], line_of: Mapping[str, str]
    ) -> StoredGraph:
        def with_origins(value: dict[str, Any]) -> Any:
            if value.keys() != {_ORIGIN}:
                return value
            node, op, source = value[_ORIGIN]
            location = locations.get(source, SourceLocation())
            return Origin(node, op, location.line, source, location.trace)

        plain = json.loads(text, object_hook=with_origins)
        if any(origin.user_line != line for origin, line in plain["baked"]):
            raise OtherLinesError
        nodes = tuple(NodeReport(*row) for row in plain["nodes"])
        kernels = tuple(KernelReport(name, tuple(origins)) for name, origins in plain["kernels"])
        artifact = Artifact(plain["target"], plain["program"], plain["units"],
                            baked=tuple(origin for origin, _ in plain["baked"]))  # fmt: skip
        return cls(artifact, (plain["kind"], nodes, kernels), line_of)

    def restore(self, report: GraphReport) -> None:
        """Add the report of the compilation that made this graph to `report`."""
        report.kind, nodes, kernels = self.report
        report.nodes = [*report.nodes, *nodes]
        report.kernels = [*report.kernels, *kernels]


def _plain_origin(value: Any) -> dict[str, Any]:
    if not isinstance(value, Origin):
        raise TypeError(f"{type(value).__name__} has no serialized form")
    return {_ORIGIN: [value.node, value.op, value.line_of]}


def graph_context_key(target: Target, config: Config) -> str:
    """The key of everything outside of a graph that changes its code."""
    return key_of(
        own_version(),
        source_of(type(target)),
        torch.__version__,
        str(torch.get_default_dtype()),
        str((torch.are_deterministic_algorithms_enabled(), fills_uninitialized())),
        target.name,
        result_of(target, "fingerprint", target.fingerprint(config), str),
        config.key(target.options),
        adaptor_text(target, config),
    )


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


def _file_stats(path: Path) -> list[str]:
    """Name, size and time of every file in a folder, or of one file.

    Of any ending: a vendor's kernels, headers and tables have their own. Python's own `__pycache__`
    is left out: other processes write it, under names that vanish.
    """
    found = [path] if path.is_file() else path.rglob("*")
    files = sorted(p for p in found if "__pycache__" not in p.parts and p.is_file())
    stats = [(str(p.relative_to(path.parent)), p.stat()) for p in files]
    return [f"{name} {s.st_size} {s.st_mtime_ns}" for name, s in stats]


def find_graph(
    cache: Cache | None, gm: fx.GraphModule, info: GraphInfo, identity: str
) -> GraphLookup:
    """Looks a captured graph up, and adds the guards of what is found to this compilation."""
    facts = ShapeFacts.of(gm)
    if cache is None:
        return GraphLookup(facts)
    try:
        base = graph_key(gm, info, identity, facts)
    except _NotStorable:
        return GraphLookup(facts)
    for key, entry in variants(cache, _KIND, base):
        if entry is None:
            break
        guards = json.loads(entry.read("guards.json"))
        if not facts.hold(guards):
            continue
        try:
            found = StoredGraph.decode_for(entry.read("artifact.json").decode(), gm)
        except OtherLinesError:
            continue
        facts.add(guards)
        return GraphLookup(facts, key, found)
    return GraphLookup(facts, key)


def variants(cache: Cache, kind: str, base: str) -> Iterator[tuple[str, Entry | None]]:
    """The keys and entries of the results that differ in their guards; last the first free key."""
    for variant in range(MAX_VARIANTS):
        key = key_of(base, variant)
        entry = cache.get(kind, key)
        yield key, entry
        if entry is None:
            return


def store_graph(cache: Cache, lookup: GraphLookup, graph: StoredGraph) -> str | None:
    """Stores a compiled graph; returns its serialized form, or None if it has none."""
    if graph.artifact.objects:
        return None
    text = graph.encode()
    guards = lookup.facts.added()
    if lookup.key and guards is not None:
        files = {"artifact.json": text.encode(), "guards.json": json.dumps(guards).encode()}
        cache.put(_KIND, lookup.key, files)
    return text


def graph_key(gm: fx.GraphModule, info: GraphInfo, identity: str, facts: ShapeFacts) -> str:
    """The key of a graph: operators, arguments, constants, layouts, and facts about symbols.

    Layouts of inner nodes matter only where there are symbols: a guard may have decided them.
    """
    layouts, constants = [], []
    for node in gm.graph.nodes:
        if node.op == "placeholder" or facts.symbols:
            layouts.append(_layout(node.meta.get("val")))
        if node.op == "get_attr":
            constants.append(_constant_digest(gm, str(node.target)))
    code = gm.graph.python_code("self").src  # PyTorch keeps what `gm.code` compiles for good
    static = list(map(str, info.static_inputs))
    return key_of(identity, info.kind, static, code, layouts, constants, facts.known())


def _layout(val: Any) -> str:
    if isinstance(val, torch.Tensor) and val.layout == torch.strided:
        bits = f"{val.is_conj()} {val.is_neg()}"
        return f"{val.dtype} {list(val.shape)} {list(val.stride())} {val.device} {bits}"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(_layout, val))})"
    if is_object(val):
        return "object"  # its text has an address
    return f"{type(val).__name__} {val}"


def _constant_digest(gm: fx.GraphModule, name: str) -> str:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        inner = value.graph.find_nodes(op="get_attr")
        return key_of(value.code, [_constant_digest(value, str(node.target)) for node in inner])
    if value is None or isinstance(value, (bool, int, float, str)):
        return key_of(value)
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if not plain or value.is_quantized or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise _NotStorable(name)
    return key_of(bytes_of(value), _layout(value))


def graph_name(gm: fx.GraphModule) -> str:
    """A name that equal graphs share in every process."""
    return f"graph{key_of([node.name for node in gm.graph.nodes])[:8]}"
