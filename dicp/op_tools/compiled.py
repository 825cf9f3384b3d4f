"""The tools inside compiled graphs: the graph step by step through its provenance map.

A graph is compiled once more with every tensor that crosses from one kernel to another as a result.
These are what the kernels really compute; each kernel is judged alone, on the real inputs that it
had, so that errors do not add up. For a kernel that diverges, every operator's own result is made a
result of the graph, which shows the operator that diverges.

The program always gets what the unchanged graph computes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from dicp.dynamo_bridge.inspection import InspectedGraph, register_inspector
from dicp.dynamo_bridge.timed import copied_as_laid_out
from dicp.errors import OverflowFoundError
from dicp.op_tools.autocompare import OpAutoCompare, Record
from dicp.op_tools.capture import CAPTURES, OpCapture
from dicp.op_tools.draws import GeneratorStates
from dicp.op_tools.frame import FRAME, Call
from dicp.op_tools.graph_reference import (
    Evaluator,
    call_site_of,
    is_random_node,
    is_tensor,
    moved_by_roundings,
    mutated_inputs,
    named_inputs,
    placeholders,
    reproducer,
    tensor_nodes,
)
from dicp.op_tools.graph_timing import timed
from dicp.op_tools.overflow import OpOverflowCheck, Statistics, statistics
from dicp.op_tools.overwriting import same_values
from dicp.op_tools.records import CallId, CallSite, heading, logger
from dicp.op_tools.tables import table
from dicp.op_tools.timing import OpTimeMeasure
from dicp.op_tools.verdict import COLUMNS, Comparison, as_promised, compare
from dicp.origin import user_line
from dicp.target import KernelReport

Group = tuple[str, list[fx.Node]]
"""A kernel's name and its nodes; an operator outside of kernels is a group of its own."""


OVERWRITTEN = "overwritten, though the graph may not"


@dataclass(frozen=True)
class Steps:
    """A graph compiled with intermediate tensors (`names`) as results after its own `count`."""

    executable: Any
    kernels: tuple[KernelReport, ...]
    names: list[str]
    count: int


@dataclass(frozen=True)
class Values:
    """What one run really computed, by the name of the graph's node, and the graph's results."""

    real: dict[str, Any]
    outputs: Sequence[Any]


class CompiledGraphs:
    """Looks into the graphs of dicp's backends while a tool runs in the calling thread."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[InspectedGraph, dict[str, Steps]] = WeakKeyDictionary()

    def active(self) -> bool:
        return FRAME.anywhere

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        with FRAME.unhooked():
            yield

    def run(self, graph: InspectedGraph, inputs: list[Any]) -> Any:
        features = FRAME.features
        with FRAME.unhooked(), torch.no_grad():
            timers = [f for f in features if isinstance(f, OpTimeMeasure)]
            checks = [
                f for f in features if isinstance(f, (OpAutoCompare, OpCapture, OpOverflowCheck))
            ]
            if not checks:
                return timed(graph, inputs, timers)
            before = copied_inputs(graph, inputs, every=True)
            given = list(inputs)
            states = GeneratorStates.of(before)
            outputs = timed(graph, list(inputs), timers)
            inputs.clear()
            after = states.now()
            try:
                states.restore()
                self.inspect(graph, before, outputs, checks)
                self._check_inputs(graph, before, given, checks)
            except OverflowFoundError:  # asked for by raise_on_bad
                raise
            except Exception as error:  # a tool's own defect must not end the program
                name = type(error).__name__
                logger().warning(f"a compiled graph cannot be looked into: {name}: {error}")
            finally:
                after.restore()
            return outputs

    def inspect(
        self, graph: InspectedGraph, inputs: list[Any], outputs: Sequence[Any], features: Any
    ) -> None:
        """Judge and capture the graph's kernels on inputs that it had; `outputs` is its results."""
        steps = self._compiled(graph, "kernels", _crossing(graph))
        values = _run(graph, steps, inputs)
        groups = _groups(graph, steps.kernels)
        for feature in features:
            if isinstance(feature, OpCapture):
                for name, nodes in groups:
                    _capture(feature, graph, name, nodes, values)
            elif isinstance(feature, OpOverflowCheck):
                self._check_overflow(feature, graph, groups, values)
            elif not self._diverges(feature, graph, groups, values):
                _judge_graph(feature, graph, values, inputs, outputs)

    def _diverges(
        self, feature: OpAutoCompare, graph: InspectedGraph, groups: list[Group], values: Values
    ) -> bool:
        """Judge every kernel, and look into those that diverge."""
        wrong: list[Group] = []
        for name, nodes in groups:
            record = _judged(graph, name, nodes, values)
            if record is None:
                continue
            feature.keep(record)
            if not record.ok:
                _print(feature, record)
                wrong.append((name, nodes))
        if wrong:
            self._inside(feature, graph, wrong, values)
        return bool(wrong)

    def _check_overflow(
        self, feature: OpOverflowCheck, graph: InspectedGraph, groups: list[Group], values: Values
    ) -> None:
        """Statistics of each kernel; in the first that makes a bad value, of each operator."""
        for name, nodes in groups:
            call, rows = _statistics(name, nodes, values.real)
            if any(r.bad for r in rows[1]) and not any(r.bad for r in rows[0]) and len(nodes) > 1:
                extra = _crossing(graph) | tensor_nodes(nodes)
                steps = self._compiled(graph, name, extra)
                real = _run(graph, steps, [values.real[n.name] for n in placeholders(graph.gm)])
                made = (_statistics(_operator(n), [n], real.real) for n in nodes)
                bad = (m for m in made if any(r.bad for r in m[1][1]))
                call, rows = next(bad, (call, rows))
            if rows[1]:
                feature.check(call, *rows)

    def _check_inputs(
        self, graph: InspectedGraph, before: list[Any], after: list[Any], features: Any
    ) -> None:
        """Inputs that the graph overwrote and must not; the operators that do so alone."""
        allowed = mutated_inputs(graph.captured) | mutated_inputs(graph.gm)
        sides = zip(placeholders(graph.gm), before, after, strict=True)
        changed = [
            (node, old, new) for node, old, new in sides
            if node.name not in allowed and not same_values(old, new)
        ]  # fmt: skip
        for feature in (f for f in features if isinstance(f, OpAutoCompare)):
            for node, old, new in changed:
                readers = [u for u in node.users if u.op == "call_function"]
                users = [u for u in readers if self._overwrites(graph, u, node, before)]
                for user in users or readers:
                    _report_overwritten(feature, user, node, old, new)

    def _overwrites(
        self, graph: InspectedGraph, user: fx.Node, node: fx.Node, before: list[Any]
    ) -> bool:
        """Whether an operator that is compiled alone overwrites this input of the graph."""
        if any(n.op != "placeholder" for n in user.all_input_nodes):
            return True  # its other operands are not at hand: it may
        alone, mapping = fx.Graph(), {}
        for operand in user.all_input_nodes:
            mapping[operand] = alone.placeholder(operand.name)
            mapping[operand].meta = dict(operand.meta)
        alone.output((alone.node_copy(user, mapping.__getitem__),))
        alone.output_node().meta = dict(graph.gm.graph.output_node().meta)
        executable, _ = graph.compile(fx.GraphModule(graph.gm, alone))
        values = named_inputs(graph.gm, before)
        given = [copied_as_laid_out(values[n.name]) for n in user.all_input_nodes]
        executable(list(given))
        pairs = zip(user.all_input_nodes, given, strict=True)
        return any(n is node and not same_values(values[n.name], g) for n, g in pairs)

    def _inside(
        self, feature: OpAutoCompare, graph: InspectedGraph, wrong: list[Group], outer: Values
    ) -> None:
        """Name the operators that diverge in these kernels, each on its own real inputs."""
        extra = _crossing(graph).union(*(tensor_nodes(nodes) for _, nodes in wrong))
        steps = self._compiled(graph, " ".join(name for name, _ in wrong), extra)
        values = _run(graph, steps, [outer.real[n.name] for n in placeholders(graph.gm)])
        for name, nodes in wrong:
            found = False
            for node in nodes:
                record = _judged(graph, _operator(node), [node], values, nodes)
                if record is None or record.ok:
                    continue
                found, record.kind = True, "operator"
                feature.keep(record)
                _print(feature, record)
                where = user_line(node) or "an unknown line"
                operator = f"{_operator(node)} ({node.name}) at {where}"
                feature.say(f"diverging kernel: {name}; operator: {operator}")
            if not found:
                feature.say(
                    f"diverging kernel: {name}; its operators agree one by one: the fault is in "
                    "how they are fused"
                )

    def _compiled(self, graph: InspectedGraph, key: str, extra: set[str]) -> Steps:
        known = self._steps.setdefault(graph, {})
        if key not in known:
            known[key] = _with_results(graph, extra)
        return known[key]


# ---- graphs with more results --------------------------------------------------------------------


def _with_results(graph: InspectedGraph, extra: set[str]) -> Steps:
    """The lowered graph with these nodes as further results, compiled."""
    copy = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output: Any = copy.graph_copy(graph.gm.graph, mapping)
    chosen = [node for node in graph.gm.graph.nodes if node.name in extra]
    made = copy.output((*output, *(mapping[node] for node in chosen)))
    made.meta = dict(graph.gm.graph.output_node().meta)
    executable, kernels = graph.compile(fx.GraphModule(graph.gm, copy))
    return Steps(executable, kernels, [node.name for node in chosen], len(output))


def _run(graph: InspectedGraph, steps: Steps, inputs: Sequence[Any]) -> Values:
    results = steps.executable(copied_inputs(graph, inputs))
    real = named_inputs(graph.gm, inputs)
    real |= dict(zip(steps.names, results[steps.count :], strict=True))
    return Values(real, results[: steps.count])


def copied_inputs(graph: InspectedGraph, inputs: Sequence[Any], every: bool = False) -> list[Any]:
    """The inputs, with copies of those that the graph overwrites, or of every one."""
    changed = mutated_inputs(graph.captured) | mutated_inputs(graph.gm)
    nodes = placeholders(graph.gm)
    return [
        copied_as_laid_out(value)
        if (every or node.name in changed) and isinstance(value, torch.Tensor)
        else value
        for node, value in zip(nodes, inputs, strict=True)
    ]


def _homes(graph: InspectedGraph, kernels: Sequence[KernelReport]) -> dict[str, set[int]]:
    """The numbers of the kernels that compute each node, or the call that it is a result of."""
    homes: dict[str, set[int]] = {}
    for number, kernel in enumerate(kernels):
        for origin in kernel.origins:
            homes.setdefault(origin.node, set()).add(number)
    for node in graph.gm.graph.nodes:
        if node.target is getitem and node.all_input_nodes[0].name in homes:
            homes[node.name] = homes[node.all_input_nodes[0].name]
    return homes


def _crossing(graph: InspectedGraph) -> set[str]:
    """The nodes whose tensors pass from one kernel to another, to a call or out of the graph."""
    homes = _homes(graph, graph.kernels)
    found = set()
    for node in graph.gm.graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        own = homes.get(node.name, set())
        users = [homes.get(user.name, set()) for user in node.users]
        if not own or is_random_node(node) or any(not (user and user <= own) for user in users):
            found.add(node.name)
    return found


def _groups(graph: InspectedGraph, kernels: Sequence[KernelReport]) -> list[Group]:
    """Kernels with their nodes, and each other operator alone, in the graph's order."""
    order = {node: k for k, node in enumerate(graph.gm.graph.nodes)}
    homes = _homes(graph, kernels)
    groups: list[Group] = [(kernel.name, []) for kernel in kernels]
    for node in order:
        for number in homes.get(node.name, ()):
            groups[number][1].append(node)
    alone = {node.name: node for node in order if node.name not in homes}
    groups += [(_operator(alone[n]), [alone[n]]) for n in tensor_nodes(alone.values())]
    return sorted((g for g in groups if g[1]), key=lambda group: order[group[1][-1]])


def _operator(node: fx.Node) -> str:
    """The node's operator; that of which it is one of several results."""
    is_part = node.target is getitem and node.all_input_nodes
    return str(node.all_input_nodes[0].target if is_part else node.target)


# ---- verdicts ------------------------------------------------------------------------------------


def _judged(
    graph: InspectedGraph, name: str, nodes: list[fx.Node], values: Values,
    kernel: Sequence[fx.Node] = (),
) -> Record | None:  # fmt: skip
    """One kernel's results against float64 and against eager, both on the inputs it really had.

    kernel: of an operator, the nodes that it is fused with.
    """
    wanted = [n for n in nodes if isinstance(values.real.get(n.name), torch.Tensor)]
    wanted = [n for n in wanted if not is_random_node(n)]
    if not wanted:
        return None
    record = Record(name, CallId.new(), call_site_of(nodes), "kernel", judged_by="fp64")
    record.nodes = ", ".join(f"{n.target} ({n.name})" for n in nodes)
    inside = {node.name for node in nodes}
    wide = Evaluator(graph.gm, values.real, inside, widen=True)
    same = Evaluator(graph.gm, values.real, inside, widen=False)
    for node in wanted:
        got = values.real[node.name]
        try:
            reference, eager = (side.at_positions_of(node, got) for side in (wide, same))
        except Exception as error:  # operators raise whatever they like
            text = (str(error).splitlines() or [""])[0]
            record.note = f"no CPU form: {type(error).__name__}: {text}"
            continue
        comparison = compare(str(node.target), f"{name} {node.name}", got, reference, eager)
        if not comparison.fp64:
            moved = moved_by_roundings(values.real, nodes, [n.name for n in kernel])
            comparison = _but_roundings(comparison, wide, moved, node, got)
        record.comparisons.append(as_promised(comparison, got, eager))
    return record


def _but_roundings(
    found: Comparison, wide: Evaluator, moved: Mapping[str, Any] | None, node: fx.Node, got: Any
) -> Comparison:
    """The comparison, passed if the error is at most twice what the moved operands change."""
    if moved is None:
        return found
    reference = wide.value(node)
    changed = Evaluator(wide.gm, moved, wide.inside, widen=True).value(node)
    if not torch.equal(changed.isfinite(), reference.isfinite()):  # moved out of a domain
        return found
    again = compare(str(node.target), found.name, got, reference, changed)
    return replace(found, fp64=again.fp64)


def _judge_graph(
    feature: OpAutoCompare, graph: InspectedGraph, values: Values, inputs: list[Any],
    outputs: Sequence[Any],
) -> None:  # fmt: skip
    """Where every kernel agrees alone: the real results, and the passes before lowering."""
    record = Record("graph", CallId.new(), CallSite(), "graph", judged_by="fp64")
    record.nodes = f"{graph.info.kind} graph"
    for place, (got, own) in enumerate(zip(outputs, values.outputs, strict=True)):
        if isinstance(got, torch.Tensor):
            record.comparisons.append(compare("graph", f"graph output[{place}]", got, own, own))
    if not any(map(is_random_node, graph.captured.graph.nodes)):
        record.comparisons += _against_captured(graph, inputs, outputs)
    feature.keep(record)
    if not record.ok:
        _print(feature, record)
        feature.say(
            "every kernel agrees alone and the graph does not: the fault is in a graph pass, in "
            "the order of the kernels or in their memory"
        )


def _against_captured(
    graph: InspectedGraph, inputs: list[Any], outputs: Sequence[Any]
) -> list[Comparison]:
    """The graph's results against the graph from before the passes, in float64 and in eager."""
    real = named_inputs(graph.captured, inputs)
    everything = [node.name for node in graph.captured.graph.nodes]
    wide = Evaluator(graph.captured, real, everything, widen=True)
    same = Evaluator(graph.captured, real, everything, widen=False)
    wanted: Any = graph.captured.graph.output_node().args[0]
    found = []
    for place, (node, got) in enumerate(zip(wanted, outputs, strict=True)):
        if isinstance(node, fx.Node) and isinstance(got, torch.Tensor):
            reference, eager = (side.at_positions_of(node, got) for side in (wide, same))
            name = f"captured output[{place}]"
            comparison = compare("graph", name, got, reference, eager)
            if not comparison.fp64:
                computed = (n for n in graph.captured.graph.nodes if n.op == "call_function")
                moved = moved_by_roundings(real, computed)
                comparison = _but_roundings(comparison, wide, moved, node, got)
            found.append(as_promised(comparison, got, eager))
    return found


def _statistics(
    name: str, nodes: Sequence[fx.Node], real: Mapping[str, Any]
) -> tuple[Call, tuple[list[Statistics], list[Statistics]]]:
    """A call that stands for the nodes, with statistics of what they read and of what they give."""
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)
    inputs = [(f"{name} inputs {n.name}", real.get(n.name)) for n in read]
    outputs = [(f"{name} outputs {n.name}", real.get(n.name)) for n in nodes]
    call = Call(name, _no_function, (), {}, call_site_of(nodes))
    return call, (statistics(inputs), statistics(outputs))


def _no_function() -> None:
    """A kernel is no function of the program's."""


def _report_overwritten(
    feature: OpAutoCompare, user: fx.Node, node: fx.Node, old: Any, new: Any
) -> None:
    """A failure of `user`, which overwrote the graph's input `node`."""
    operator = str(user.target)
    found = compare(operator, f"{operator} input {node.name}", new, old)
    found = replace(found, allclose=False, fp64=False, error_info=OVERWRITTEN)
    call_site = call_site_of([user])
    record = Record(operator, CallId.new(), call_site, "operator", [found], judged_by="fp64")
    feature.keep(record)
    _print(feature, record)


def _print(feature: OpAutoCompare, record: Record) -> None:
    feature.say(heading(record.operator, record.id, record.call_site, record.kind, record.nodes))
    feature.say(table(COLUMNS, [c.row() for c in record.comparisons]))
    feature.say(record.verdicts())


# ---- capture -----------------------------------------------------------------------------------


def _capture(
    feature: OpCapture, graph: InspectedGraph, name: str, nodes: list[fx.Node], values: Values
) -> None:
    """A kernel's real inputs and results, and a script that runs its operators."""
    number = CallId.new()
    folder = feature.folder / CAPTURES / name / str(os.getpid()) / str(number.number) / number.time
    script, given = reproducer(graph.gm, nodes, values.real, graph.target.name)
    results = {n.name: values.real[n.name] for n in nodes if n.name in values.real}
    facts = {"operator": name, "kernel": [str(n.target) for n in nodes],
             "forward_id": str(number), "source": str(call_site_of(nodes))}  # fmt: skip
    feature.save(folder / "input", {"args": tuple(given), "kwargs": {}}, facts)
    feature.save(folder / "output", results, facts)
    feature.write(folder / "reproduce.py", script)


COMPILED = CompiledGraphs()
register_inspector(COMPILED)
