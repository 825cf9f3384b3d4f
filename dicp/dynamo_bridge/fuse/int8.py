"""A product of signed bytes that a program computes with unsigned ones.

Products of bytes multiply unsigned by signed numbers fastest on some processors, so torchao adds
128 to the activations and subtracts 128 times the sums of the weights' columns. With one row, these
sums read as many bytes as the product: without them it takes 0.53 to 0.58 of the time (512x2048 to
4096x1024 weights, AMD EPYC with AVX512-VNNI, one thread). With more rows it takes 0.75 to 1.4. Tile
registers multiply signed numbers as fast as unsigned ones.
"""

from __future__ import annotations

import torch

from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.dynamo_bridge.fuse.engine import Pattern, Rewriter
from dicp.dynamo_bridge.fuse.terms import Match, Term, one_of, op
from dicp.dynamo_bridge.passes.base import PassContext

aten = torch.ops.aten


def _to(x: Term, dtype: torch.dtype) -> Term:
    convert = torch.ops.prims.convert_element_type.default
    return one_of(op(aten._to_copy.default, x, dtype=dtype), op(convert, x, dtype))


def signed_product(a: Term, b: Term) -> Term:
    # (a + 128) b - 128 sum(b, 0)
    shifted = _to(op(aten.add.Tensor, _to(a, torch.int32), 128), torch.uint8)
    sums = op(aten.sum.dim_IntList, b, [0], True, dtype=torch.int32)
    product = op(aten._int_mm.default, shifted, b)
    return op(aten.sub.Tensor, product, op(aten.mul.Tensor, sums, 128))


def _applies(match: Match, context: PassContext) -> bool:
    """Signed bytes, and one row of activations unless the target takes any number."""
    a, b = value_of(match["a"]), value_of(match["b"])
    fast = context.facts.fast_signed_int8 or sizes_of(match["a"])[:1] == (1,)  # type: ignore[index]
    return a.dtype == b.dtype == torch.int8 and fast


def _replace(rw: Rewriter, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
    return rw(aten._int_mm.default, a, b)


PATTERNS = (
    Pattern("int8", "signed", signed_product, _replace, _applies,
            (frozenset({aten._int_mm.default}),)),
)  # fmt: skip
