"""Rewrites among GE operators, in one pass: by operator, what stands for its results."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.partition import remove_dead
from dicp.graphop.program import Item, Node
from dicp.graphop.rewrite import Rewrite, Rewritten, rewritten
from dicp.vendor.ascend.fuse.attention import KINDS, heads_last
from dicp.vendor.ascend.fuse.gate import swish_gate, swish_gate_grad
from dicp.vendor.ascend.fuse.moves import (
    BROADCASTING,
    FLAGS,
    elementwise,
    identity,
    matrix_product,
    reshape,
    transpose,
)
from dicp.vendor.ascend.fuse.norm import layer_norm, rms_norm, without_unread_sums
from dicp.vendor.ascend.fuse.repeat import repeat_interleave
from dicp.vendor.ascend.fuse.rotary import rotary
from dicp.vendor.ascend.fuse.scale import attention_scale, twice


def first_of(*rewrites: Rewrite) -> Rewrite:
    """The first rewrite that applies."""

    def rewrite(g: Builder, node: Node) -> Rewritten:
        found = (apply(g, node) for apply in rewrites)
        return next((new for new in found if new is not None), None)

    return rewrite


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(FLAGS, matrix_product),
    "Transpose": transpose,
    "Reshape": first_of(reshape, repeat_interleave),
    "Identity": identity,
    **dict.fromkeys(BROADCASTING, elementwise),
    "Add": first_of(rotary, elementwise),
    "Mul": first_of(swish_gate, twice, elementwise),
    "RealDiv": first_of(twice, elementwise),
    "ConcatD": swish_gate_grad,
    "RmsNorm": rms_norm,
    "LayerNormV4": layer_norm,
    **dict.fromkeys(KINDS, first_of(attention_scale, heads_last)),
}


def fuse(builder: Builder, items: Sequence[Item], outputs: Sequence[object]) -> list[Item]:
    """`items` rewritten, twice: what one pass makes may be what another rewrite looks for."""
    for _ in range(2):
        items = remove_dead(rewritten(builder, items, REWRITES), outputs)
    return without_unread_sums(items)
