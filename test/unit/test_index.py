"""Index arithmetic against evaluation at every point, as C++ would evaluate it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from dicp.loop.ir.index import (
    ZERO,
    FloorDiv,
    Index,
    Mod,
    Size,
    Var,
    combine,
    contiguous_strides,
    domain,
    flatten,
    floordiv,
    is_nonnegative,
    is_positive,
    mod,
    normal,
    product,
    quotient,
    variable,
)
from dicp.loop.ir.reshape import refine, reshape_coords
from dicp.torch_private import FloorDiv as SizeFloorDiv

A, B = sympy.symbols("a b", integer=True, positive=True)
Sizes = Mapping[sympy.Symbol, int]
settings.register_profile("dicp", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("dicp")


def number(size: Size, sizes: Sizes) -> int:
    return size if isinstance(size, int) else _substituted(size, tuple(sizes.items()))


@cache
def _substituted(size: sympy.Expr, sizes: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    """Kept: an index is evaluated at thousands of points."""
    return int(size.subs(dict(sizes)))


def evaluate(index: Index, point: Sequence[int], sizes: Sizes) -> int:
    """The value of `index` at `point`, with C++'s division, which rounds towards zero."""
    total = number(index.const, sizes)
    for atom, c in index.terms:
        if isinstance(atom, Var):
            value = point[atom.position]
        else:
            assert isinstance(atom, FloorDiv | Mod)
            inner = evaluate(atom.value, point, sizes)
            by = number(atom.divisor, sizes)
            whole = int(inner / by)
            value = whole if isinstance(atom, FloorDiv) else inner - whole * by
        total += number(c, sizes) * value
    return total


def points(shape: Sequence[Size], sizes: Sizes) -> Any:
    return itertools.product(*(range(number(s, sizes)) for s in shape))


SIZES: list[Sizes] = [{A: 1, B: 1}, {A: 2, B: 3}, {A: 5, B: 4}]
shapes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)
symbolic_shapes = st.lists(st.sampled_from([1, 2, 3, A, B, 2 * A, A * B]), min_size=1, max_size=3)


@st.composite
def indices(draw: st.DrawFn, shape: Sequence[Size]) -> Index:
    """A non-negative index over `shape`, some axes walked backwards."""
    parts: list[tuple[Index, Size]] = [(Index(draw(st.integers(0, 9))), 1)]
    for var in domain(shape):
        size = next((a.size for a, _ in var.terms if isinstance(a, Var)), 1)
        if draw(st.booleans()):
            var = combine([(Index(normal(size - 1)), 1), (var, -1)])
        parts.append((var, draw(st.sampled_from([0, 1, 2, 3, 4, 6, 12]))))
    index = combine(parts)
    if draw(st.booleans()):
        divisor = draw(st.sampled_from([2, 3, 4]))
        index = draw(st.sampled_from([floordiv, mod]))(index, divisor)
    return index


@given(st.data(), shapes | symbolic_shapes)
def test_floordiv_and_mod(data: st.DataObject, shape: list[Size]) -> None:
    index = data.draw(indices(shape))
    divisor = data.draw(st.sampled_from([1, 2, 3, 4, 8, 12, A, 2 * B]))
    q, r = floordiv(index, divisor), mod(index, divisor)
    whole = combine([(q, divisor), (r, 1)])
    for sizes in SIZES:
        by = number(divisor, sizes)
        for point in points(shape, sizes):
            value = evaluate(index, point, sizes)
            assert evaluate(q, point, sizes) == value // by, (str(index), str(q))
            assert evaluate(r, point, sizes) == value % by, (str(index), str(r))
            assert evaluate(whole, point, sizes) == value


@given(st.data(), shapes | symbolic_shapes)
def test_substitution_and_maximum(data: st.DataObject, shape: list[Size]) -> None:
    index = data.draw(indices(shape))
    old = domain(shape)
    # Each variable becomes its mirror image.
    mapping = {
        atom: combine([(Index(normal(atom.size - 1)), 1), (v, -1)])
        for v in old for atom, _ in v.terms if isinstance(atom, Var)
    }  # fmt: skip
    moved = index.substitute(mapping)
    for sizes in SIZES:
        ends = [number(s, sizes) - 1 for s in shape]
        top = index.maximum()
        for point in points(shape, sizes):
            mirrored = [e - p for e, p in zip(ends, point, strict=True)]
            value = evaluate(index, mirrored, sizes)
            assert evaluate(moved, point, sizes) == value
            assert top is None or value <= number(top, sizes)


@st.composite
def shape_pairs(draw: st.DrawFn, factors: Sequence[Any]) -> tuple[list[Size], list[Size]]:
    """Two shapes with the same number of elements: one row of factors grouped in two ways."""
    row = draw(st.lists(st.sampled_from(factors), min_size=1, max_size=5))

    def grouped() -> list[Size]:
        splits = draw(st.sets(st.integers(1, len(row)), max_size=3))
        ends = [0, *sorted(splits), len(row)]
        shape = [product(row[a:b]) for a, b in itertools.pairwise(ends)]
        for at in sorted(draw(st.sets(st.integers(0, len(shape)), max_size=2)), reverse=True):
            shape.insert(at, 1)
        return shape

    return grouped(), grouped()


def offset(coords: Sequence[int], shape: Sequence[int]) -> int:
    return sum(c * s for c, s in zip(coords, contiguous_strides(shape), strict=True))


@given(shape_pairs([2, 3, 2, 5]) | shape_pairs([2, 3, A, B]) | shape_pairs([6, 4, 9]))
def test_reshape_coordinates(pair: tuple[list[Size], list[Size]]) -> None:
    old, new = pair
    coords = reshape_coords(domain(new), old, new)
    assert len(coords) == len(old)
    for sizes in SIZES[1:]:
        numbers = [number(s, sizes) for s in old]
        if math.prod(numbers) > 4000:
            continue
        for flat, point in enumerate(points(new, sizes)):
            place = [evaluate(c, point, sizes) for c in coords]
            assert offset(place, numbers) == flat
            assert all(0 <= c < n for c, n in zip(place, numbers, strict=True))


@given(st.data(), shape_pairs([2, 3, 2, 5]) | shape_pairs([2, 3, A, B]))
def test_reshape_of_a_fixed_element(
    data: st.DataObject, pair: tuple[list[Size], list[Size]]
) -> None:
    old, new = pair
    mirrored = [
        combine([(Index(normal(s - 1)), 1), (v, -1)]) for s, v in zip(new, domain(new), strict=True)
    ]
    coords = flatten(reshape_coords(mirrored, old, new), contiguous_strides(old))
    sizes = data.draw(st.sampled_from(SIZES))
    count = number(product(new), sizes)
    for flat, point in enumerate(points(new, sizes)):
        assert evaluate(coords, point, sizes) == count - 1 - flat


@given(shape_pairs([2, 3, 2, 5]) | shape_pairs([2, 3, A, B]) | st.tuples(shapes, shapes))
def test_refine_splits_both_shapes(pair: tuple[list[Size], list[Size]]) -> None:
    a, b = pair
    patchify = refine(a, b)
    if patchify is None:
        return
    assert product(size for size, _, _ in patchify) == product(a) == product(b)
    for side, shape in ((1, a), (2, b)):
        owners = [piece[side] for piece in patchify]
        assert owners == sorted(owners), "row-major order"
        for axis, size in enumerate(shape):
            assert size == 1 or product(p[0] for p in patchify if p[side] == axis) == size


def test_refine_finds_the_coarsest_split() -> None:
    assert refine((4, 6), (24,)) == [(4, 0, 0), (6, 1, 0)]
    assert refine((A, 2 * B), (2 * A * B,)) == [(A, 0, 0), (2 * B, 1, 0)]
    assert refine((4, 6), (6, 4)) is None
    assert refine((), (1, 1)) == []


@given(st.lists(st.tuples(st.integers(-3, 5), st.sampled_from([1, A, B, A * B])), max_size=4))
def test_positive_means_positive_everywhere(terms: list[tuple[int, Size]]) -> None:
    value = normal(sum(c * s for c, s in terms))
    if is_positive(value):
        assert all(number(value, sizes) > 0 for sizes in SIZES)


ANY = sympy.Symbol("i", integer=True)
SIGNED = {
    ANY: (-3, -1, 0, 1, 5),
    sympy.Symbol("n", integer=True, nonnegative=True): (0, 1, 4),
    sympy.Symbol("m", integer=True, negative=True): (-4, -1),
    A: (1, 2, 6),
}
"""Symbols of every sign, and some of the integers that they may be."""
linear = st.lists(st.integers(-3, 3), min_size=5, max_size=5)


@given(linear)
def test_bounds_hold_for_symbols_of_every_sign(factors: list[int]) -> None:
    value = normal(factors[0] + sum(f * s for f, s in zip(factors[1:], SIGNED, strict=True)))
    found = [
        sum(map(operator.mul, factors, (1, *point)))
        for point in itertools.product(*SIGNED.values())
    ]
    assert min(found) > 0 or not is_positive(value)
    assert min(found) >= 0 or not is_nonnegative(value)


def test_bounds_are_found_where_signs_are_known() -> None:
    _, n, m, a = SIGNED
    assert is_positive(2 * a + n - m - 2)
    assert is_nonnegative(n * a + n) and not is_positive(n)
    assert not is_nonnegative(ANY) and not is_nonnegative(a + ANY)


def test_nothing_of_unknown_sign_is_taken_for_small() -> None:
    v = variable(Var(0, 4))
    assert mod(v + ANY, 8) != v + ANY
    assert floordiv(v + ANY, 8) != ZERO
    assert (v * ANY).maximum() is None


def test_quotients_are_exact_or_none() -> None:
    assert quotient(12, 4) == 3
    assert quotient(13, 4) is None
    assert quotient(6 * A * B, 2 * A) == 3 * B
    assert quotient(A + 1, A) is None
    assert quotient(A * B + A, A) == B + 1
    assert quotient(0, A) == 0
    assert quotient(A, 2) is None
    half = SizeFloorDiv(A - 1, 2)
    assert quotient(normal(B * (half + 1) * 6), normal(2 * half + 2)) == 3 * B
    assert quotient(half, 2) is None
    assert quotient(A, half) is None
    assert quotient(normal(A * SizeFloorDiv(half, 3)), A) == SizeFloorDiv(half, 3)


def test_parts_of_a_quotient_join_again() -> None:
    v = variable(Var(0, 60))
    for shift in (0, 1, 5):
        x = v + shift
        joined = combine([(floordiv(x, 7), 7), (mod(x, 7), 1)])
        assert joined == x, "the constant inside must survive"


def test_a_quotient_reduced_by_a_common_factor_joins_its_remainder() -> None:
    (v,) = domain((A * 5,))
    assert combine([(floordiv(v * 2, 10), B * 10), (mod(v * 2, 10), B)]) == v * (B * 2)


HALVES = (A, normal(SizeFloorDiv(A, 2) + 1), normal(SizeFloorDiv(B - 1, 2) + 1), 5)


@pytest.mark.parametrize(
    "old", [(2, 28, 28, 64), (2, 4, 4, 7, 7, 64), (A, 3, B, 5), HALVES], ids=str
)
def test_an_offset_in_merged_axes_needs_no_division(old: tuple[Size, ...]) -> None:
    new = (product(old[:-1]), old[-1])
    there = flatten(reshape_coords(domain(new), old, new), contiguous_strides(old))
    assert there == flatten(domain(new), contiguous_strides(new))


@pytest.mark.parametrize(("index", "divisor"), [(ZERO, 3), (variable(Var(0, 3)), 3)])
def test_small_values_need_no_division(index: Index, divisor: int) -> None:
    assert floordiv(index, divisor) == ZERO
    assert mod(index, divisor) == index


def test_text() -> None:
    i, j = domain((4, A))
    assert str(flatten([i, j], (A, 1), 2)) == "a*v0 + v1 + 2"
    assert str(mod(i * 3, 4)) == "(3*v0%4)"
    assert str(ZERO) == "0"


class _Printed(sympy.Function):
    """A size that counts how often its text is made."""

    is_integer = is_positive = True
    times = 0

    def _sympystr(self, printer: Any) -> str:
        _Printed.times += 1
        return f"printed_{printer.doprint(self.args[0])}"


def test_a_symbolic_divisor_is_printed_once() -> None:
    """Sizes of padded windows are printed in milliseconds, and indices are sorted by their text."""
    x, size = Index(0, ((Var(0, A), 1),)), _Printed(A)
    parts = [(floordiv(x, size), 3), (mod(x, size), 5)]
    _Printed.times = 0
    for _ in range(20):
        combine(parts)
    assert _Printed.times <= 1
