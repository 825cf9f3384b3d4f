"""Rewriting a pool: one pass in order, each operator unchanged or replaced by new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dicp.graphop.builder import Builder
from dicp.graphop.program import Item, Node, Result, Value
from dicp.rules import NoRule

Rewritten = Sequence[Value] | Mapping[Value, Value] | None
"""The replacements of a node's results, or of any values from here on; None leaves the node."""

Rewrite = Callable[[Builder, Node], Rewritten]


def rewritten(
    builder: Builder, items: Sequence[Item], rewrites: Mapping[str, Rewrite]
) -> list[Item]:
    """`items` with the rewrites applied by operator; new nodes take the position of the old
    ones."""
    renamed: dict[Value, Value] = {}
    builder.nodes = []
    for item in items:
        if isinstance(item, Node):
            _visit(builder, item, rewrites, renamed)
        elif isinstance(item, Result):
            value = renamed.get(item.value, item.value)
            builder.nodes.append(replace(item, value=value))
        else:
            builder.nodes.append(item)
    return builder.nodes


def _visit(
    builder: Builder, node: Node, rewrites: Mapping[str, Rewrite], renamed: dict[Value, Value]
) -> None:
    node.rename(renamed)
    rewrite = rewrites.get(node.kind)
    builder.origin = node.origin
    try:
        new = rewrite(builder, node) if rewrite else None
    except NoRule:  # an operator that the vendor's installation lacks
        new = None
    if new is None:
        builder.nodes.append(node)
        return
    if not isinstance(new, Mapping):
        new = dict(zip(node.outputs, new, strict=True))
    renamed.update(new)
    for old, value in renamed.items():  # a replacement may itself have been replaced by now
        renamed[old] = new.get(value, value)
