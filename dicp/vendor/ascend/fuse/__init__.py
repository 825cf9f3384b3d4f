"""Rewrites among GE operators, in one walk: by operator, what stands for its results."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.graphop.rewrite import Rewrite
from dicp.vendor.ascend.fuse.attention import KINDS, heads_last
from dicp.vendor.ascend.fuse.gate import swish_gate
from dicp.vendor.ascend.fuse.moves import (
    BROADCASTING,
    FLAGS,
    elementwise,
    identity,
    matrix_product,
    reshape,
    transpose,
)
from dicp.vendor.ascend.fuse.norm import rms_norm
from dicp.vendor.ascend.fuse.rotary import rotary


def add(g: Builder, node: Node) -> Sequence[Value] | None:
    found = rotary(g, node)
    return found if found is not None else elementwise(g, node)


def mul(g: Builder, node: Node) -> Sequence[Value] | None:
    found = swish_gate(g, node)
    return found if found is not None else elementwise(g, node)


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(FLAGS, matrix_product),
    "Transpose": transpose,
    "Reshape": reshape,
    "Identity": identity,
    **dict.fromkeys(BROADCASTING, elementwise),
    "Add": add,
    "Mul": mul,
    "RmsNorm": rms_norm,
    **dict.fromkeys(KINDS, heads_last),
}
