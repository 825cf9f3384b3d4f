"""The adaptor as a pass: operands are cast and laid out as the target's adaptor file states.

A result is converted back to eager's dtype and strides. The next operator reads the value before
that conversion: casts between neighbours cancel, equal casts are merged, and unread ones removed.
Only calls that the target compiles once converted are converted.

Integers must fit the narrower type: numbers are compared here, tensors as `dicp::narrow` casts
them. What an operator computes from integers that fit need not fit; such operators keep their type
(and run eagerly, where the target lacks it) unless `allow_narrowing` is set.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.adaptor import Adaptor, Conversions
from dicp.dtypes import holds_all
from dicp.dynamo_bridge.analysis.values import is_contiguous, same_strides
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead
from dicp.effects import is_mutating, is_view, op_name
from dicp.operators import check_all_fit, check_fits, narrow
from dicp.torch_private import OpOverload, disable_current_modes, overload_name, schema_of

aten, prims = torch.ops.aten, torch.ops.prims
CAST = prims.convert_element_type.default
CASTS = frozenset({CAST, aten._to_copy.default})
REFUSED = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)
"""What eager's own checks raise where an operator does not take a dtype."""
SAME_ELEMENTS = frozenset({
    aten.view.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.alias.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
})  # fmt: skip
"""Views of all elements."""
INDICES = frozenset({"index", "indices", "target"})
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""What NHWC means, by the number of dimensions; row-major for others."""
FITTING = frozenset(
    """amax amin arange bitwise_and bitwise_not bitwise_or bitwise_xor cat clamp clamp_max clamp_min
    clone constant_pad_nd copy diagonal_copy empty fill flip fmod full full_like gather index
    index_put index_select lift_fresh_copy masked_fill masked_scatter maximum minimum new_full
    new_ones new_zeros ones ones_like relu remainder repeat roll scalar_tensor scatter
    select_scatter sign slice_scatter stack tril triu where zeros zeros_like""".split()
)
"""Operators whose integers are their operands', 0, 1, or of smaller magnitude."""


@dataclass(frozen=True)
class _Call:
    """An operator whose operands are being converted."""

    node: fx.Node
    conversions: Conversions
    trial: list[Any] = field(default_factory=list)
    """The keys of the conversions that are emitted for it, in `conversions_of`."""

    @property
    def name(self) -> str:
        return f"{op_name(self.node.target)}.{overload_name(self.node.target)}"

    @property
    def unchecked(self) -> bool:
        """Whether integers may be narrowed without a check."""
        return self.conversions.allow_narrowing


class _Adapting:
    def __init__(self, gm: fx.GraphModule, context: PassContext, adaptor: Adaptor) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.infer = context.infer
        self.compiles = context.compiles
        self.adaptor = adaptor
        self.unconverted: dict[fx.Node, fx.Node] = {}
        """Result converted back to eager's dtype and strides -> the result as computed."""
        self.conversions_of: dict[Any, fx.Node] = {}
        """Converted operands, by source, dtype, layout and whether they are checked."""
        self.changed = False

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if not isinstance(node.target, OpOverload) or is_mutating(node.target):
                continue
            if node.target in CASTS:
                self._follow_cast(node)
            elif is_view(node.target):
                self._follow_view(node)
            else:
                self._adapt(_Call(node, self._conversions(node)))
        return remove_dead(self.graph) or self.changed

    def _conversions(self, node: fx.Node) -> Conversions:
        scalar = len(node.args) > 1 and isinstance(node.args[1], (int, float, bool))
        return self.adaptor.conversions(op_name(node.target), overload_name(node.target), scalar)

    # ---- calls ----------------------------------------------------------------------------------

    def _follow_view(self, node: fx.Node) -> None:
        """A view of a value that was converted back becomes a view of the value before that."""
        source = node.args[0]
        inner = self.unconverted.get(source) if isinstance(source, fx.Node) else None
        if inner is not None and node.target is not aten.view.dtype:
            if same_strides(inner.meta["val"], source.meta["val"]):  # type: ignore[union-attr]
                self._replace(node, (inner, *node.args[1:]), node.kwargs)

    def _follow_cast(self, node: fx.Node) -> None:
        """A cast of the program's own ends at the type that the target has, where it is exact."""
        source, own = node.args[0], node.meta["val"].dtype
        assert isinstance(source, fx.Node)
        inner = self.unconverted.get(source, source)
        given = inner.meta["val"].dtype
        to = self._conversions(node).dtype("", own)
        exact = holds_all(given, to) or (to.is_floating_point and own.is_floating_point)
        to = to if exact else own
        if (to == own and inner is source) or set(node.kwargs) - {"dtype"}:
            return
        if given == to != own:
            self.unconverted[node] = inner
        elif node.target is CAST:
            self._replace(node, (inner, to), {})
        else:
            self._replace(node, (inner,), {"dtype": to})

    def _adapt(self, call: _Call) -> None:
        node, conversions = call.node, call.conversions
        declared = schema_of(node.target).arguments

        def converted(argument: str, value: Any) -> Any:
            return map_arg(value, lambda source: self._operand(call, source, argument))

        args = tuple(converted(a.name, v) for a, v in zip(declared, node.args, strict=False))
        kwargs = {key: converted(key, value) for key, value in node.kwargs.items()}
        own = node.meta.get("val")
        if isinstance(own, torch.Tensor) and any(a.name == "dtype" for a in declared[len(args) :]):
            if (to := conversions.dtype("", own.dtype)) != own.dtype:
                kwargs["dtype"] = to
        if args == node.args and kwargs == node.kwargs:
            return
        fits = call.unchecked or _fits(node)
        if self._replace(node, args, kwargs, call.trial, fits) and not call.unchecked:
            types = {x.meta["val"].dtype for x in _tensors((args, kwargs))} | {kwargs.get("dtype")}
            before = {x.meta["val"].dtype for x in _tensors((node.args, node.kwargs))}
            _check_numbers(node, types - before, call.name)

    def _replace(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: Any, trial: Sequence[Any] = (),
        fits: bool = True,
    ) -> bool:  # fmt: skip
        """The call on other operands takes the node's place, if the target compiles it then;
        otherwise the conversions emitted for it, `trial`, are erased."""
        new = self._emitted(node, args, kwargs)
        if new is not None and self.compiles(new) and (fits or not _is_narrowed(node, new)):
            self._convert_back(node, new)
            self.changed = True
            return True
        if new is not None:
            self.graph.erase_node(new)
        for key in reversed(trial):
            self.graph.erase_node(self.conversions_of.pop(key))
        return False

    def _emitted(self, node: fx.Node, args: tuple[Any, ...], kwargs: Any) -> fx.Node | None:
        op: Any = node.target
        try:
            return self.infer.emit(node, op, args, kwargs, [node])
        except REFUSED:
            pass
        names = [a.name for a in schema_of(op).arguments]
        # eager takes no narrow indices; that says nothing about the target
        wide = tuple(
            old if name in INDICES else new
            for name, old, new in zip(names, node.args, args, strict=False)
        )
        try:
            new = self.infer.emit(node, op, wide, kwargs, [node])
        except REFUSED:
            return None
        new.args = args
        return new

    # ---- values ---------------------------------------------------------------------------------

    def _operand(self, call: _Call, source: fx.Node, argument: str) -> fx.Node:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return source
        to = call.conversions.dtype(argument, value.dtype)
        inner = self.unconverted.get(source, source)
        if to == value.dtype != inner.meta["val"].dtype:
            inner = source
        cast, layout = self._typed(call, inner, to), call.conversions.layout(argument)
        return self._cached(call, cast, layout, lambda: self._laid_out(call.node, cast, layout))

    def _cached(
        self, call: _Call, source: fx.Node, to: torch.dtype | str, make: Callable[[], fx.Node]
    ) -> fx.Node:
        """The node that `make` emits for `source` as a dtype or in a layout, once."""
        key = source, call.unchecked, to
        if key not in self.conversions_of:
            found = make()
            if found is source:
                return found
            self.conversions_of[key] = found
            call.trial.append(key)
        return self.conversions_of[key]

    def _typed(self, call: _Call, source: fx.Node, to: torch.dtype) -> fx.Node:
        """`source` as `to`; of a view the tensor is cast that others may read as well."""
        if source.meta["val"].dtype == to:
            return source

        def make() -> fx.Node:
            base = source.args[0] if source.target in SAME_ELEMENTS else None
            if isinstance(base, fx.Node):
                inner = self._typed(call, base, to)
                with contextlib.suppress(*REFUSED):
                    args = (inner, *source.args[1:])
                    return self._emit_after(source, call.node, source.target, args, source.kwargs)
            return self._cast(call, source, to)

        return self._cached(call, source, to, make)

    def _cast(self, call: _Call, source: fx.Node, to: torch.dtype) -> fx.Node:
        if not call.unchecked and _narrows(source.meta["val"].dtype, to):
            if source.op != "get_attr":
                return self._emit_after(source, call.node, narrow, (source, to, call.name))
            with disable_current_modes():
                check_all_fit(attrgetter(str(source.target))(self.gm), to, call.name)
        return self._emit_after(source, call.node, CAST, (source, to))

    def _laid_out(self, node: fx.Node, source: fx.Node, layout: str) -> fx.Node:
        value = source.meta["val"]
        form = FORMATS.get(value.dim()) if layout == "NHWC" else None
        if layout == "ND" or (form is None and is_contiguous(value)):
            return source
        kwargs = {"memory_format": form or torch.contiguous_format}
        copy = self._emit_after(source, node, aten.clone.default, (source,), kwargs)
        if not same_strides(value, copy.meta["val"]):
            return copy
        self.graph.erase_node(copy)
        return source

    def _emit_after(
        self, source: fx.Node, node: fx.Node, op: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> fx.Node:
        """A call right after what it reads, where later operators find it, too."""
        before = source.next
        while before.op in ("placeholder", "get_attr"):
            before = before.next
        return self.infer.emit(before, op, args, kwargs, [node])

    def _convert_back(self, node: fx.Node, new: fx.Node) -> None:
        old = node.meta["val"]
        if not isinstance(old, (tuple, list)):
            return self._restore(node, new)
        for item in [user for user in node.users if user.target is operator.getitem]:
            self._restore(item, self.infer.emit(item, operator.getitem, (new, item.args[1])))

    def _restore(self, node: fx.Node, new: fx.Node) -> None:
        """`new` in the node's place, with eager's dtype and strides."""
        old, given = node.meta["val"], new.meta["val"]
        back = new
        if given.dtype != old.dtype:
            back = self.infer.emit(node, CAST, (new, old.dtype), origins=[node])
        if not same_strides(old, back.meta["val"]):
            back = self.infer.restride(node, back, old)
        if back is not new and holds_all(given.dtype, old.dtype):
            self.unconverted[back] = new
        node.replace_all_uses_with(back)


def _tensors(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return [node for node in found if isinstance(node.meta.get("val"), torch.Tensor)]


def _is_integer(dtype: torch.dtype | None) -> bool:
    return dtype not in (None, torch.bool) and not (dtype.is_floating_point or dtype.is_complex)


def _narrows(given: torch.dtype, to: torch.dtype) -> bool:
    return _is_integer(given) and _is_integer(to) and not holds_all(given, to)


def _is_narrowed(node: fx.Node, new: fx.Node) -> bool:
    """Whether integers that an operator computes are of a narrower type than eager's."""
    results = [x.meta["val"] for x in (node, new)]
    pairs = zip(*(r if isinstance(r, (tuple, list)) else [r] for r in results), strict=True)
    return any(isinstance(a, torch.Tensor) and _narrows(a.dtype, b.dtype) for a, b in pairs)


def _numbers(node: fx.Node) -> list[Any]:
    """The arguments that are numbers to compute with, no sizes or dimensions."""
    pairs = zip(schema_of(node.target).arguments, node.args, strict=False)
    return [value for argument, value in pairs if "number" in str(argument.type)]


def _fits(node: fx.Node) -> bool:
    """Whether an operator's integer results fit wherever its operands do."""
    if node.target is aten.arange.default:
        return True  # they are no more than its elements
    adds = node.target is aten.index_put.default and node.args[3:] == (True,)
    if adds or "reduce" in overload_name(node.target):  # type: ignore[arg-type]
        return False
    symbolic = any(isinstance(number, fx.Node) for number in _numbers(node))
    return op_name(node.target) in FITTING and not symbolic


def _check_numbers(node: fx.Node, types: set[Any], name: str) -> None:
    """Raises NarrowingError for a number that the type of converted operands does not hold."""
    for dtype in filter(_is_integer, types):
        for number in _numbers(node):
            if isinstance(number, int):
                check_fits(number, dtype, name)


def adapt(gm: fx.GraphModule, context: PassContext) -> bool:
    """Convert as the target's adaptor file states; raises NarrowingError."""
    return context.adaptor is not None and _Adapting(gm, context, context.adaptor).run()


ADAPT = Pass("adapt", adapt)
