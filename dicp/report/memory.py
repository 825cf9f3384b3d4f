"""Memory over a run: the bytes alive at each step, by where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLACES = ("caller", "constant", "workspace", "allocation", "call", "vendor")
"""As in `dicp.outline.MemoryOwner`, in the order of the chart from the bottom up."""


def memory_over_run(tensors: Sequence[Mapping[str, Any]], steps: int) -> dict[str, list[int]]:
    """By place, the bytes of tensors that are alive at each of `steps` steps."""
    change = {place: [0] * (steps + 1) for place in PLACES}
    for tensor in tensors:
        row = change[tensor["place"]]
        first, last = max(tensor["first"], 0), min(tensor["last"], steps - 1)
        if first <= last:
            row[first] += tensor["nbytes"]
            row[last + 1] -= tensor["nbytes"]
    found = {}
    for place, row in change.items():
        alive, values = 0, []
        for step in range(steps):
            alive += row[step]
            values.append(alive)
        if any(values):
            found[place] = values
    return found
