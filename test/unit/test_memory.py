"""Workspace plans: buffers alive together never overlap, and sharing never costs memory."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dicp.loop.schedule.memory import ALIGNMENT, Lifetime, plan


@st.composite
def lifetimes(draw: st.DrawFn) -> list[Lifetime]:
    spans = draw(
        st.lists(
            st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)), max_size=14
        )
    )
    return [Lifetime(k, size, start, start + n) for k, (size, start, n) in enumerate(spans)]


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@settings(deadline=None, derandomize=True, max_examples=300)
@given(lifetimes())
def test_plan(items: list[Lifetime]) -> None:
    made = plan(items)
    assert set(made.offsets) == {item.key for item in items}
    for item in items:
        assert made.offsets[item.key] % ALIGNMENT == 0
        assert 0 <= made.offsets[item.key] <= made.total - item.size
    for a, b in itertools.combinations(items, 2):
        if a.start <= b.end and b.start <= a.end and a.size and b.size:
            low, high = sorted((a, b), key=lambda x: made.offsets[x.key])
            assert made.offsets[low.key] + low.size <= made.offsets[high.key]
    assert made.total <= sum(rounded(item.size) for item in items)
    steps = range(20)
    alive = [sum(rounded(i.size) for i in items if i.start <= s <= i.end) for s in steps]
    assert made.total >= max(alive, default=0), "no plan can be smaller than what is alive at once"


def test_a_chain_needs_two_buffers() -> None:
    chain = [Lifetime(k, 1000, k, k + 1) for k in range(10)]
    assert plan(chain).total == 2 * rounded(1000)


def test_nothing_to_plan() -> None:
    assert plan([]).total == 0
