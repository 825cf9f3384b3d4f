"""Which ATen operators are decomposed: every one with a decomposition that the target lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dicp import torch_private
from dicp.domains import DOMAINS, outside_domain
from dicp.dynamo_bridge.checked_values import CHECKED_VALUES, with_assertions
from dicp.dynamo_bridge.indexed_layouts import in_order_of_indices
from dicp.dynamo_bridge.interpolation import gradients_of, interpolate
from dicp.dynamo_bridge.memory_formats import (
    CONTIGUOUS_IN_PLACE,
    FORMAT_SOURCES,
    LAYOUTS,
    STRIDE_SOURCES,
    in_format_of_input,
    in_place,
    max_pool1d,
    pad_or_crop,
    roll_of_slices,
    windows,
    with_layout,
    with_strides_of_input,
)
from dicp.dynamo_bridge.own_decompositions import (
    LINSPACES,
    MAX_POOLS,
    MEAN_GRADIENTS,
    NORM_WEIGHTS,
    NUMBER_OPERANDS,
    OWN,
    affine_grid,
    broadcast_complex,
    dropout,
    hardshrink,
    in_one_dtype,
    ldexp_of_number,
    multi_margin_loss,
    multilabel_margin_loss,
    ndtr,
    no_dropout,
    of_last_nan,
    pad,
    polygamma_in_place,
    spaced_in_float64,
    unless_empty,
    unless_of_one_row,
    with_converted_number,
)
from dicp.dynamo_bridge.thresholds import MANY_CORE_RULES
from dicp.dynamo_bridge.widening import in_float32
from dicp.dynamo_bridge.written_views import SCATTERS, undecomposed
from dicp.errors import FallbackWarning
from dicp.operator_choice import OperatorChoice
from dicp.target import Target
from dicp.torch_private import (
    DECOMPOSED_BY_WRITING,
    OpOverload,
    TorchDispatchMode,
    all_decompositions,
    disable_current_modes,
    overload_name,
    pytree,
    release_of,
    traced_fake_mode,
)

aten = torch.ops.aten
Rule = Callable[..., Any]
"""A decomposition; it returns NotImplemented for a call that it does not decompose."""

TRACE_HAS_A_SYMBOLIC_DERIVATIVE = release_of(torch.__version__) >= (2, 13)

WHOLE = frozenset({
    aten.lift_fresh.default, aten.lift.default, aten.detach.default, aten.item.default,
    aten.detach_copy.default,
})  # fmt: skip
"""Operators that AOTAutograd itself expects undecomposed. In the body of a scan `detach_copy` makes
what is saved for the gradient apart from a result; the partitioner would rematerialize a clone."""

MUTATING = DECOMPOSED_BY_WRITING | {
    aten.complex.default,
    aten.polar.default,
    aten.constant_pad_nd.default,
    aten.diagonal_scatter.default,
}
"""Operators whose decomposition writes through views, which functionalization does not see."""

UNTRACEABLE = frozenset({aten.bucketize.Scalar})
"""Operators whose decomposition makes a constant tensor that tracing treats as unknown data."""


FOR_ALL_TARGETS: Mapping[OpOverload, Rule] = {
    aten.native_dropout.default: no_dropout,
    aten.complex.default: broadcast_complex,
    aten.ldexp.Tensor: ldexp_of_number,
}
"""Decompositions of some calls, of targets that keep the operator, too."""


@dataclass(frozen=True)
class Correction:
    """Makes decompositions of `ops` give eager's results where PyTorch's, or its inference, do not.

    whole: whether it applies to operators without a decomposition, too.
    """

    ops: Collection[OpOverload]
    corrected: Callable[[OpOverload, Rule], Rule]
    whole: bool = False


CORRECTIONS = (
    Correction(MEAN_GRADIENTS, lambda op, rule: unless_empty(rule)),
    Correction(NORM_WEIGHTS, in_one_dtype, whole=True),
    Correction(FORMAT_SOURCES, in_format_of_input, whole=True),
    Correction(LAYOUTS, with_layout, whole=True),
    Correction({aten.index.Tensor}, lambda op, rule: in_order_of_indices(rule), whole=True),
    Correction({aten.roll.default}, lambda op, rule: roll_of_slices(rule), whole=True),
    Correction({aten.constant_pad_nd.default}, lambda op, rule: pad_or_crop(rule), whole=True),
    Correction(STRIDE_SOURCES, with_strides_of_input),
    Correction(NUMBER_OPERANDS, lambda op, rule: with_converted_number(rule)),
    Correction(LINSPACES, lambda op, rule: spaced_in_float64(rule)),
    Correction(MAX_POOLS, of_last_nan),
    Correction({aten.affine_grid_generator.default}, lambda op, rule: unless_of_one_row(rule)),
    Correction(DOMAINS, lambda op, rule: InDomain(op, rule)),
)
"""In this order: a later one is called first."""


@lru_cache(maxsize=32)
def decompositions(target: Target, choice: OperatorChoice | None = None) -> dict[Any, Rule]:
    """The decomposition table for `target`; PyTorch's own table is left as it is.

    Operators that the user makes eager or native are not decomposed. A core operator is decomposed
    only into operators that the target has rules for: otherwise it would end in primitives, which
    run eagerly one by one. For targets with few rules this holds for all operators.
    """
    keep = target.facts.keep | WHOLE | MUTATING | UNTRACEABLE
    table = {
        op: rule
        for op, rule in (*all_decompositions.items(), *OWN.items())
        if isinstance(op, OpOverload) and op not in keep and functional_form(op) not in keep
    }
    has_most = sum(torch.Tag.core in op.tags for op in keep) > MANY_CORE_RULES
    for op in [op for op in table if op not in OWN]:
        if torch.Tag.core in op.tags or not has_most:
            table[op] = _EndsInRules(table[op], target, table)
    table |= {**FOR_ALL_TARGETS, **table, **SCATTERS}  # in place: `_EndsInRules` reads it
    for correction in CORRECTIONS:
        for op in correction.ops:
            if op in table or correction.whole:
                table[op] = correction.corrected(op, table.get(op, undecomposed))
    for op in target.facts.in_float32:
        table[op] = in_float32(op, target.facts, table.get(op, undecomposed))
    for op in list(table) if choice else ():
        assert choice is not None
        if choice.wants_eager(op) or (choice.wants_native(op) and not choice.prefers):
            del table[op]
        elif choice.wants_native(op):
            table[op] = _with_warning(op, table[op])
    return table


@lru_cache(maxsize=32)
def decompositions_with_checks(
    target: Target, choice: OperatorChoice | None = None
) -> dict[Any, Rule]:
    """The decomposition table for `target`, with assertions on numbers that eager checks.

    For whole graphs: an assertion runs eagerly, so that one operator alone would not be compiled.
    """
    table = dict(decompositions(target, choice))
    for op in CHECKED_VALUES:
        table[op] = with_assertions(op, table.get(op, undecomposed))
    return table


class _EndsInRules:
    """A decomposition that is refused (NotImplemented) where it ends in primitives without rules.

    It is tried on fake tensors first, outside of the graph that is being traced.
    """

    def __init__(self, rule: Rule, target: Target, table: Mapping[Any, Rule]) -> None:
        self.rule, self.target, self.table = rule, target, table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        modes = (mode for x in tensors if (mode := getattr(x, "fake_mode", None)))
        mode = next(modes, None) or traced_fake_mode()  # a factory has no tensors
        if mode is not None:
            watch = _DecompositionMode(self.target, self.table)
            unguarded = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
            with disable_current_modes(), unguarded, mode, watch:
                self.rule(*args, **kwargs)
            if watch.lacks_rules:
                return NotImplemented
        return self.rule(*args, **kwargs)


class InDomain:
    """A decomposition that is refused (NotImplemented) for numbers that eager rejects."""

    def __init__(self, op: OpOverload, rule: Rule) -> None:
        self.op, self.rule = op, rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if outside_domain(self.op, args, kwargs, lambda relation: relation is not False):
            return NotImplemented
        return self.rule(*args, **kwargs)


class _DecompositionMode(TorchDispatchMode):
    """Decomposes what a decomposition calls; `lacks_rules` once that ends in a primitive for which
    the target has no rule.

    A core operator that it calls counts as having its own, checked, decomposition.
    """

    def __init__(self, target: Target, table: Mapping[Any, Rule]) -> None:
        super().__init__()
        self.target, self.table = target, table
        self.lacks_rules = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.target.rule_kind(func) is None:
            if func.namespace == "prims":
                self.lacks_rules = True
            elif func in self.table and not self.lacks_rules:
                rule = self.table[func]
                with self:
                    made = _unchecked(rule)(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        return func(*args, **kwargs)


def _unchecked(rule: Rule) -> Rule:
    while isinstance(rule, (_EndsInRules, InDomain)):
        rule = rule.rule
    return rule


def _with_warning(op: OpOverload, rule: Rule) -> Rule:
    def warned(*args: Any, **kwargs: Any) -> Any:
        message = f"{op} is decomposed although native_ops names it"
        warnings.warn(FallbackWarning(message), stacklevel=2)
        return rule(*args, **kwargs)

    return warned


def functional_form(op: OpOverload) -> OpOverload | None:
    """`add.Tensor` for `add_.Tensor`: the functional form of an in-place operator.

    A decomposition of the in-place operator would run before functionalization and so decompose an
    operator that the target keeps.
    """
    name = op.overloadpacket.__name__
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, overload_name(op), None)


def decompose_traces(gm: fx.GraphModule) -> None:
    """trace(x) = sum(diagonal(x)) in Dynamo's graph, in releases whose derivative of trace asks a
    tensor of symbolic sizes for its number of elements."""
    if TRACE_HAS_A_SYMBOLIC_DERIVATIVE:
        return
    graph = gm.graph
    found = [*graph.find_nodes(op="call_function", target=torch.trace),
             *graph.find_nodes(op="call_method", target="trace")]  # fmt: skip
    for node in found:
        with graph.inserting_before(node):
            diagonal = graph.call_function(torch.diagonal, node.args, node.kwargs)
            total = graph.call_function(torch.sum, (diagonal,))
        for new in (diagonal, total):
            new.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    if found:
        gm.recompile()


REPLACED: dict[Any, tuple[Callable[..., Any], int, frozenset[str]]] = {
    F.dropout: (dropout, 4, frozenset({"input", "p", "training", "inplace"})),
    torch.dropout: (dropout, 3, frozenset({"input", "p"})),
    F.max_pool1d: (
        max_pool1d, 7, frozenset({
            "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices",
        }),
    ),
    F.multilabel_margin_loss: (multilabel_margin_loss, 2, frozenset({"reduction"})),
    F.multi_margin_loss: (
        multi_margin_loss, 5, frozenset({"p", "margin", "weight", "reduction"}),
    ),
    torch.special.ndtr: (ndtr, 1, frozenset()),
    F.hardshrink: (hardshrink, 2, frozenset({"input", "lambd"})),
    F.affine_grid: (affine_grid, 3, frozenset({"theta", "size", "align_corners"})),
    torch.affine_grid_generator: (affine_grid, 3, frozenset({"theta", "size", "align_corners"})),
    torch_private.pad: (pad, 4, frozenset({"mode", "value"})),
}  # fmt: skip
"""Function -> ours, the most positional and the names of the keyword arguments that ours takes."""


def replace_functions(gm: fx.GraphModule) -> None:
    """Call ours, in Dynamo's graph, in place of a function that tracing decomposes wrongly, or to
    operators that take longer."""
    replacements: dict[fx.Node, fx.node.Target] = {}
    for name in CONTIGUOUS_IN_PLACE:
        for node in gm.graph.find_nodes(op="call_method", target=name):
            node.op, node.args = "call_function", (name, *node.args)
            replacements[node] = in_place
    for node in gm.graph.find_nodes(op="call_method", target="polygamma_"):
        node.op = "call_function"
        replacements[node] = polygamma_in_place
    for node in gm.graph.find_nodes(op="call_method", target="unfold"):
        value = node.meta.get("example_value")
        if value is not None and torch_private.version_of(value):
            node.op = "call_function"
            replacements[node] = windows
    for function, (ours, most, named) in REPLACED.items():
        for node in gm.graph.find_nodes(op="call_function", target=function):
            if len(node.args) <= most and node.kwargs.keys() <= named:
                replacements[node] = ours
    for node in gm.graph.find_nodes(op="call_method", target="contiguous"):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        # A copy in eager. After a write in place the functional form of `source` may be contiguous,
        # and would be returned: what is written into the copy would be written into `source`.
        if torch_private.are_apart(*(each.meta.get("example_value") for each in (source, node))):
            node.kwargs = {"memory_format": torch.contiguous_format, **node.kwargs}
            replacements[node] = "clone"
    _set_targets(gm, replacements)


INTERPOLATIONS: dict[Any, dict[str, Any]] = {
    F.interpolate: {},
    F.upsample: {},
    F.upsample_nearest: {},
    F.upsample_bilinear: {"mode": "bilinear", "align_corners": True},
}
"""Function -> the arguments of `interpolate` that it stands for."""


def keep_interpolation(gm: fx.GraphModule, target: Target, train: bool) -> None:
    """Call ours, in Dynamo's graph, for interpolation. Its gradient is one operator if the target
    has a rule for that."""
    replacements: dict[fx.Node, Callable[..., Any]] = {}
    for function, chosen in INTERPOLATIONS.items():
        for node in gm.graph.find_nodes(op="call_function", target=function):
            given = {**node.kwargs, **chosen}
            mode = node.args[3] if len(node.args) > 3 else given.get("mode", "nearest")
            whole = not train or all(target.rule_kind(op) for op in gradients_of(str(mode)))
            node.kwargs = {**given, "whole_gradient": whole}
            replacements[node] = interpolate
    _set_targets(gm, replacements)


def _set_targets(gm: fx.GraphModule, targets: Mapping[fx.Node, fx.node.Target]) -> None:
    for node, target in targets.items():
        node.target = target
    if targets:
        gm.recompile()
