"""Lowering of a functional ATen graph to the loop IR: traversal of its nodes, and eager calls.

In: an FX graph, a table of rules, and the target's decision on each node. Out: a `Graph`, and a
report of each node's decision.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.domains import outside_domain
from dicp.effects import is_view, never_copies
from dicp.loop.ir.expr import Load, Ref
from dicp.loop.ir.graph import Call, Compute, Graph
from dicp.loop.ir.index import Index, Indirect, Size, dense_strides, normal
from dicp.loop.lowering.builder import GraphBuilder
from dicp.loop.lowering.layout import as_size, sizes_of, strides_of
from dicp.loop.lowering.value import Value
from dicp.operator_choice import ASKED_EAGER, check_eager, kept_eager
from dicp.origin import origin_of
from dicp.rule_errors import InvalidResult, naming_rule, paired_results
from dicp.rules import NoRule, RuleEntry, RuleTable
from dicp.target import NO_RULE, Decision, LowerContext, NodeReport, unreadable
from dicp.torch_private import OpOverload, expression_of, is_object, schema_of


class Lowering(GraphBuilder):
    """Lowers one FX graph, node by node, to a `Graph`."""

    def __init__(
        self,
        gm: fx.GraphModule,
        context: LowerContext,
        rules: RuleTable,
        decide: Callable[[fx.Node], Decision],
    ) -> None:
        super().__init__(gm, context)
        self.rules = rules
        self.decide = decide
        self.env: dict[fx.Node, Any] = {}
        self.reports: list[NodeReport] = []

    # ---- node traversal -------------------------------------------------------------------

    def run(self) -> Graph:
        for node in self.gm.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "output":
                self._output(node)
            else:
                self.env[node] = self._call_node(node)
        return self.graph

    def _placeholder(self, node: fx.Node) -> Any:
        position = len(self.graph.inputs)
        val = node.meta.get("val")
        name = f"in{position}"
        if isinstance(val, torch.Tensor):
            ref = self._tensor_ref(name, val, "input")
            self.graph.inputs.append(ref)
            return self.value_of(ref)
        ref = Ref(name, (), torch.int64, (), "input", opaque=True)
        self.graph.inputs.append(ref)
        if is_object(val):
            return ref
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            expr = as_size(val)
            self.graph.sizes[position] = expr
            return expr
        return val

    def _attribute(self, node: fx.Node) -> Any:
        target = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(target, torch.Tensor):
            return target
        return self.constant(target)

    def _output(self, node: fx.Node) -> None:
        stored: dict[fx.Node, Ref] = {}  # a result that is returned twice is one tensor
        items: Any = node.args[0]
        for item in items:
            value = self.env[item] if isinstance(item, fx.Node) else item
            if isinstance(value, Value):
                self.graph.outputs.append(self._result(item, items, stored))
            else:
                self.graph.outputs.append(value)

    def _result(self, node: fx.Node, shown: Sequence[Any], stored: dict[fx.Node, Ref]) -> Ref:
        """The memory of a result. That of a view of an input or of another result is part of its:
        AOTAutograd takes strides and offset from ours to return a view as eager does. Indices of
        symbolic sizes may not simplify to those of such a part."""
        if node in stored:
            return stored[node]
        value, root = self.env[node], viewed(node)
        kept = root is not node and (root.op == "placeholder" or root in shown)
        val, whole = node.meta["val"], root.meta["val"]
        if (
            kept
            and not all(isinstance(n, int) for n in (*val.shape, *val.stride()))
            and val.dtype == whole.dtype
            and val.layout == whole.layout == torch.strided
            and value.ref is self.env[root].ref
            and self._in_memory(value, strides_of(val)) is None
        ):
            base = self._result(root, shown, stored)
            end, start = sizes_of([val.storage_offset(), whole.storage_offset()])
            stored[node] = Ref(
                self._name("v"), value.shape, val.dtype, strides_of(val), "alias",
                normal(end - start), base=base,
            )  # fmt: skip
        else:
            stored[node] = self._strided_as_eager(node, value)
        return stored[node]

    def _call_node(self, node: fx.Node) -> Any:
        decision = self.decide(node)
        if kept_eager(node):
            decision = Decision("eager", ASKED_EAGER)
        elif decision.kind != "eager" and (reason := unreadable(node)):
            decision = Decision("eager", reason)
        self._origins = (origin_of(node),)
        result: Any = None
        if decision.kind != "eager":
            entry = self.rules.get(node.target)
            mark, demands = len(self.graph.nodes), len(self.graph.requirements)
            try:
                with naming_rule(node, self.context.target, entry):
                    result = self._apply(node, entry)
            except NoRule as reason:
                dropped = {id(n) for n in self.graph.nodes[mark:]}
                del self.graph.nodes[mark:], self.graph.requirements[demands:]
                for nodes in self._readers.values():
                    nodes[:] = [n for n in nodes if id(n) not in dropped]
                decision = Decision("eager", str(reason))
        if decision.kind == "eager":
            check_eager(node, decision.reason, self.context.config, self.context.target)
            result = self.eager(node)
        self._report(node, decision)
        return result

    def _apply(self, node: fx.Node, entry: RuleEntry | None) -> Any:
        """The result of the rule for `node`, or of its arithmetic on sizes."""
        args, kwargs = map_arg((node.args, node.kwargs), self.env.__getitem__)
        if outside_domain(node.target, args, kwargs, self.proves):
            raise NoRule("arguments that eager may refuse")
        if entry is None:
            return evaluate_size(node, args, kwargs)
        first = len(self.graph.nodes)
        result = entry.function(self, *args, **kwargs)
        self._check_results(node, result)
        results = result if isinstance(result, (list, tuple)) else [result]
        kept = {one.ref for one in results if isinstance(one, Value)}
        for made in self.graph.nodes[first:]:
            if isinstance(made, Compute) and made.out not in kept:
                _lay_out_as_operand(made)
        return result

    def _check_results(self, node: fx.Node, result: Any) -> None:
        """Raises InvalidResult for results of another number, dtype or shape than eager's."""
        for one, fake in paired_results(node, result):
            alike = isinstance(one, Value) and one.dtype == fake.dtype
            if not alike or not self._may_be_same(one.shape, sizes_of(fake.shape)):
                raise InvalidResult(one, fake)

    def _may_be_same(self, left: Sequence[Size], right: Sequence[Size]) -> bool:
        """Equal sizes, or equal ones for the sizes that the graph was traced with."""
        if left == right or len(left) != len(right):
            return left == right
        pairs = zip(self.first_sizes(left), self.first_sizes(right), strict=True)
        return all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in pairs)

    def _report(self, node: fx.Node, decision: Decision) -> None:
        if isinstance(node.target, OpOverload) or decision.kind == "eager":
            origin = self._origins[-1]
            self.reports.append(NodeReport(origin, decision.kind, decision.reason))

    def eager(self, node: fx.Node) -> Any:
        """The node as an eager ATen call between generated kernels."""
        args, kwargs = map_arg((node.args, node.kwargs), self.env.__getitem__)
        args, kwargs = (
            self._strided_as_eager(node.args, args),
            self._strided_as_eager(node.kwargs, kwargs),
        )
        refs: list[Ref] = []

        def out_of(val: Any) -> Any:
            if isinstance(val, torch.Tensor):
                name = self._name("e")
                if val.layout == torch.strided and self._sizes_known(val):
                    ref = self._tensor_ref(name, val, "temp")
                else:
                    ref = Ref(name, (), val.dtype, (), "temp", opaque=True)
                refs.append(ref)
                return self.value_of(ref)
            if isinstance(val, (tuple, list)):
                return [out_of(v) for v in val]
            ref = Ref(self._name("s"), (), torch.int64, (), "temp")
            refs.append(ref)
            return as_size(val) if isinstance(val, torch.SymInt) else ref

        result = out_of(node.meta.get("val"))
        schema = schema_of(node.target)
        call = Call(
            node.target,
            tuple(args),
            kwargs,
            tuple(refs),
            kind="eager",
            mutates=bool(schema and schema.is_mutable),
            origins=self._origins,
        )
        if schema is None or call.mutates or is_view(node.target):
            sources = call.reads()
            for ref in refs:
                ref.base = sources[0] if sources else None
                ref.role = "alias" if sources else "temp"
        self._finish_call(call)
        if call.mutates:
            for ref in call.reads():
                self._written[ref.root] = call
        return result

    def _sizes_known(self, val: torch.Tensor) -> bool:
        """Whether every symbol in the tensor's sizes is a size of some graph input."""
        symbols = {s for size in sizes_of(val.shape) for s in sympy.sympify(size).free_symbols}
        known = {s for e in self.graph.sizes.values() for s in sympy.sympify(e).free_symbols}
        known |= {s for r in self.graph.inputs for n in r.shape
                  for s in sympy.sympify(n).free_symbols}  # fmt: skip
        return symbols <= known

    def _strided_as_eager(self, nodes: Any, values: Any) -> Any:
        """Arguments in memory with the strides eager would pass."""
        if isinstance(nodes, fx.Node):
            if isinstance(values, Value):
                val = nodes.meta["val"]
                if val.layout != torch.strided:
                    return values.ref
                return self.realize(values, strides_of(val))
            return values
        if isinstance(nodes, (list, tuple)):
            items = [self._strided_as_eager(n, v) for n, v in zip(nodes, values, strict=True)]
            return tuple(items) if isinstance(nodes, tuple) else items
        if isinstance(nodes, dict):
            return {k: self._strided_as_eager(n, values[k]) for k, n in nodes.items()}
        return values


def _lay_out_as_operand(made: Compute) -> None:
    """Gives an intermediate of a rule, which may lie in memory in any order, that of an operand of
    its shape: the kernel that computes it then stores along the memory that it loads."""
    if made.kind not in ("pointwise", "scan") or made.realize or made.out.base is not None:
        return
    for item in made.loads():
        order = _order_in_memory(item, made.shape)
        if order is not None:
            made.out.strides = dense_strides(made.shape, order)
            return


def _order_in_memory(item: Load, shape: Sequence[Size]) -> list[int] | None:
    """The axes of `shape` in the order in which a load, perhaps through windows, takes them in
    memory, the smallest steps last; None where some are not known, or none is taken."""
    steps = [int(size == 1) for size in shape]
    for index, stride in zip(item.coords, item.ref.strides, strict=True):
        for atom, c in index.terms:
            if isinstance(atom, Indirect) or not (isinstance(c, int) and isinstance(stride, int)):
                return None
            for var in Index(0, ((atom, 1),)).variables():
                steps[var.position] = max(steps[var.position], abs(c) * stride)
    if 0 in steps or not all(isinstance(size, int) for size in shape):
        return None
    return sorted(range(len(steps)), key=lambda k: (-steps[k], k))


def viewed(node: fx.Node) -> fx.Node:
    """The node whose memory `node`'s result is a part of, through a chain of views."""
    while True:
        call = node.args[0] if node.target is operator.getitem else node
        if call.op != "call_function" or not never_copies(call.target):  # type: ignore[union-attr]
            return node
        node = call.args[0]  # type: ignore[union-attr, assignment]


def evaluate_size(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The value of a node that computes a size, which its metadata holds as an expression."""
    val = node.meta.get("val")
    if node.target is operator.getitem:
        return args[0][args[1]]
    if isinstance(val, torch.SymInt):
        return as_size(val)
    if isinstance(val, (torch.SymFloat, torch.SymBool)):
        return expression_of(val)
    if val is None and callable(node.target):
        return node.target(*args, **kwargs)
    if isinstance(val, torch.Tensor):
        raise NoRule(NO_RULE)
    return val


__all__ = ["Lowering", "Value"]
