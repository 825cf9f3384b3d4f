"""How far indices reach: 32 bits hold them, except where sizes need more.

Sums may wrap around on the way to a place in memory, since they come back. What is divided, and
what becomes a value of its own, may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from dicp.loop.ir.index import Atom, FloorDiv, Index, Mod, Size, normal
from dicp.serialize import evaluate_size

NARROW_LIMIT = 2**31 - 2**20
"""Indices below this have room for the last block to reach past the end."""


def reach(index: Index) -> Size:
    """No part of `index` is further from zero than this."""
    total = _magnitude(index.const)
    for atom, c in index.terms:
        total = total + _magnitude(c) * _largest(atom)
    return normal(total)


def _magnitude(size: Size) -> Size:
    return abs(size) if isinstance(size, int) else sympy.Abs(size)


def _largest(atom: Atom) -> Size:
    if isinstance(atom, Mod):
        return atom.divisor
    if isinstance(atom, FloorDiv):
        top = reach(atom.value)
        exact = isinstance(top, int) and isinstance(atom.divisor, int)
        return top // atom.divisor if exact else top
    return atom.size


def needs_wide(
    step: Mapping[str, Any], symbols: Mapping[str, int], extents: Iterable[int] = ()
) -> bool:
    """Whether a launch over tensors of these extents takes indices of 64 bits.

    Raises NameError where `symbols` lacks a size.
    """
    launch = step["launch"]
    axes = [evaluate_size(axis["size"], symbols) for axis in launch["axes"].values()]
    given = [evaluate_size(s, symbols) for s in (*step["symbols"], *launch["reaches"])]
    return max([*map(abs, given), math.prod(axes), *extents], default=0) >= NARROW_LIMIT
