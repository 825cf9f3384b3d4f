"""The target of the simulated chip: code of the host's target, run on the chip's memory.

Graphs of the eager device's tensors are compiled as graphs of host tensors. A run sees the
device's memory through host views, and its results are allocated there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache
from dicp.config import Config, DeviceSettings
from dicp.discovery import discover
from dicp.effects import is_random
from dicp.errors import InvalidTargetError
from dicp.outline import Outline
from dicp.rules import DecisionKind
from dicp.target import (
    Artifact,
    Check,
    Decision,
    Executable,
    LowerContext,
    Source,
    Target,
    find_target,
)
from dicp.torch_private import HOST, FakeTensor, pytree, true_device

DEVICE_TYPE = "dipu"
_PLACES, _WRITTEN, _GENERATOR = "places", "written", "generator"
_SWAPPING = Lock()
"""Held while the host's default generator has the state of a device's."""


def host_target() -> Target:
    """The target of highest priority that compiles for the host."""
    names = [name for name, point in discover().items() if not point.value.startswith(__name__)]
    found = []
    for name in sorted(names):
        with contextlib.suppress(InvalidTargetError):  # another vendor's package is damaged
            found.append(find_target(name))
    return max((t for t in found if t.device_type == HOST), key=lambda target: target.priority)


class HostedTarget(Target):
    """The host's target for tensors of the eager device."""

    name = DEVICE_TYPE
    device_type = DEVICE_TYPE

    def __init__(self) -> None:
        self.host = host_target()
        self.facts = self.host.facts
        self.options = self.host.options

    def decide(self, node: fx.Node) -> Decision:
        return self.host.decide(node)

    def rule_kind(self, op: Any) -> DecisionKind | None:
        return self.host.rule_kind(op)

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        self.host.prepare(gm, train, cache, config)

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        places, written = output_places(gm), written_inputs(gm.graph)
        generator = generator_index(gm.graph)
        program = self.host.lower(moved_to_host(gm), replace(context, target=self.host.name))
        return _Hosted(program, places, written, generator)

    def render(self, program: Any, config: Config) -> Source:
        return self.host.render(program.inner, config)

    def build(self, program: Any, source: Source, cache: Cache, config: Config) -> Artifact:
        built = self.host.build(program.inner, source, cache, config)
        kept = {
            **built.program, _PLACES: program.places, _WRITTEN: program.written,
            _GENERATOR: program.generator,
        }  # fmt: skip
        return replace(built, target=self.name, program=kept)

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        program = dict(artifact.program)
        places, written = program.pop(_PLACES), program.pop(_WRITTEN)
        generator = program.pop(_GENERATOR)
        inner = replace(artifact, target=self.host.name, program=program)
        executable = self.host.load(inner, cache, config)
        draw_within = getattr(executable, "draw_within", None)
        if generator is not None and draw_within is not None:
            draw_within(partial(drawing_from, generator))
        return _HostedExecutable(executable, places, written)

    def outline(self, program: Any, sizes: Mapping[str, int]) -> Outline | None:
        return self.host.outline(program.inner, sizes)

    def fingerprint(self, config: Config) -> str:
        return self.host.fingerprint(config)

    def simulated(self, config: Config) -> bool:
        return not DeviceSettings.from_env().vendor

    def doctor(self, config: Config) -> list[Check]:
        return self.host.doctor(config)


class _Hosted:
    """A program of the host's target, the device of each result: an index, or None, the positions
    of the inputs that it overwrites, and the device whose generator it draws from."""

    def __init__(
        self, inner: Any, places: Sequence[int | None], written: Sequence[int],
        generator: int | None,
    ) -> None:  # fmt: skip
        self.inner, self.places, self.written = inner, list(places), list(written)
        self.generator = generator

    @property
    def nodes(self) -> Any:
        return self.inner.nodes

    def text(self) -> str:
        return str(self.inner.text())

    def kernels(self) -> Any:
        return self.inner.kernels()


class _HostedExecutable:
    """Runs on host views of its inputs, which are device tensors and host numbers."""

    def __init__(
        self, inner: Executable, places: Sequence[int | None], written: Sequence[int]
    ) -> None:
        self.inner, self.places, self.written = inner, places, written

    def __call__(self, inputs: list[Any]) -> list[Any]:
        on_device = [x for x in inputs if isinstance(x, torch.Tensor) and _on_device(x)]
        if not on_device and all(place is None for place in self.places):
            return self.inner(inputs)
        native = torch.get_device_module(DEVICE_TYPE).native
        index = native.current_device()
        for place in self.places:
            index = index if place is None else place
        call = native.HostCall(index)
        native.wait_for_queue(index)
        on_host = [call.on_host(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        copied = not native.host_addressable()
        overwritten = [(inputs[k], on_host[k]) for k in self.written] if copied else []
        inputs.clear()
        prepare = getattr(self.inner, "prepare", None)
        if prepare is not None:
            prepare(on_host)
        with native.HostMemory(index):
            results = self.inner(on_host)
        for given, copy in overwritten:
            given.copy_(copy)
        return [
            result if place is None or not isinstance(result, torch.Tensor)
            else call.on_device(result)
            for result, place in zip(results, self.places, strict=True)
        ]  # fmt: skip


@contextlib.contextmanager
def drawing_from(index: int) -> Iterator[None]:
    """Within, the host's default generator draws the numbers of a device's."""
    own = torch.get_device_module(DEVICE_TYPE).native.default_generator(index)
    shared = torch.default_generator
    with _SWAPPING:
        before = shared.get_state()
        shared.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(shared.get_state())
            shared.set_state(before)


def _on_device(tensor: torch.Tensor) -> bool:
    return bool(true_device(tensor).type == DEVICE_TYPE)


def written_inputs(graph: fx.Graph) -> list[int]:
    """The positions of the inputs that a graph overwrites."""
    from dicp.dynamo_bridge.analysis.aliases import written_roots  # imports sympy

    roots = written_roots(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [k for k, node in enumerate(inputs) if node in roots]


def generator_index(graph: fx.Graph) -> int | None:
    """The index of the device on which a graph draws random numbers; None if it does not."""
    drawn = [node.meta.get("val") for node in graph.nodes if is_random(node.target)]
    leaves = pytree.tree_leaves(drawn)
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return next((d.index or 0 for d in devices if d.type != HOST), None)


def output_places(gm: fx.GraphModule) -> list[int | None]:
    """The device index of each result of a graph; None for host tensors and other values."""
    outputs: Any = gm.graph.output_node().args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in outputs]
    return [
        (value.device.index or 0)
        if isinstance(value, torch.Tensor) and value.device.type != HOST else None
        for value in values
    ]  # fmt: skip


def moved_to_host(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with the host for every device, in arguments and in what is known of the nodes'
    values. Tools compile the graph itself again."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(gm.graph.output_node().meta)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(HOST)
        if isinstance(value, FakeTensor) and value.device.type != HOST:
            with value.fake_mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=HOST
                )
        return value

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    return fx.GraphModule(gm, graph)
