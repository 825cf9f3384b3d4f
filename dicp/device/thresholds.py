"""The limits of what the eager device compiles. None depends on a machine."""

from __future__ import annotations

MAX_VARIANTS = 8
"""Compiled forms of one operator that differ in numbers alone: a program with a new number at
every step would compile at every step."""
FIXED_INTEGERS = 2
"""Compiled forms that differ in integers alone, after which one is compiled for any integers."""
MAX_OPERATORS = 64
"""Operators that an entry of the list of forced fallbacks matches and that are kept whole; an entry
that matches more, such as `.*`, forces their parts."""
