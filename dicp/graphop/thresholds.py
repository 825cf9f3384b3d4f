"""The limits of caches and analyses of graph-operator programs. None depends on a machine."""

from __future__ import annotations

MAX_PLANS = 64
"""Most combinations of sizes whose execution plan is cached; the oldest is planned again."""
MAX_PADDED = 64
"""How many sets of padded sizes have their compiled graphs cached; the least recently used are
dropped."""
CONSTANT_ELEMENTS = 1 << 20
"""Constants of more elements are not searched for their least and greatest number."""
DEEPEST = 100
"""The longest chain of operators that is followed to find a range: each is a recursive call."""
