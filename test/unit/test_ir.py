"""Loop expressions: folding, rewriting, text."""

from __future__ import annotations

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Ref, Rewriter
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import Index, Indirect, Var, domain, variable
from dicp.origin import Origin

F32, I64, BF16 = torch.float32, torch.int64, torch.bfloat16


def tensor(name: str, *shape: int, dtype: torch.dtype = F32) -> Ref:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Ref(name, shape, dtype, tuple(strides[: len(shape)]), "input")


def test_constants_are_converted_when_built() -> None:
    assert ir.cast(ir.const(3.9, F32), I64).value == 3
    assert ir.cast(ir.const(300, I64), torch.uint8).value == 44, "wraps as PyTorch does"
    assert ir.cast(ir.const(0.5, F32), torch.bool).value is True
    assert ir.cast(ir.const(0.1, F32), BF16).value == 0.10009765625
    assert ir.cast(ir.const(0.1, F32), torch.float64).value == torch.tensor(0.1).double()
    assert ir.cast(ir.const(-1, torch.uint8), I64).value == 255
    assert ir.cast(ir.const(1e10, F32), torch.int32).op == "cast", "left to the machine"


def test_operands_in_sixteen_bits_keep_their_digits_and_elements_are_rounded() -> None:
    assert ir.const(0.1, BF16).value == torch.tensor(0.1).item()
    assert ir.as_stored(ir.const(0.1, BF16)).value == 0.10009765625
    assert ir.as_stored(ir.const(1e-10, torch.float16)).value == 0


def test_arithmetic_in_sixteen_bits_is_not_rounded_in_between() -> None:
    x = ir.load(tensor("x", 4), domain((4,)))
    assert ir.opmath(x, BF16).op == "widen"
    assert ir.opmath(x, F32) is x


def test_walk_visits_shared_nodes_once_and_operands_first() -> None:
    x = ir.load(tensor("x", 4), domain((4,)))
    square = x * x
    total = square + square
    order = list(ir.walk(total))
    assert order == [x, square, total]


def test_rewriting_keeps_sharing_and_what_does_not_change() -> None:
    x = ir.load(tensor("x", 4), domain((4,)))
    kept = ir.const(1.0, F32) + ir.const(2.0, F32)
    shared = x * kept
    moved = Rewriter({Var(0, 4): Index(2)})(shared + shared)
    left, right = moved.args
    assert left is right
    assert left.args[1] is kept
    assert left.args[0].coords == (Index(2),)


def test_loads_inside_coordinates_are_seen() -> None:
    at = tensor("at", 3, dtype=I64)
    table = tensor("table", 9)
    place = Index(0, ((Indirect(ir.load(at, domain((3,))), 9), 1),))
    body = ir.load(table, [place])
    assert [item.ref.name for item in ir.loads(body)] == ["at", "table"]
    compute = Compute(tensor("out", 3), (3,), body)
    assert {r.name for r in compute.reads()} == {"at", "table"}
    assert ir.show(body) == "table[[at[v0]]]"


def test_origin_is_noted_on_what_may_raise() -> None:
    x = ir.load(tensor("x", 4, dtype=I64), domain((4,)))
    quotient = ir.apply("floor_div", I64, x, x)
    first, second = (Origin(n, "aten.div", f"model.py:{n}") for n in ("1", "2"))
    noted = ir.with_origin(quotient + quotient, first)
    assert noted.args[0] is noted.args[1]
    assert noted.args[0].origin is first
    assert ir.with_origin(noted, second) is noted, "the first one made it"


def test_text() -> None:
    i, j = domain((4, 6))
    x = tensor("x", 4, 6)
    body = ir.cast(ir.load(x, [i, j]) * 2.0 + ir.index_value(variable(Var(0, 4)), F32), I64)
    assert ir.show(body) == "cast.int64(add(mul(x[v0, v1], 2.0), cast.float32(index(v0))))"


def test_a_node_of_a_shared_graph_is_shown_in_few_words() -> None:
    """pytest and debuggers show the arguments of every frame."""
    total = ir.load(tensor("x", 4), (variable(Var(0, 4)),))
    for _ in range(60):
        total = total + total
    assert len(repr(total)) < 200
