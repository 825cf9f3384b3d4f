"""Canonical form: one form per value, no computation twice, no operator without effect.

One traversal in graph order rewrites each node by the rules of its operator, then merges it with an
equal earlier node; a last traversal from the end removes dead nodes. Two invariants hold
throughout: values stay the same bit for bit, and a tensor that the caller sees shares storage with
another one only where it did before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from dicp.dtypes import Number, converted, holds_all
from dicp.dynamo_bridge.analysis.inference import (
    difference,
    expression,
    is_contiguous,
    shape_of,
    value_of,
)
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.provenance import absorb, inherit
from dicp.effects import (
    alias_root,
    is_mutating,
    is_pure,
    is_removable,
)

aten = torch.ops.aten
prims = torch.ops.prims

Rewrite: TypeAlias = fx.Node | int | float | bool | None
"""A rule's result for a node: the value to use instead, or None to leave the node."""


def canonicalize(gm: fx.GraphModule, context: PassContext) -> bool:
    """Bring `gm.graph` into canonical form; true if anything changed."""
    return _Canonicalizer(gm, context).run()


def remove_dead(graph: fx.Graph) -> bool:
    """Erase the calls without users and without side effects."""
    removed = False
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            if node.op == "get_attr" or is_removable(node.target):
                graph.erase_node(node)
                removed = True
    return removed


class _Canonicalizer:
    def __init__(self, gm: fx.GraphModule, context: PassContext) -> None:
        self._graph = gm.graph
        self._infer = context.infer
        self._changed = False
        self._seen: dict[Any, fx.Node] = {}
        self._symbols: dict[Any, fx.Node] = {}
        self._epoch = 0
        output = next(iter(reversed(gm.graph.nodes)))
        self._returned = set(output.all_input_nodes)
        self._escaping = self._aliases_of(self._returned)
        self._written = {
            alias_root(argument)
            for node in gm.graph.nodes
            if node.op == "call_function" and not is_pure(node.target)
            for argument in node.all_input_nodes
        }

    @staticmethod
    def _aliases_of(returned: set[fx.Node]) -> set[fx.Node]:
        """Every node whose storage the caller may get: the outputs and what they view."""
        escaping = set()
        for node in returned:
            escaping.add(node)
            root = alias_root(node)
            while node is not root:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                node = source
                escaping.add(node)
        return escaping

    def run(self) -> bool:
        for node in list(self._graph.nodes):
            if node.op == "placeholder":
                self._note_symbol(node)
            elif node.op == "call_function":
                self._visit(node)
        return remove_dead(self._graph) or self._changed

    def _visit(self, node: fx.Node) -> None:
        if is_mutating(node.target):
            self._epoch += 1
            return
        if "val" not in node.meta or not is_pure(node.target):
            return
        if not node.users:
            return
        new = self._fold_symbol(node)
        rule = RULES.get(node.target)
        if new is None and rule is not None:
            new = rule(self, node)
        if new is None:
            new = self._merge(node)
        if new is not None and new is not node:
            self._replace(node, new)

    def _replace(self, node: fx.Node, new: fx.Node | int | float | bool) -> None:
        if isinstance(new, fx.Node):
            absorb(new, node)
            if node in self._returned:
                self._returned.add(new)
            if node in self._escaping:
                self._escaping |= self._aliases_of({new})
        node.replace_all_uses_with(new)  # type: ignore[arg-type]
        self._graph.erase_node(node)
        self._changed = True

    # Symbolic integers: one node per expression.

    def _note_symbol(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            self._symbols.setdefault((type(value), expression(value)), node)

    def _fold_symbol(self, node: fx.Node) -> Rewrite:
        value = node.meta["val"]
        if isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return None
        known = expression(value)
        if getattr(known, "is_Integer", False) and isinstance(value, torch.SymInt):
            return int(known)
        return self._symbols.setdefault((type(value), known), node)

    # Equal computations.

    def _merge(self, node: fx.Node) -> fx.Node | None:
        try:
            key = (node.target, self._epoch, _key(node.args), _key(node.kwargs))
            earlier = self._seen.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            return None
        if earlier is node or (node in self._escaping and earlier in self._escaping):
            return None
        return earlier

    # Replacements.

    def as_source(self, node: fx.Node, source: Any) -> Rewrite:
        """`source`, if `node` is a view of exactly all of it."""
        if not isinstance(source, fx.Node) or not self._same(node, source):
            return None
        if node in self._returned and (source in self._returned or _is_input(source)):
            return None
        return source

    def as_copied(self, node: fx.Node, source: Any) -> Rewrite:
        """`source`, if `node` is a fresh copy of it and shared storage cannot be observed."""
        if not isinstance(source, fx.Node) or not self._same(node, source):
            return None
        root = alias_root(source)
        if root in self._written:
            return None
        if node in self._escaping and (root in self._escaping or _is_input(root)):
            return None
        return source

    @staticmethod
    def _same(node: fx.Node, source: fx.Node) -> bool:
        return difference(node.meta["val"], source.meta.get("val")) is None

    def respell(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        """Rewrite `node` in place to another operator with the same value."""
        if node.target != target or node.args != args or node.kwargs:
            node.target, node.args, node.kwargs = target, args, {}
            self._changed = True

    def same_value(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A new call in place of `node` that is known to have the same value: not inferred."""
        with self._graph.inserting_before(node):
            new = self._graph.call_function(target, args)
        inherit(new, (node,))
        new.meta["val"] = node.meta["val"]
        return new

    def emit(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> Rewrite:
        """A new call in place of `node`, if it infers to the same value."""
        try:
            new = self._infer.emit(node, target, args, None, (node,))
        except (RuntimeError, ValueError):
            return None
        if self._same(node, new):
            return new
        self._graph.erase_node(new)
        return None


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _key(argument: Any) -> Any:
    """A hashable form in which 1, 1.0, True, 0.0 and -0.0 all differ."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple([_key(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, _key(item)) for name, item in sorted(argument.items())])
    if isinstance(argument, float):
        return float, argument.hex()
    return type(argument), argument


def uniform_value(argument: Any) -> Number | None:
    """The number that fills a tensor node, converted to its dtype, or the number itself.

    None if not known.
    """
    if isinstance(argument, (bool, int, float)):
        return argument
    if not isinstance(argument, fx.Node) or argument.op != "call_function":
        return None
    if argument.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = argument.args[2 if argument.target is aten.new_full.default else 1]
    elif argument.target is aten.scalar_tensor.default:
        fill = argument.args[0]
    elif argument.target in (aten.zeros.default, aten.zeros_like.default):
        fill = 0
    elif argument.target in (aten.ones.default, aten.ones_like.default):
        fill = 1
    else:
        return None
    if not isinstance(fill, (bool, int, float)):
        return None
    return converted(fill, argument.meta["val"].dtype)


# Views of all of their source.


def _noop_view(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    return c.as_source(node, node.args[0])


def _view(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # view(x, x.shape) = x;  view(view(x, _), s) = view(x, s) for row-major x
    source = node.args[0]
    if node.target is aten._unsafe_view.default:
        c.respell(node, aten.view.default, node.args)
    same = c.as_source(node, source)
    if same is not None or not isinstance(source, fx.Node):
        return same
    if source.target is not aten.view.default:
        return None
    inner = source.args[0]
    if not isinstance(inner, fx.Node) or not is_contiguous(inner.meta["val"]):
        return None
    if c._same(node, inner) and (same := c.as_source(node, inner)) is not None:
        return same
    return c.same_value(node, aten.view.default, (inner, node.args[1]))


def permutation_of(node: fx.Node) -> list[int] | None:
    """The order of dimensions, if `node` only reorders them."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    dim = value.dim()
    if node.target is aten.permute.default:
        return [int(d) % dim for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(dim))
    if node.target is aten.t.default:
        return order[::-1]
    if node.target in (aten.transpose.int, prims.transpose.default):
        if node.target is prims.transpose.default:
            return [int(d) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
        if dim:
            left, right = (int(d) % dim for d in node.args[1:3])  # type: ignore[arg-type]
            order[left], order[right] = order[right], order[left]
        return order
    return None


def _permute(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # permute(permute(x, p), q) = permute(x, p[q]);  permute(x, identity) = x
    order = permutation_of(node)
    source = node.args[0]
    if order is None or not isinstance(source, fx.Node):
        return None
    c.respell(node, aten.permute.default, (source, order))
    if order == sorted(order):
        return c.as_source(node, source)
    inner = permutation_of(source)
    if inner is None:
        return None
    composed = [inner[d] for d in order]
    if composed == sorted(composed):
        return c.as_source(node, source.args[0])
    return c.same_value(node, aten.permute.default, (source.args[0], composed))


def _expand(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # expand(x, x.shape) = x;  expand(expand(x, _), s) = expand(x, s)
    source = node.args[0]
    same = c.as_source(node, source)
    if same is None and isinstance(source, fx.Node) and source.target is aten.expand.default:
        return c.emit(node, aten.expand.default, (source.args[0], node.args[1]))
    return same


_SQUEEZES = frozenset({aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default})


def _squeeze(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # squeeze(unsqueeze(x, d), d) = x;  unsqueeze(squeeze(x, d), d) = x
    source = node.args[0]
    same = c.as_source(node, source)
    if same is not None or not isinstance(source, fx.Node):
        return same
    inverse = _SQUEEZES if node.target is aten.unsqueeze.default else {aten.unsqueeze.default}
    return c.as_source(node, source.args[0]) if source.target in inverse else None


# Copies that change no value.


def _clone(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    return c.as_copied(node, node.args[0])


def _cat(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # cat([x]) = x
    tensors = node.args[0]
    if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
        return c.as_copied(node, tensors[0])
    return None


def _pad(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # pad by nothing
    widths = node.args[1]
    assert isinstance(widths, (list, tuple))
    if all(isinstance(width, int) and width == 0 for width in widths):
        return c.as_copied(node, node.args[0])
    return None


CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype})


def cast_source(node: Any) -> fx.Node | None:
    """The converted value, if `node` does nothing but convert the dtype."""
    if not isinstance(node, fx.Node) or node.target not in CASTS:
        return None
    source = node.args[0]
    others = {name: value for name, value in node.kwargs.items() if name != "dtype"}
    layout = others.pop("memory_format", None)
    old, new = value_of(source), node.meta["val"]
    plain = layout in (None, torch.preserve_format) and not any(
        value is not None and value is not False and value not in (old.device, old.layout)
        for value in others.values()
    )
    same_device = isinstance(old, torch.Tensor) and old.device == new.device
    return source if plain and same_device and isinstance(source, fx.Node) else None


def _cast(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # to(x, x.dtype) = x;  to(to(x, wider), d) = to(x, d);  to(full(s, v), d) = full(s, v)
    source = cast_source(node)
    if source is None:
        return c.as_copied(node, node.args[0])
    if (same := c.as_copied(node, source)) is not None:
        return same
    dtype = node.meta["val"].dtype
    fill = uniform_value(source)
    fill = None if fill is None else converted(fill, dtype)
    if fill is not None and is_contiguous(node.meta["val"]):
        return _full_like(c, node, fill)
    inner = cast_source(source)
    if inner is None:
        return None
    start, wide = inner.meta["val"].dtype, source.meta["val"].dtype
    if not holds_all(start, wide) or _leaves_range(start, wide, dtype):
        return None
    if dtype == start:
        return c.as_copied(node, inner)
    if node.target is prims.convert_element_type.default:
        return c.emit(node, node.target, (inner, dtype))
    return None


def _leaves_range(start: torch.dtype, wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether integers pass through a float to an integer dtype that does not hold them all.

    Out of range, a conversion from integers wraps around and one from floats does not.
    """
    whole = not start.is_floating_point and not dtype.is_floating_point
    return whole and wide.is_floating_point and not holds_all(start, dtype)


def _full_like(c: _Canonicalizer, node: fx.Node, fill: Number) -> Rewrite:
    value = node.meta["val"]
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.full.default:
        return None
    if value.dtype == torch.uint64 and fill >= 1 << 63:  # more than a Scalar holds
        return None
    if difference(shape_of(value), shape_of(source.meta["val"])) is not None:
        return None
    kwargs = {"dtype": value.dtype, "layout": value.layout, "device": value.device,
              "pin_memory": False}  # fmt: skip
    return c._infer.emit(node, aten.full.default, (source.args[0], fill), kwargs, (source, node))


# Neutral operands. x*1, x/1, x-0 and x**1 are exact for every real x, NaN and -0.0 included. x+0 is
# not (-0.0 + 0.0 = 0.0), so for floating point only x + -0.0 is removed. Complex numbers have other
# rules: (inf + 0j) * 1 has a part inf * 0, and x + -0.0 adds 0.0 to the imaginary part.


def _is_number(argument: Any, number: int, negative_zero: bool = False) -> bool:
    value = uniform_value(argument)
    if value is None or value != number:
        return False
    return not negative_zero or str(float(value)) == "-0.0"


def _is_complex(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_complex)


def _mul(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    left, right = node.args[:2]
    if _is_complex(node):
        return None
    if _is_number(right, 1):
        return c.as_copied(node, left)
    return c.as_copied(node, right) if _is_number(left, 1) else None


def _right_one(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    if _is_complex(node) or node.kwargs.get("rounding_mode") is not None:
        return None
    return c.as_copied(node, node.args[0]) if _is_number(node.args[1], 1) else None


def _add(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    left, right = node.args[:2]
    if _is_complex(node):
        return None
    floating = node.meta["val"].dtype.is_floating_point
    alpha = node.kwargs.get("alpha", 1)
    if alpha == 1 and _is_number(right, 0, negative_zero=floating):
        return c.as_copied(node, left)
    if alpha == 1 and _is_number(left, 0, negative_zero=floating):
        return c.as_copied(node, right)
    return None


def _sub(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    right = uniform_value(node.args[1])
    if right == 0 and str(float(right)) == "0.0" and node.kwargs.get("alpha", 1) == 1:
        return c.as_copied(node, node.args[0])
    return None


def _neutral_bool(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # x & True = x;  x | False = x
    neutral = node.target in (aten.bitwise_and.Tensor, aten.logical_and.default)
    left, right = node.args[:2]
    if node.meta["val"].dtype != torch.bool:
        return None
    if uniform_value(right) is neutral:
        return c.as_copied(node, left)
    return c.as_copied(node, right) if uniform_value(left) is neutral else None


Rule = Callable[[_Canonicalizer, fx.Node], Rewrite]

RULES: dict[Any, Rule] = {
    aten.alias.default: _noop_view,
    aten.detach.default: _noop_view,
    aten.lift_fresh.default: _noop_view,
    aten.lift_fresh_copy.default: _clone,
    aten.slice.Tensor: _noop_view,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _noop_view,
    aten.contiguous.default: _noop_view,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    prims.transpose.default: _permute,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _squeeze,
    aten.clone.default: _clone,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten._to_copy.default: _cast,
    aten.to.dtype: _cast,
    prims.convert_element_type.default: _cast,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _right_one,
    aten.div.Scalar: _right_one,
    aten.pow.Tensor_Scalar: _right_one,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.bitwise_and.Tensor: _neutral_bool,
    aten.bitwise_or.Tensor: _neutral_bool,
    aten.logical_and.default: _neutral_bool,
    aten.logical_or.default: _neutral_bool,
}

CANONICALIZE = Pass("canonicalize", canonicalize)
