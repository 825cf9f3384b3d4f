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
from dicp.dynamo_bridge.analysis.aliases import Aliases, alias_root, is_input, storage_offset
from dicp.dynamo_bridge.analysis.constants import cast_source, permutation_of, uniform_value
from dicp.dynamo_bridge.analysis.run_time_numbers import RunTimeNumbers
from dicp.dynamo_bridge.analysis.values import difference, is_contiguous, shape_of, value_of
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import EqualNodes, remove_dead
from dicp.dynamo_bridge.provenance import absorb, inherit
from dicp.effects import is_pure
from dicp.torch_private import disable_current_modes, expression_of

aten = torch.ops.aten
prims = torch.ops.prims

Rewrite: TypeAlias = fx.Node | int | float | bool | None
"""A rule's result for a node: the value to use instead, or None to leave the node."""


def canonicalize(gm: fx.GraphModule, context: PassContext) -> bool:
    """Bring `gm.graph` into canonical form; true if anything changed."""
    return _Canonicalizer(gm, context).run()


class _Canonicalizer:
    def __init__(self, gm: fx.GraphModule, context: PassContext) -> None:
        self._graph = gm.graph
        self._infer = context.infer
        self._changed = False
        self._symbols: dict[Any, fx.Node] = {}
        self._aliases = Aliases(gm.graph)
        self._equal = EqualNodes(self._aliases)
        self._run_time = RunTimeNumbers()

    def run(self) -> bool:
        for node in list(self._graph.nodes):
            if node.op == "placeholder":
                self._note_symbol(node)
            elif node.op == "call_function":
                self._visit(node)
        return remove_dead(self._graph) or self._changed

    def _visit(self, node: fx.Node) -> None:
        new: Rewrite = None
        is_read = self._run_time.includes(node)
        if is_pure(node.target):
            if "val" not in node.meta or not node.users:
                return
            new = self._fold_symbol(node)
            rule = RULES.get(node.target)
            if new is None and rule is not None:
                new = rule(self, node)
        if new is None:
            new = self._equal.earlier(node)
        if is_read and not isinstance(new, fx.Node | None):
            self._replace_in_tensors(node, new)
        elif new is not None and new is not node:
            self._replace(node, new)

    def _replace(self, node: fx.Node, new: fx.Node | int | float | bool) -> None:
        if isinstance(new, fx.Node):
            absorb(new, node)
            self._aliases.replaced(node, new)
        node.replace_all_uses_with(new)  # type: ignore[arg-type]
        self._graph.erase_node(node)
        self._changed = True

    def _replace_in_tensors(self, node: fx.Node, new: int | float | bool) -> None:
        """Tensors take what is known of a number; checks of it read it."""
        count = len(node.users)
        node.replace_all_uses_with(  # type: ignore[arg-type]
            new, lambda user: not self._run_time.includes(user)
        )
        self._changed |= len(node.users) < count

    # Symbolic integers: one node per expression.

    def _note_symbol(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            self._symbols.setdefault((type(value), expression_of(value)), node)

    def _fold_symbol(self, node: fx.Node) -> Rewrite:
        value = node.meta["val"]
        if isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return None
        known = expression_of(value)
        if getattr(known, "is_Integer", False) and isinstance(value, torch.SymInt):
            return int(known)
        return self._symbols.setdefault((type(value), known), node)

    # Replacements.

    def as_source(self, node: fx.Node, source: Any) -> Rewrite:
        """`source`, if `node` is a view of exactly all of it."""
        if not isinstance(source, fx.Node) or not self._same(node, source):
            return None
        return source if self._aliases.may_drop_view(node, source) else None

    def as_copied(self, node: fx.Node, source: Any) -> Rewrite:
        """`source`, if `node` is a fresh copy of it and shared storage cannot be observed."""
        if not isinstance(source, fx.Node) or not self._same(node, source):
            return None
        return source if self._aliases.may_drop_copy(node, source) else None

    @staticmethod
    def _same(node: fx.Node, source: fx.Node) -> bool:
        return difference(node.meta["val"], source.meta.get("val")) is None

    def set_operator(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
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


# Views of all of their source.


def _noop_view(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    return c.as_source(node, node.args[0])


def _view(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # view(x, x.shape) = x;  view(view(x, _), s) = view(x, s) for row-major x
    source = node.args[0]
    if node.target is aten._unsafe_view.default:
        c.set_operator(node, aten.view.default, node.args)
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


def _as_strided(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # as_strided(x, s, row-major strides) = view(x, s) for all of a row-major x
    source, size = node.args[:2]
    if not isinstance(source, fx.Node) or is_input(alias_root(source)):
        return None  # where an input begins in its storage is known at run time only
    if not is_contiguous(source.meta["val"]) or storage_offset(node) != storage_offset(source):
        return None
    return c.as_source(node, source) or c.emit(node, aten.view.default, (source, size))


def _permute(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # permute(permute(x, p), q) = permute(x, p[q]);  permute(x, identity) = x
    order = permutation_of(node)
    source = node.args[0]
    if order is None or not isinstance(source, fx.Node):
        return None
    c.set_operator(node, aten.permute.default, (source, order))
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


def _lift_fresh_copy(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # lift_fresh_copy(constant of one number, as torch.tensor(-math.inf)) = full([], number)
    source, value = node.args[0], node.meta["val"]
    if source.op != "get_attr" or value.dim() or value.dtype.is_complex:
        return _clone(c, node)
    with disable_current_modes():
        number = getattr(node.graph.owning_module, source.target).item()
    return _full(c, node, [], number, (node,)) or _clone(c, node)


def _detach_copy(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    return c._infer.copy(node, node.args[0], torch.contiguous_format, (node,))


def _copy(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # copy(like, x) = x, where x has like's dtype and layout
    return c.as_copied(node, node.args[1])


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


def _cast(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # to(x, x.dtype) = x;  to(to(x, wider), d) = to(x, d);  to(full(s, v), d) = full(s, v)
    if not isinstance(value_of(node.args[0]), torch.Tensor):
        return _cast_of_number(c, node)
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


def _cast_of_number(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    """A number where the operator takes a tensor: `vmap` promotes numbers so."""
    value = node.meta["val"]
    kwargs = {"dtype": value.dtype, "device": value.device}
    return c._infer.emit(node, aten.scalar_tensor.default, node.args[:1], kwargs, (node,))


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
    if difference(shape_of(value), shape_of(source.meta["val"])) is not None:
        return None
    return _full(c, node, source.args[0], fill, (source, node))


def _full(
    c: _Canonicalizer, node: fx.Node, size: Any, fill: Number, origins: tuple[fx.Node, ...]
) -> Rewrite:
    """A call that fills a tensor of the node's dtype, in place of the node."""
    value = node.meta["val"]
    if value.dtype == torch.uint64 and fill >= 1 << 63:  # more than a Scalar holds
        return None
    kwargs = {"dtype": value.dtype, "layout": value.layout, "device": value.device,
              "pin_memory": False}  # fmt: skip
    return c._infer.emit(node, aten.full.default, (size, fill), kwargs, origins)


# Neutral operands. x*1, x/1, x-0 and x**1 are exact for every real x, NaN and -0.0 included. x+0 is
# not (-0.0 + 0.0 = 0.0), so for floating point only x + -0.0 is removed. Complex numbers have other
# rules: (inf + 0j) * 1 has a part inf * 0, and x + -0.0 adds 0.0 to the imaginary part.


def _beside(
    c: _Canonicalizer, node: fx.Node, is_neutral: Callable[[Number], bool], commutes: bool = True
) -> Rewrite:
    """The operand beside a neutral one, which is the second, or either where they commute."""
    left, right = node.args[:2]
    for operand, other in ((right, left), (left, right))[: 1 + commutes]:
        value = uniform_value(operand)
        if value is not None and is_neutral(value):
            return c.as_copied(node, other)
    return None


def _is_one(value: Number) -> bool:
    return value == 1


def _is_complex(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_complex)


def _mul(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    return None if _is_complex(node) else _beside(c, node, _is_one)


def _by_one(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    if _is_complex(node) or node.kwargs.get("rounding_mode") is not None:
        return None
    return _beside(c, node, _is_one, commutes=False)


def _add(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    if _is_complex(node) or node.kwargs.get("alpha", 1) != 1:
        return None
    zeros = ("-0.0",) if node.meta["val"].dtype.is_floating_point else ("-0.0", "0.0")
    return _beside(c, node, lambda value: str(float(value)) in zeros)


def _sub(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    if node.kwargs.get("alpha", 1) != 1:
        return None
    return _beside(c, node, lambda value: str(float(value)) == "0.0", commutes=False)


def _neutral_bool(c: _Canonicalizer, node: fx.Node) -> Rewrite:
    # x & True = x;  x | False = x
    if node.meta["val"].dtype != torch.bool:
        return None
    neutral = node.target in (aten.bitwise_and.Tensor, aten.logical_and.default)
    return _beside(c, node, lambda value: value is neutral)


Rule = Callable[[_Canonicalizer, fx.Node], Rewrite]

RULES: dict[Any, Rule] = {
    aten.alias.default: _noop_view,
    aten.detach.default: _noop_view,
    aten.lift_fresh.default: _noop_view,
    aten.lift_fresh_copy.default: _lift_fresh_copy,
    aten.slice.Tensor: _noop_view,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _noop_view,
    aten.contiguous.default: _noop_view,
    aten.as_strided.default: _as_strided,
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
    aten.detach_copy.default: _detach_copy,
    aten.copy.default: _copy,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten._to_copy.default: _cast,
    aten.to.dtype: _cast,
    prims.convert_element_type.default: _cast,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _by_one,
    aten.div.Scalar: _by_one,
    aten.pow.Tensor_Scalar: _by_one,
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
