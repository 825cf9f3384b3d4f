"""Complex arithmetic on pairs of real numbers: a last dimension of 2, as `view_as_real` shows it.

Targets generate no complex code. Complex values that are connected by use are computed on pairs if
every operator among them has a row here; complex inputs are viewed as pairs, and pairs that the
graph returns, or that a Fourier transform or a library of the target takes, as complex values. Any
other complex value stays as it is, for eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.domains import outside_domain
from dicp.dynamo_bridge.analysis.values import same_strides, stride_order, value_of
from dicp.dynamo_bridge.passes.base import Pass, PassContext

aten = torch.ops.aten
Rule = Callable[..., fx.Node]
RULES: dict[Any, Rule] = {}
"""Operator -> its rule on pairs: a function of the `Emitter`, the node and its arguments."""


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a rule on pairs for operators."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return add


def is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


class Emitter:
    """Emits the calls that replace complex ones, before the call `at`."""

    def __init__(self, context: PassContext) -> None:
        self.infer = context.infer
        self.pairs: dict[fx.Node, fx.Node] = {}
        self.at: fx.Node

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.infer.emit(self.at, op, args, kwargs, [self.at])

    def pair(self, node: fx.Node) -> fx.Node:
        """The pairs of a complex value; those of an input are emitted at their first use."""
        if node not in self.pairs:
            plain = node
            if value_of(node).is_conj():
                plain = self.emit(aten.resolve_conj.default, node)
            self.pairs[node] = self.emit(aten.view_as_real.default, plain)
        return self.pairs[node]

    def parts(self, x: Any) -> tuple[Any, Any]:
        """The real and the imaginary part of a tensor or number; 0 is a real one's second."""
        if is_complex(x):
            return self.parts_of_pair(self.pair(x))
        return (x, 0.0) if isinstance(x, fx.Node) else (complex(x).real, complex(x).imag)

    def parts_of_pair(self, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
        real, imaginary = (self.emit(aten.select.int, pair, -1, k) for k in (0, 1))
        return real, imaginary

    def product(self, x: Any, y: Any) -> Any:
        """The product of two parts, either of which may be a number."""
        if isinstance(x, fx.Node):
            return self.emit(aten.mul.Tensor, x, y)
        return self.emit(aten.mul.Tensor, y, x) if isinstance(y, fx.Node) else x * y

    def joined(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        parts = [self.emit(aten.unsqueeze.default, part, -1) for part in (real, imaginary)]
        return self.emit(aten.cat.default, parts, -1)

    def conjugate(self, pair: fx.Node) -> fx.Node:
        real, imaginary = self.parts_of_pair(pair)
        return self.joined(real, self.emit(aten.neg.default, imaginary))


# ---- rules ---------------------------------------------------------------------------------------


RULES |= {
    aten.view_as_complex.default: lambda g, node, x: x,
    aten.view_as_real.default: lambda g, node, x: g.pair(x),
    aten.complex.default: lambda g, node, real, imaginary: g.joined(real, imaginary),
    aten.abs.default: lambda g, node, x: g.emit(aten.hypot.default, *g.parts(x)),
    aten.copy.default:
        lambda g, node, x, y, *rest: g.emit(aten.copy.default, g.pair(x), _pair_of(g, node, y)),
    aten.index.Tensor: lambda g, node, x, indices: g.emit(node.target, g.pair(x), indices),
}  # fmt: skip


@rule(aten.polar.default)
def polar(g: Emitter, node: fx.Node, length: fx.Node, angle: fx.Node) -> fx.Node:
    turns = g.emit(aten.cos.default, angle), g.emit(aten.sin.default, angle)
    real, imaginary = (g.emit(aten.mul.Tensor, length, turn) for turn in turns)
    return g.joined(real, imaginary)


@rule(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def conjugate(g: Emitter, node: fx.Node, x: fx.Node | complex) -> fx.Node:
    if not isinstance(x, fx.Node):
        return number(g, node, complex(x).conjugate())
    return g.conjugate(g.pair(x))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def multiply(g: Emitter, node: fx.Node, x: Any, y: Any) -> fx.Node:
    """A real factor has an imaginary part, too: eager multiplies infinities by its 0."""
    if not isinstance(x, fx.Node):
        x, y = y, x
    return _product(g, *g.parts(x), *g.parts(y))


def _product(g: Emitter, a: Any, b: Any, c: Any, d: Any) -> fx.Node:
    """(a + bi) * (c + di), of which numbers may be parts."""
    ac, bd, ad, bc = (g.product(*of) for of in ((a, c), (b, d), (a, d), (b, c)))
    return g.joined(g.emit(aten.sub.Tensor, ac, bd), g.emit(aten.add.Tensor, ad, bc))


@rule(aten.div.Tensor)
def divide(g: Emitter, node: fx.Node, x: fx.Node, y: Any) -> fx.Node:
    """By a tensor as eager divides (Smith's algorithm), or by a number."""
    a, b = g.parts(x)
    if isinstance(value_of(y), torch.Tensor):
        return _quotient(g, a, b, *g.parts_of_pair(_pair_of(g, node, y)))
    real = g.emit(aten.add.Tensor, a, g.product(b, 0.0))
    imaginary = g.emit(aten.sub.Tensor, b, g.product(a, 0.0))
    return g.joined(g.emit(aten.div.Tensor, real, y), g.emit(aten.div.Tensor, imaginary, y))


def _quotient(g: Emitter, a: Any, b: Any, c: fx.Node, d: fx.Node) -> fx.Node:
    """(a + bi) / (c + di), divided by the larger part of the divisor first: nothing overflows."""
    first = g.emit(aten.ge.Tensor, *(g.emit(aten.abs.default, part) for part in (c, d)))
    larger, smaller = g.emit(aten.where.self, first, c, d), g.emit(aten.where.self, first, d, c)
    zero = g.emit(aten.eq.Scalar, larger, 0)
    larger = g.emit(aten.where.self, zero, g.emit(aten.abs.default, larger), larger)
    ratio = g.emit(aten.div.Tensor, smaller, larger)
    zeros = g.emit(aten.zeros_like.default, ratio)
    ratio = g.emit(aten.where.self, zero, zeros, ratio)
    total = g.emit(aten.add.Tensor, larger, g.product(smaller, ratio))
    scaled_a, scaled_b = (
        g.emit(aten.where.self, zero, zeros, g.product(part, ratio)) for part in (a, b)
    )
    real = g.emit(
        aten.where.self, first, g.emit(aten.add.Tensor, scaled_b, a),
        g.emit(aten.add.Tensor, scaled_a, b),
    )  # fmt: skip
    imaginary = g.emit(
        aten.where.self, first, g.emit(aten.sub.Tensor, b, scaled_a),
        g.emit(aten.sub.Tensor, scaled_b, a),
    )  # fmt: skip
    return g.joined(*(g.emit(aten.div.Tensor, part, total) for part in (real, imaginary)))


@rule(aten.mm.default, aten.bmm.default)
def matrix_product(g: Emitter, node: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
    (a, b), (c, d) = g.parts(x), g.parts(y)
    ac, bd, ad, bc = (g.emit(node.target, *of) for of in ((a, c), (b, d), (a, d), (b, c)))
    return g.joined(g.emit(aten.sub.Tensor, ac, bd), g.emit(aten.add.Tensor, ad, bc))


@rule(aten._to_copy.default)
def convert(g: Emitter, node: fx.Node, x: fx.Node, **kwargs: Any) -> fx.Node:
    return g.emit(aten._to_copy.default, _pair_of(g, node, x), dtype=value_of(node).real.dtype)


@rule(aten.add.Tensor, aten.sub.Tensor)
def add(g: Emitter, node: fx.Node, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    """The factor has an imaginary part as in `multiply`, even where it is 1."""
    scaled = _product(g, *g.parts_of_pair(_pair_of(g, node, y)), *g.parts(alpha))
    op = aten.add.Tensor if node.target is aten.add.Tensor else aten.sub.Tensor
    return g.emit(op, _pair_of(g, node, x), scaled)


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def subtract_from(g: Emitter, node: fx.Node, x: fx.Node, y: Any, alpha: Any = 1) -> fx.Node:
    return add(g, node, y, x, alpha)


def _pair_of(g: Emitter, node: fx.Node, x: Any) -> fx.Node:
    """The pairs of an operand that may be real, or a number."""
    if is_complex(x):
        return g.pair(x)
    if not isinstance(value_of(x), torch.Tensor):
        return number(g, node, x)
    real = g.emit(aten._to_copy.default, x, dtype=value_of(node).real.dtype)
    return g.joined(real, g.emit(aten.zeros_like.default, real))


@rule(aten.neg.default, aten.clone.default, aten.alias.default, aten.detach.default,
      aten.resolve_conj.default, aten.lift_fresh_copy.default)  # fmt: skip
def copy_or_negate(g: Emitter, node: fx.Node, x: fx.Node, **layout: Any) -> fx.Node:
    plain = node.target is aten.neg.default
    return g.emit(aten.neg.default if plain else aten.clone.default, g.pair(x))


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def reshape(g: Emitter, node: fx.Node, x: fx.Node, shape: Sequence[Any], **known: Any) -> fx.Node:
    op = node.target if node.target is aten.expand.default else aten.reshape.default
    return g.emit(op, g.pair(x), [*shape, 2])


@rule(aten.permute.default)
def permute(g: Emitter, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> fx.Node:
    rank = value_of(x).dim()
    return g.emit(node.target, g.pair(x), [*(d % rank for d in dims), rank])


@rule(aten.t.default)
def matrix_transpose(g: Emitter, node: fx.Node, x: fx.Node) -> fx.Node:
    dims = (0, 1) if value_of(x).dim() == 2 else (0, 0)
    return g.emit(aten.transpose.int, g.pair(x), *dims)


@rule(aten.transpose.int)
def transpose(g: Emitter, node: fx.Node, x: fx.Node, first: int, second: int) -> fx.Node:
    rank = value_of(x).dim()
    return g.emit(node.target, g.pair(x), first % rank, second % rank)


@rule(aten.unsqueeze.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim)
def along_dim(g: Emitter, node: fx.Node, x: fx.Node, dim: int = 0, *rest: Any) -> fx.Node:
    rank = value_of(x).dim() + (node.target is aten.unsqueeze.default)
    return g.emit(node.target, g.pair(x), dim % rank, *rest)


@rule(aten.where.self)
def where(g: Emitter, node: fx.Node, condition: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
    return g.emit(node.target, g.emit(aten.unsqueeze.default, condition, -1), g.pair(x), g.pair(y))


@rule(aten.scalar_tensor.default)
def number(g: Emitter, node: fx.Node, given: fx.Node | complex, **kwargs: Any) -> fx.Node:
    value = value_of(node)
    known = {"dtype": value.real.dtype, "device": value.device}
    parts = g.parts(given)  # a symbolic number is a node
    return g.joined(*(g.emit(aten.scalar_tensor.default, part, **known) for part in parts))


@rule(aten.new_zeros.default, aten.new_empty_strided.default)
def new(
    g: Emitter, node: fx.Node, x: fx.Node, shape: Sequence[Any], *strides: Any, **kwargs: Any
) -> fx.Node:
    op = aten.new_empty.default if strides else node.target
    part = value_of(node).real.dtype
    return g.emit(op, g.pair(x) if is_complex(x) else x, [*shape, 2], dtype=part)


@rule(aten.zeros_like.default)
def zeros_like(g: Emitter, node: fx.Node, x: fx.Node, **kwargs: Any) -> fx.Node:
    return g.emit(node.target, _pair_of(g, node, x), dtype=value_of(node).real.dtype)


@rule(aten.full.default, aten.zeros.default)
def full(g: Emitter, node: fx.Node, shape: Sequence[Any], given: Any = 0, **kwargs: Any) -> fx.Node:
    value = value_of(node)
    known = {"dtype": value.real.dtype, "device": value.device}
    return g.joined(*(g.emit(aten.full.default, shape, part, **known) for part in g.parts(given)))


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def scatter_slice(
    g: Emitter, node: fx.Node, x: fx.Node, y: fx.Node, dim: int = 0, *rest: Any
) -> fx.Node:
    return g.emit(node.target, g.pair(x), g.pair(y), dim % value_of(x).dim(), *rest)


@rule(aten.cat.default)
def concatenate(g: Emitter, node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    rank = value_of(node).dim()
    joined = [g.pair(x) for x in parts if value_of(x).dim() == rank]  # others have sizes (0,)
    return g.emit(node.target, joined, dim % rank)


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(
    g: Emitter, node: fx.Node, x: fx.Node, dims: Sequence[int] = (), keep: bool = False
) -> fx.Node:
    """Of joined parts, each part: loops over the 2 of a concatenation are not vectorized."""
    rank, pair = value_of(x).dim(), g.pair(x)
    dims = [d % rank for d in dims or range(rank)]
    if pair.target is not aten.cat.default:
        return g.emit(aten.sum.dim_IntList, pair, dims, keep)
    parts = g.parts_of_pair(pair)
    return g.joined(*(g.emit(aten.sum.dim_IntList, part, dims, keep) for part in parts))


@rule(aten.index_put.default)
def index_put(
    g: Emitter, node: fx.Node, x: fx.Node, indices: Sequence[Any], y: fx.Node, *rest: Any
) -> fx.Node:
    return g.emit(node.target, g.pair(x), indices, g.pair(y), *rest)


ALONG_DIMS = frozenset({
    aten.permute.default, aten.transpose.int, aten.t.default, aten.select.int,
    aten.slice.Tensor, aten.squeeze.dim,
    aten.slice_scatter.default, aten.select_scatter.default, aten.cat.default,
    aten.sum.default, aten.sum.dim_IntList, aten.index.Tensor, aten.index_put.default,
})  # fmt: skip
COMPLEX_OPERANDS = {
    aten.slice_scatter.default: (0, 1), aten.select_scatter.default: (0, 1),
    aten.index_put.default: (0, 2), aten.where.self: (1, 2), aten.copy.default: (0,),
}  # fmt: skip
"""Positions of operands that a rule requires to be complex, where eager also takes real ones."""
TRANSFORMS = frozenset({aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default})
"""Calls between pairs on every target: no part of a transform can be computed on pairs."""
MADE_LIKE = frozenset({
    aten.new_zeros.default, aten.new_empty_strided.default, aten.zeros_like.default,
    aten._to_copy.default,
})  # fmt: skip
"""Operators whose result is on the device of their operand, unless an option names another."""
OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})
"""Options that a rule may drop: they repeat the operand's, name the dtype, or choose strides, which
results get back."""


# ---- the pass ------------------------------------------------------------------------------------


def _has_rule(node: fx.Node) -> bool:
    """Whether a call on complex values, or that makes one, can be on pairs."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    numbers = (*node.args[2:], *node.kwargs.values())
    if node.target not in RULES or any(isinstance(number, complex) for number in numbers):
        return False
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    if outside_domain(node.target, args, kwargs, bool):
        return False
    if node.target in ALONG_DIMS and not all(
        value_of(x).dim() for x in filter(is_complex, node.all_input_nodes)
    ):
        return False  # their only dimension would be that of the pairs
    are_complex = [is_complex(arg) for arg in node.args]
    if node.target in COMPLEX_OPERANDS:
        return all(are_complex[k] for k in COMPLEX_OPERANDS[node.target])
    if node.target is aten.div.Tensor:
        return isinstance(node.args[0], fx.Node) and not isinstance(node.args[1], complex)
    if node.target in MADE_LIKE:
        same_device = value_of(node).device == value_of(node.all_input_nodes[0]).device
        return is_complex(node) and same_device and node.kwargs.keys() <= OPTIONS
    if node.target is aten.cat.default:
        return all(map(is_complex, node.args[0]))  # type: ignore[arg-type]
    return node.target not in (aten.sum.default, aten.sum.dim_IntList) or not node.kwargs


def _connected(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Complex values in groups that are connected by use."""
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in filter(is_complex, graph.nodes):
        group[node] = [node]
        for source in filter(is_complex, node.all_input_nodes):
            if group[source] is not group[node]:
                group[source] += group[node]
                for member in group[node]:
                    group[member] = group[source]
    for node, members in group.items():
        if members[0] is node:
            yield members


def complex_pairs(gm: fx.GraphModule, context: PassContext) -> bool:
    """Compute on pairs wherever a whole group of complex values can be, but for library calls."""

    def takes_complex(node: fx.Node) -> bool:
        if node.op != "call_function" or _has_rule(node):
            return False
        return node.target in TRANSFORMS or context.compiles(node)

    chosen: set[fx.Node] = set()
    for members in _connected(gm.graph):
        calls = {user for node in members for user in node.users} | set(members)
        libraries = {node for node in calls if takes_complex(node)}
        if not all(node in libraries or _has_rule(node) for node in calls):
            continue
        if any(value_of(node).is_neg() for node in members):
            continue  # pairs do not carry the bit, and calls that stay in the graph toggle it
        if libraries or any(node.op == "call_function" for node in members):
            chosen |= {node for node in calls - libraries if node.op == "call_function"}
    if not chosen:
        return False
    g = Emitter(context)
    for node in list(gm.graph.nodes):
        g.at = node
        if node not in chosen:
            _restore_complex(node, g, context, chosen)
            continue
        new = RULES[node.target](g, node, *node.args, **node.kwargs)
        if is_complex(node):
            g.pairs[node] = new
        else:
            node.replace_all_uses_with(_laid_out(context, value_of(node), new, node))
    for node in reversed([node for node in gm.graph.nodes if node in chosen]):
        if not node.users:
            gm.graph.erase_node(node)
    return True


def _restore_complex(user: fx.Node, g: Emitter, context: PassContext, chosen: set[fx.Node]) -> None:
    """Give `user`, which is not computed on pairs, its complex operands back."""
    for node in user.all_input_nodes:
        if node in chosen and node in g.pairs:
            pairs, laid_out = g.pairs[node], torch.view_as_real(value_of(node).resolve_conj())
            if stride_order(laid_out)[-1] == laid_out.dim() - 1:  # copied while they are pairs
                pairs = _laid_out(context, laid_out, pairs, user)
            marked = user.op == "output" and value_of(node).is_conj()
            pairs = g.conjugate(pairs) if marked else pairs
            whole = g.emit(aten.view_as_complex.default, pairs)
            whole = _laid_out(context, value_of(node), whole, user)
            whole = g.emit(aten._conj.default, whole) if marked else whole
            user.replace_input_with(node, whole)


def _laid_out(context: PassContext, value: torch.Tensor, new: fx.Node, before: fx.Node) -> fx.Node:
    """`new`, or a copy of it before the node `before`, with the strides of `value`."""
    if same_strides(value, value_of(new)):
        return new
    return context.infer.restride(before, new, value)


COMPLEX_PAIRS = Pass("complex pairs", complex_pairs)
