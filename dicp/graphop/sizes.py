"""Sizes in generated text: numbers, or expressions over symbols that are replaced per set of
sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dicp.graphop.assemble import plain_size

_OPEN, _CLOSE = "\x01", "\x02"
"""Delimiters of an expression of sizes in a source text."""


def size_text(size: Any) -> str:
    """A size as text; a symbolic one is an expression for `at_sizes` to replace."""
    return str(size) if isinstance(size, int) else f"{_OPEN}{plain_size(size)}{_CLOSE}"


def at_sizes(text: str, size: Callable[[str], int]) -> str:
    """A source text with every expression replaced by its number."""
    return re.sub(f"{_OPEN}(.*?){_CLOSE}", lambda found: str(size(found[1])), text)
