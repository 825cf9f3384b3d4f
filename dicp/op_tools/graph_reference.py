"""Running nodes of an ATen graph one by one on real values: in float64, or as eager does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from dicp.compare import FLOOR_ULPS, Positions
from dicp.effects import is_random
from dicp.op_tools import trees
from dicp.op_tools.records import CallSite
from dicp.op_tools.reference import copied, reference_rules
from dicp.origin import user_line
from dicp.torch_private import schema_of

_AS_IT_IS = frozenset({"aten.view.dtype"})
"""Operators on the bits of a value: they are run in its own dtype."""

_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})
"""A reference may have other strides than the tensor that was viewed."""

_STEPS = frozenset(
    f"aten.{name}"
    for name in ("floor.default", "ceil.default", "round.default", "round.decimals",
                 "trunc.default", "frac.default", "sign.default", "sgn.default", "fmod.Tensor",
                 "fmod.Scalar", "remainder.Tensor", "remainder.Scalar", "div.Tensor_mode",
                 "div.Scalar_mode", "floor_divide.default", "heaviside.default")
)  # fmt: skip
"""Operators whose result may jump by any amount where an operand moves by a rounding."""


class Evaluator:
    """Values of nodes. Those `inside` are computed from their operands, others are the real ones.

    real: the values that the run had, by the name of the node. widen: floating values in float64.
    """

    def __init__(
        self, gm: fx.GraphModule, real: Mapping[str, Any], inside: Iterable[str], *, widen: bool
    ) -> None:
        self.gm = gm
        self.real = real
        self.inside = frozenset(inside)
        self.rules = reference_rules("") if widen else {}
        self._known: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """The value of a node; its operands are evaluated first, without recursion."""
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [] if self._is_given(top) else top.all_input_nodes
            missing = [n for n in missing if n not in self._known]
            if missing:
                pending += missing
                continue
            if top not in self._known:
                given = self._is_given(top)
                self._known[top] = self._given(top) if given else self._computed(top)
            pending.pop()
        return self._known[node]

    def at_positions_of(self, node: fx.Node, got: torch.Tensor) -> Any:
        """The value of a node, with the positions of equal elements that `got` has; what is
        evaluated later reads it."""
        value = self.value(node)
        positions = _positions(node)
        if positions is not None:
            operand = self.value(node.all_input_nodes[0].all_input_nodes[0])
            agreed = positions.agreed(operand.cpu(), got.cpu(), value.cpu())
            value = self._known[node] = agreed.to(value.device)
        return value

    def _is_given(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        return node.name in self.real and (is_random_node(node) or node.name not in self.inside)

    def _given(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._widened(attrgetter(str(node.target))(self.gm))
        return self._widened(self.real[node.name])

    def _widened(self, value: Any) -> Any:
        if not self.rules:
            return value
        return trees.map_tensors(value, lambda t: copied(t, self.rules.get(t.dtype, t.dtype)))

    def _drawn(self, node: fx.Node) -> Any:
        """A random operator's value, drawn in its own dtype: another would draw other numbers."""

        def narrowed(operand: fx.Node) -> Any:
            value, promised = self._known[operand], operand.meta.get("val")
            tensors = isinstance(value, torch.Tensor) and isinstance(promised, torch.Tensor)
            return value.to(promised.dtype) if tensors else value

        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), narrowed)
        return self._widened(target(*args, **kwargs))

    def _computed(self, node: fx.Node) -> Any:
        if is_random_node(node):
            return self._drawn(node)
        args, kwargs = map_arg((node.args, node.kwargs), self._known.__getitem__)
        target: Any = node.target
        name = str(target)
        if name in _RESHAPES:
            return args[0].reshape(args[1])
        if name in _AS_IT_IS and self.rules:
            return args[0]
        args, kwargs = map_aggregate(  # type: ignore[assignment]
            (args, kwargs), lambda v: self.rules.get(v, v) if isinstance(v, torch.dtype) else v
        )
        schema = schema_of(target)
        if schema is not None and schema.is_mutable:  # what the node overwrites is a copy here
            args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        return target(*args, **kwargs)


def _positions(node: fx.Node) -> Positions | None:
    """What the node holds if it is the result of a call that holds positions, such as sort's."""
    call = node.all_input_nodes[0] if node.target is getitem else None
    if call is None or not call.all_input_nodes:
        return None
    found = Positions.of(str(call.target), call.args, call.kwargs)
    return found if found is not None and found.result == node.args[1] else None


def moved_by_roundings(
    real: Mapping[str, Any], inside: Iterable[fx.Node], unrounded: Iterable[str] = ()
) -> dict[str, Any] | None:
    """The real values in float64, elements that `inside` reads moved by as many roundings up or
    down as the fp64 rule's floor has. None if results may jump.

    What this changes in a result is no fault of an operator: terms of a sum cancel, and a fused
    kernel reads `unrounded` what it also stores in a narrower dtype than it computes in.
    """
    nodes = set(inside)
    if any(str(n.target) in _STEPS or not _is_floating(n) for n in nodes):
        return None
    generator = torch.Generator().manual_seed(0)
    moved = dict(real)
    for name in dict.fromkeys(n.name for node in nodes for n in node.all_input_nodes):
        value = real.get(name)
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOOR_ULPS:
            continue
        narrow = value.dtype.itemsize < torch.float32.itemsize and name not in unrounded
        dtype = torch.float32 if narrow else value.dtype
        size = FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
        up = torch.randint(0, 2, value.shape, generator=generator)
        moved[name] = copied(value, torch.float64).mul_(1 + size * (2 * up - 1))
    return moved


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def is_random_node(node: fx.Node) -> bool:
    """Whether the node draws random numbers, or is one of several results of one that does."""
    if node.target is getitem and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return is_random(node.target)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one dense tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def tensor_nodes(nodes: Iterable[fx.Node]) -> set[str]:
    return {node.name for node in nodes if node.op == "call_function" and is_tensor(node)}


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="placeholder")


def named_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """The values of a graph's inputs by the names of its placeholders."""
    return dict(zip((node.name for node in placeholders(gm)), inputs, strict=True))


def mutated_inputs(gm: fx.GraphModule) -> set[str]:
    """The placeholders that the graph overwrites."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        schema = schema_of(node.target)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            found |= {n.name for n in node.all_input_nodes if n.op == "placeholder"}
    return found


_SCRIPT = '''"""Runs one kernel's operators on its captured inputs, eager and compiled."""

from pathlib import Path

import torch
from torch import device, inf, nan

from dicp.op_tools import storage

{body}


if __name__ == "__main__":
    inputs = storage.load(Path(__file__).with_name("input")).value["args"]
    eager = forward(*inputs)
    compiled = torch.compile(forward, backend={backend!r}, dynamic=False)(*inputs)
    for number, (got, wanted) in enumerate(zip(compiled, eager, strict=True)):
        print(number, torch.allclose(got, wanted, 1e-4, 1e-5, equal_nan=True))
'''


def reproducer(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], real: Mapping[str, Any], target: str
) -> tuple[str, list[Any]]:
    """A script that runs the nodes as a function, and the real values that it is given."""
    inside, known = set(nodes), Evaluator(gm, real, (), widen=False)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    graph = fx.Graph()
    mapping = {node: graph.placeholder(node.name) for node in read}
    for node in nodes:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    wanted = [
        n
        for n in nodes
        if is_tensor(n) and (n.name in real or any(u not in inside for u in n.users))
    ]
    graph.output(tuple(mapping[node] for node in wanted))
    body = graph.python_code("self").src.strip()
    body = body.replace("def forward(self, ", "def forward(").replace("(self)", "()")
    return _SCRIPT.format(body=body, backend=f"{target}graph"), [known.value(n) for n in read]


def call_site_of(nodes: Sequence[fx.Node]) -> CallSite:
    """The last of the nodes' lines that is known."""
    for node in reversed(nodes):
        file, _, line = user_line(node).rpartition(":")
        if file:
            return CallSite(file, int(line), "")
    return CallSite()
