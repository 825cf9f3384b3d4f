"""Times of a compiled graph's kernels and of the calls between them, from a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.inspection import InspectedGraph
from dicp.effects import is_view
from dicp.op_tools.graph_reference import call_site_of
from dicp.op_tools.records import CallId
from dicp.op_tools.timing import OpTimeMeasure, Timing
from dicp.origin import profiled_name
from dicp.target import KernelReport
from dicp.torch_private import OpOverload, profiling


def timed(graph: InspectedGraph, inputs: list[Any], timers: Sequence[OpTimeMeasure]) -> Any:
    """Run the graph, each kernel in its own range of a profiler where there are timers."""
    if not timers or profiling():
        return graph.executable(inputs)
    with torch.profiler.profile() as profile:
        outputs = graph.executable(inputs)
    spent: dict[str, list[float]] = {}
    for event in profile.events():
        if event.cpu_parent is None and "::" in event.name:
            device = getattr(event, "device_time_total", 0)
            spent.setdefault(event.name, []).append((device or event.cpu_time_total) / 1e3)
    for timer in timers:
        for record in _timings(graph, spent):
            timer.keep(record)
    return outputs


def _timings(graph: InspectedGraph, spent: Mapping[str, Sequence[float]]) -> Iterator[Timing]:
    """A timing per run of a kernel and per call between kernels, by the profiler's names."""
    nodes = {node.name: node for node in graph.gm.graph.nodes}
    reports: dict[str, list[KernelReport]] = {}
    for kernel in graph.kernels:
        reports.setdefault(profiled_name(kernel.name, kernel.origins), []).append(kernel)
    callers: dict[str, list[fx.Node]] = {}
    for node in nodes.values():
        if isinstance(node.target, OpOverload) and not is_view(node.target):
            callers.setdefault(node.target.name().partition(".")[0], []).append(node)
    for name, times in spent.items():
        if name in reports:  # equal kernels have one report
            own = reports[name]
            for k, time in enumerate(times):
                kernel = own[min(k, len(own) - 1)]
                inside = [nodes[o.node] for o in kernel.origins if o.node in nodes]
                yield from _timings_of_kernel(kernel.name, inside, time)
        elif name in callers or not name.startswith("aten::"):  # the run itself makes aten's others
            for time, node in zip_longest(times, callers.get(name, [])[: len(times)]):
                called = str(node.target) if node is not None else name
                yield Timing(
                    called, CallId.new(), call_site_of([node] if node is not None else []), time
                )


def _timings_of_kernel(name: str, inside: Sequence[fx.Node], total: float) -> Iterator[Timing]:
    """The kernel's, and for each of its operators a share by the bytes of its result."""
    number = CallId.new()
    yield Timing(name, number, call_site_of(inside), total)
    sizes = [_bytes(node) for node in inside]
    if len(inside) > 1 and any(sizes):
        for node, size in zip(inside, sizes, strict=True):
            share = total * size / sum(sizes)
            yield Timing(str(node.target), number, call_site_of([node]), share, estimated=True)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.numel()) * value.dtype.itemsize
    except Exception:  # a size known only at run time
        return value.dtype.itemsize
