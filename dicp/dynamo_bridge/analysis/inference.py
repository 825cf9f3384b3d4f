"""Shapes, dtypes and strides of new or changed nodes, by running them on fake tensors.

PyTorch's fake tensors implement every operator's shape, dtype and stride rule, symbolic sizes
included, so dicp has no such rules. A pass names the nodes that it added or changed; only
these and the nodes that depend on them are run.
"""

from __future__ import annotations

import contextlib
import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dicp.dynamo_bridge.analysis.aliases import alias_root, shared_by_results
from dicp.dynamo_bridge.analysis.values import (
    difference,
    is_channels_last,
    is_contiguous,
    is_dense,
    same_strides,
    shape_of,
    stride_order,
    value_of,
)
from dicp.dynamo_bridge.provenance import inherit
from dicp.effects import is_pure
from dicp.errors import InferenceMismatchError
from dicp.torch_private import HigherOrderOperator

aten = torch.ops.aten


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


class Inference:
    """Runs nodes on the fake tensors of one graph and keeps `meta["val"]` up to date."""

    def __init__(self, fake_mode: contextlib.AbstractContextManager[Any] | None) -> None:
        self._fake_mode = fake_mode

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Inference:
        """The inference for `gm`, with the fake mode of its values."""
        for node in gm.graph.nodes:
            mode = getattr(node.meta.get("val"), "fake_mode", None)
            if mode is not None:
                return cls(mode)
        return cls(None)

    def compute(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of a call whose arguments may be nodes."""
        if target is operator.getitem and isinstance(args[0], fx.Node):
            return value_of(args[0])[args[1]]
        fake_args = map_arg(tuple(args), value_of)
        fake_kwargs = map_arg(dict(kwargs), value_of)
        with self._fake_mode or contextlib.nullcontext(), torch.no_grad():
            return target(*fake_args, **fake_kwargs)

    def infer(self, node: fx.Node) -> Any:
        """Compute and store the value of one node."""
        assert node.op == "call_function", node.op
        value = self.compute(node.target, node.args, node.kwargs)
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
        return value

    def complete(self, graph: fx.Graph) -> None:
        """Infer what PyTorch leaves out: values of the calls by which its partitioner lets backward
        draw the random numbers of a checkpoint again."""
        for node in graph.nodes:
            special = isinstance(node.target, HigherOrderOperator)
            if special and node.users and "val" not in node.meta:
                self.infer(node)

    def emit(
        self,
        before: fx.Node,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        origins: Sequence[fx.Node] = (),
    ) -> fx.Node:
        """Insert an inferred call before `before`, with the provenance of the nodes `origins`."""
        with before.graph.inserting_before(before):
            node = before.graph.call_function(target, args, dict(kwargs or {}))
        inherit(node, origins)
        try:
            self.infer(node)
        except BaseException:
            before.graph.erase_node(node)
            raise
        return node

    def update(
        self, dirty: Iterable[fx.Node], old: Mapping[fx.Node, Any] | None = None
    ) -> list[fx.Node]:
        """Re-infer `dirty` and everything whose inputs' metadata changed; return what changed.

        A `view` that the new strides no longer allow reads a contiguous copy instead. A graph
        output keeps the strides it had: it returns a copy in the old layout, or a view of one.
        `old`: values of inputs before they changed, which those of other nodes still have.
        """
        return Propagation(self, old or {}).run(dirty)

    def check(self, old: fx.Node, new: fx.Node, strides: bool) -> None:
        """Raise InferenceMismatchError unless `new` may replace `old`."""
        found = difference(old.meta.get("val"), new.meta.get("val"), strides)
        if found is not None:
            field, expected, got = found
            raise InferenceMismatchError(str(old.format_node() or old), field, expected, got)

    def channels_last(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor like `value`, channels-last."""
        _, channels, height, width = value.shape
        row = channels * width
        strides = (row * height, 1, row, channels)
        with self._fake_mode or contextlib.nullcontext():
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)

    def restride(self, before: fx.Node, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """A copy of `node`, laid out as `like` (dense strides), inserted before `before`."""
        origins = (node,)
        order = stride_order(like)
        if order == list(range(like.dim())):
            return self.copy(before, node, torch.contiguous_format, origins)
        if is_channels_last(like):
            return self.copy(before, node, torch.channels_last, origins)
        inverse = [order.index(dim) for dim in range(len(order))]
        out = self.emit(before, aten.permute.default, (node, order), None, origins)
        out = self.copy(before, out, torch.contiguous_format, origins)
        return self.emit(before, aten.permute.default, (out, inverse), None, origins)

    def copy(
        self, before: fx.Node, source: Any, format: torch.memory_format, origins: Sequence[fx.Node]
    ) -> fx.Node:
        """A copy of `source` in a memory format, inserted before `before`."""
        kwargs = {"memory_format": format}
        return self.emit(before, aten.clone.default, (source,), kwargs, origins)


_STRIDE_SENSITIVE = frozenset({
    aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype,
    aten._reshape_alias.default,
})  # fmt: skip


def reads_any_strides(target: Any) -> bool:
    """Whether the values that the operator computes are independent of its arguments' strides."""
    return target is aten.copy_.default or (is_pure(target) and target not in _STRIDE_SENSITIVE)


_FIRST_FOLLOWS = frozenset({
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default, aten.native_batch_norm.default,
})  # fmt: skip
"""Operators whose first result has the memory format of their first argument."""


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() >= 4


class Propagation:
    """One worklist run of `Inference.update`, in graph order."""

    def __init__(self, inference: Inference, old: Mapping[fx.Node, Any]) -> None:
        self._inference = inference
        self._heap: list[tuple[int, fx.Node]] = []
        self._waiting: set[fx.Node] = set()
        self._position: dict[fx.Node, int] = {}
        self._old = dict(old)
        self._restored: dict[fx.Node, fx.Node] = {}
        self._recomputed: set[fx.Node] = set()

    def run(self, dirty: Iterable[fx.Node]) -> list[fx.Node]:
        roots = list(dirty)
        if not roots:
            return []
        self._position = {node: index for index, node in enumerate(roots[0].graph.nodes)}
        for node in roots:
            self._push(node)
        changed = []
        while self._heap:
            node = heapq.heappop(self._heap)[1]
            self._waiting.discard(node)
            if self._visit(node):
                changed.append(node)
                for user in list(node.users):
                    if user.op == "call_function":
                        self._push(user)
        return changed

    def _push(self, node: fx.Node) -> None:
        position = self._position.get(node)
        if position is not None and node not in self._waiting:
            self._waiting.add(node)
            heapq.heappush(self._heap, (position, node))

    def _visit(self, node: fx.Node) -> bool:
        old = node.meta.get("val")
        if not reads_any_strides(node.target) or self._views_shared(node):
            self._restore_inputs(node)
            return False
        try:
            new = self._channels_last(node, old)
            if new is None:
                new = self._inference.infer(node)
        except (RuntimeError, ValueError):
            if node.target is not aten.view.default:
                raise
            if _is_returned(node) and not is_dense(old):  # no view of a copy has such strides
                self._restore_inputs(node)
            else:
                source = self._contiguous(node)
                node.replace_input_with(node.args[0], source)  # type: ignore[arg-type]
            new = self._inference.infer(node)
        if difference(old, new) is not None and _is_returned(node) and not is_dense(old):
            self._restore_viewed(node)  # no copy has such strides, but a view of one
            new = self._inference.infer(node)
        if difference(old, new) is None:
            node.meta["val"] = old
            return False
        self._old.setdefault(node, old)
        self._keep_output_strides(node, old)
        return True

    def _channels_last(self, node: fx.Node, old: Any) -> Any:
        """The value of an operator that follows its operands' format, if all are channels-last.

        Equal to what inference computes, but cheaper: with symbolic sizes inference costs tens of
        milliseconds a node, and a change of format propagates to the end of a network.
        """
        out = old[0] if isinstance(old, tuple) and node.target in _FIRST_FOLLOWS else old
        if not isinstance(out, torch.Tensor) or out.dim() != 4 or not is_contiguous(out):
            return None
        sources = [source for source in node.all_input_nodes if _is_image(source)]
        if node.target in _FIRST_FOLLOWS:
            sources = sources[:1]
        elif torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None  # a pointwise result has the common format of its operands
        shape = shape_of(out)
        values = [source.meta["val"] for source in sources]
        if any(value.dim() == 4 and shape_of(value) != shape for value in values):
            return None
        full = [value for value in values if value.dim() == 4]
        if not full or not all(is_channels_last(value) for value in full):
            return None
        new = self._inference.channels_last(out)
        node.meta["val"] = (new, *old[1:]) if isinstance(old, tuple) else new
        return node.meta["val"]

    def _restore_viewed(self, view: fx.Node) -> None:
        """Give the producer of `view` the inputs it was traced with, once."""
        source = view.args[0]
        if view.target is not operator.getitem or not isinstance(source, fx.Node):
            self._restore_inputs(view)
        elif source not in self._recomputed:
            self._recomputed.add(source)
            self._restore_inputs(source)
            self._inference.infer(source)
            for user in source.users:
                self._push(user)

    def _restore_inputs(self, node: fx.Node) -> None:
        """Give `node` inputs of the strides it was traced with."""
        for source in node.all_input_nodes:
            node.replace_input_with(source, self._as_traced(node, source))

    def _as_traced(self, before: fx.Node, source: fx.Node) -> fx.Node:
        """`source` with the strides it was traced with: a copy, or where no copy has such strides,
        its computation repeated from inputs as they were traced."""
        old = self._old.get(source)
        if old is None or difference(old, source.meta["val"]) is None:
            return source
        if source not in self._restored:
            if isinstance(old, torch.Tensor) and is_dense(old):
                traced = self._inference.restride(before, source, old)
            else:
                args, kwargs = map_arg(
                    (source.args, source.kwargs), lambda each: self._as_traced(before, each)
                )
                traced = self._inference.emit(before, source.target, args, kwargs, (source,))  # type: ignore[arg-type]
            self._restored[source] = traced
        return self._restored[source]

    def _contiguous(self, view: fx.Node) -> fx.Node:
        source = view.args[0]
        assert isinstance(source, fx.Node)
        return self._inference.copy(view, source, torch.contiguous_format, (source,))

    def _keep_output_strides(self, node: fx.Node, old: Any) -> None:
        outputs = [user for user in node.users if user.op == "output"]
        new = node.meta["val"]
        if not outputs or not isinstance(old, torch.Tensor) or same_strides(old, new):
            return
        output = outputs[0]
        if shared_by_results(node):  # views that are returned too are views of the copy
            copy = self._restored[node] = self._inference.restride(node.next, node, old)
        else:
            copy = self._inference.restride(output, node, old)
        output.replace_input_with(node, copy)

    def _views_shared(self, node: fx.Node) -> bool:
        """Whether the node views a tensor whose storage several results share."""
        root = alias_root(node)
        return root is not node and (root in self._restored or shared_by_results(root))
