"""Graph-level fusion: families of patterns, each in a file of its own, and the pass that runs them.

A family applies where the target's facts name it, attention where they state its operators. To add
a family, write its file and list it here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from dicp import operators
from dicp.dynamo_bridge.attention import matcher
from dicp.dynamo_bridge.fuse import conv_bn, cross_entropy, gelu, int8, linear, norm
from dicp.dynamo_bridge.fuse.engine import Pattern, apply_patterns
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead
from dicp.target import Target

aten = torch.ops.aten
STAGES: tuple[tuple[Pattern, ...], ...] = (
    (*matcher.PATTERNS, *norm.PATTERNS, *gelu.PATTERNS, *cross_entropy.PATTERNS,
     *conv_bn.PATTERNS, *int8.PATTERNS),
    linear.PATTERNS,
)  # fmt: skip
"""All patterns, by pass over the graph: linear is second because it may end in a fused GELU."""

FAMILIES = frozenset(p.family for stage in STAGES for p in stage) - {matcher.FAMILY}
"""What `Facts.fusions` may name. Attention is fused where `Facts.attention` states how."""
OPERATORS = {
    "layer_norm": aten.native_layer_norm.default, "rms_norm": aten._fused_rms_norm.default,
    "gelu": aten.gelu.default, "linear": operators.linear,
}  # fmt: skip
"""Family -> the operator that it puts into graphs, where that is one of its own."""


def fusion_problems(target: Target) -> Iterator[str]:
    """What is wrong with the fusions that a target's facts ask for."""
    facts = target.facts
    wanted = facts.fusions | facts.frozen_fusions
    unknown = sorted(wanted - FAMILIES)
    if unknown:
        hint = "; attention is stated by Facts.attention" if matcher.FAMILY in unknown else ""
        yield f"it wants fusions {unknown}, which are none of {sorted(FAMILIES)}{hint}"
    for family in sorted(wanted & OPERATORS.keys()):
        if target.rule_kind(OPERATORS[family]) is None:
            yield f"it wants the fusion {family!r} and has no rule for {OPERATORS[family]}"
    for device, attention in facts.attention.items():
        if all(target.rule_kind(op) is None for op in attention.operators):
            named = ", ".join(map(str, attention.operators))
            yield f"it states attention on {device!r} and has no rule for {named}"


def fuse(gm: fx.GraphModule, context: PassContext) -> bool:
    """Apply the families the target wants; true if anything was replaced."""
    count = 0
    families = context.facts.fusions
    if context.config.freeze:
        families |= context.facts.frozen_fusions
    if context.facts.attention:
        families |= {matcher.FAMILY}
    for stage in STAGES:
        wanted = [pattern for pattern in stage if pattern.family in families]
        count += apply_patterns(gm, wanted, context) if wanted else 0
    if count:
        remove_dead(gm.graph)
    return count > 0


FUSE = Pass("fuse", fuse)
