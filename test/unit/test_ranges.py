"""Loops split where conditions on their variable change."""

from __future__ import annotations

import itertools

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Read, Ref
from dicp.loop.ir.index import Index, Indirect, Size, Var, floordiv, mod, variable
from dicp.loop.ir.kernel import Store
from dicp.loop.passes.split_loops import sorted_sizes, split

V = Var(0, 16)
OUT = Ref("out", (16,), torch.float32, (1,), "temp")


def index(value: Index | int) -> Expr:
    return ir.index_value(value if isinstance(value, Index) else Index(value))


def compare(op: str, at: Size | Index, var: Var = V) -> Expr:
    return ir.apply(op, torch.bool, index(variable(var)), index(at))


def choose(test: Expr) -> Store:
    value = ir.apply(
        "where", torch.float32, test, ir.const(1, torch.float32), ir.const(2, torch.float32)
    )
    return Store(OUT, variable(V), value)


def values(store: Store, var: Var = V) -> list[tuple[Size, Size, float]]:
    return [(r.low, r.high, r.stmts[0].value.value) for r in split((store,), var)]


def test_every_comparison() -> None:
    assert values(choose(compare("lt", 5))) == [(0, 5, 1), (5, 16, 2)]
    assert values(choose(compare("le", 5))) == [(0, 6, 1), (6, 16, 2)]
    assert values(choose(compare("gt", 5))) == [(0, 6, 2), (6, 16, 1)]
    assert values(choose(compare("ge", 5))) == [(0, 5, 2), (5, 16, 1)]


def test_falling_indices() -> None:
    mirrored = ir.apply("lt", torch.bool, index(variable(V) * -1 + 15), index(5))
    assert values(choose(mirrored)) == [(0, 11, 2), (11, 16, 1)]


def test_conditions_that_never_change_are_folded() -> None:
    assert values(choose(compare("lt", 16))) == [(0, 16, 1)]
    assert values(choose(compare("ge", 0))) == [(0, 16, 1)]
    assert values(choose(compare("lt", -3))) == [(0, 16, 2)]
    assert values(choose(compare("gt", 40))) == [(0, 16, 2)]


def concatenation(var: Var) -> Store:
    """Tensors of 4 elements along `var`, as nested selects."""
    sources = [Ref(f"in{at}", (4,), torch.float32, (1,), "input") for at in range(0, var.size, 4)]
    reads = [ir.read(source, variable(var) + -4 * k) for k, source in enumerate(sources)]
    value = reads[-1]
    for k in reversed(range(len(reads) - 1)):
        before_end = compare("lt", 4 * (k + 1), var)
        value = ir.apply("where", torch.float32, before_end, reads[k], value)
    return Store(OUT, variable(var), value)


def test_a_concatenation_of_many_tensors_is_one_copy_of_each() -> None:
    var = Var(0, 160)
    parts = split((concatenation(var),), var)
    assert [(r.low, r.high) for r in parts] == [(at, at + 4) for at in range(0, 160, 4)]
    assert all(isinstance(r.stmts[0].value, Read) for r in parts)


def test_many_parts_that_are_as_long_as_the_loop_are_no_parts() -> None:
    var = Var(0, 96)
    joined = concatenation(var)
    value = joined.value
    for _ in range(100):
        value = ir.apply("sin", torch.float32, value)
    assert len(split((joined,), var)) == 24
    assert len(split((Store(OUT, joined.index, value),), var)) == 1


def test_conjunctions_and_masks() -> None:
    inside = ir.apply("bitwise_and", torch.bool, compare("ge", 4), compare("lt", 8))
    source = Ref("in0", (16,), torch.float32, (1,), "input")
    read = ir.read(source, variable(V))
    parts = split((Store(OUT, variable(V), ir.masked(inside, read)),), V)
    assert [(p.low, p.high) for p in parts] == [(0, 4), (4, 8), (8, 16)]
    assert [p.stmts[0].value.op for p in parts] == ["const", "read", "const"]


def test_strided_indices() -> None:
    doubled = variable(V) * 2
    assert values(choose(ir.apply("lt", torch.bool, index(doubled + -1), index(8)))) == [
        (0, 5, 1), (5, 16, 2)
    ]  # fmt: skip
    falling = ir.apply("le", torch.bool, index(doubled * -1), index(-7))
    assert values(choose(falling)) == [(0, 4, 2), (4, 16, 1)]


def test_clamped_places_become_plain_ones() -> None:
    source = Ref("in0", (32,), torch.float32, (1,), "input")
    low = ir.apply("maximum", torch.int64, index(variable(V) * 2 + -1), index(0))
    clamped = ir.apply("minimum", torch.int64, low, ir.const(31, torch.int64))
    place = Index(0, ((Indirect(clamped, 32), 1),))
    read = ir.read(source, place)
    first, rest = split((Store(OUT, variable(V), read),), V)
    assert (first.low, first.high) == (0, 1)
    assert str(first.stmts[0].value.index) == "0"
    assert str(rest.stmts[0].value.index) == "2*v0 + -1"


def test_symbolic_sizes_split_where_their_order_is_provable() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    var = Var(0, a + b)
    store = choose(compare("lt", a, var))
    assert values(store, var) == [(0, a, 1), (a, a + b, 2)]
    unknown = Var(0, b)
    (whole,) = split((choose(compare("lt", a, unknown)),), unknown)
    assert whole.stmts[0].value.op == "where"


def test_a_step_before_a_part_that_begins_at_a_symbol_has_been_reached() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    var = Var(0, a + b)
    raised = ir.apply("maximum", torch.int64, index(variable(var)), index(Index(a)))
    first, rest = split((choose(ir.apply("lt", torch.bool, raised, index(1))),), var)
    assert (rest.low, rest.high) == (a, a + b)
    assert rest.stmts[0].value.value == 2  # a is 1 at least, and nothing from there on less than 1


def test_sizes_are_sorted_alike_in_any_order() -> None:
    """A size that may be 0 is not provably below 0 nor above it, but at least 0."""
    n, m = sympy.symbols("n m", integer=True, nonnegative=True)
    for order in itertools.permutations([0, n, n + 1, 2 * n + 1]):
        assert sorted_sizes(order) == [0, n, n + 1, 2 * n + 1]
        assert sorted_sizes([*order, m]) is None


def test_a_symbol_of_any_sign_splits_nothing() -> None:
    below, above = sympy.Symbol("i", integer=True), sympy.Symbol("j", integer=True, negative=True)
    (whole,) = split((choose(compare("lt", below)),), V)
    assert whole.stmts[0].value.op == "where"
    assert values(choose(compare("lt", above))) == [(0, 16, 2)]


def test_conditions_on_other_loops_stay() -> None:
    other = Var(1, 8)
    store = choose(compare("lt", variable(other)))
    (whole,) = split((store,), V)
    assert whole.stmts == (store,)


def test_quotients_and_remainders() -> None:
    """x[(v + 9) % 16] is x[v + 9] below 7, and x[v - 7] from there on."""
    source = Ref("in0", (16,), torch.float32, (1,), "input")
    for moved in (mod, floordiv):
        place = moved(variable(V) + 9, 16)
        first, second = split((Store(OUT, variable(V), ir.read(source, place)),), V)
        assert (first.low, first.high, second.low, second.high) == (0, 7, 7, 16)
        places = [r.stmts[0].value.index for r in (first, second)]
        own = [variable(V) + 9, variable(V) + -7] if moved is mod else [Index(0), Index(1)]
        assert places == own


def test_dynamic_remainders() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    var, source = Var(0, n + 3), Ref("in0", (n + 3,), torch.float32, (1,), "input")
    read = ir.read(source, mod(variable(var) + n, n + 3))
    first, second = split((Store(OUT, variable(var), read),), var)
    assert (first.low, first.high, second.low, second.high) == (0, 3, 3, n + 3)
    assert second.stmts[0].value.index == variable(var) + -3


def test_many_wraps_stay_remainders() -> None:
    source = Ref("in0", (3,), torch.float32, (1,), "input")
    store = Store(OUT, variable(V), ir.read(source, mod(variable(V), 3)))
    assert len(split((store,), V)) <= 8
    long = Var(0, 1000)
    store = Store(OUT, variable(long), ir.read(source, mod(variable(long), 3)))
    assert [(r.low, r.high) for r in split((store,), long)] == [(0, 1000)]
