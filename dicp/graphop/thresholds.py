"""The limits of what graphs of vendors' operators keep and analyze."""

from __future__ import annotations

MAX_PLANS = 64
"""Most combinations of sizes whose execution plan is kept; the oldest is planned again."""
MOST_PADDED = 64
"""How many sets of padded sizes keep their compiled graphs; the least recently used are dropped."""
CONSTANT_ELEMENTS = 1 << 20
"""Constants of more elements are not searched for their least and greatest number."""
DEEPEST = 100
"""How many operators on end are followed to find a range: each is a call of Python."""
