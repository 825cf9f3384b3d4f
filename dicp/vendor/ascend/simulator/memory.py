"""Who may write to an input's memory: the order of reads and writes in a compiled graph.

A device runs operators in any order that their operands and control edges allow. What reads an
input must be sure to run before what writes to its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dicp.graphop.interpreter import Call, Source
from dicp.vendor.ascend.prototypes import ALIASES, POINTWISE


class Order:
    """Reads, writes and precedence among the calls of one graph, by position."""

    def __init__(self, calls: Sequence[object], controls: Mapping[int, Sequence[int]]) -> None:
        self.calls = calls
        self.readers: dict[Source, list[int]] = {}
        self.before: list[int] = []
        """For each call, a set of positions as bits: it, and what is sure to run before it."""
        self.needs: list[int] = []
        """The same by operands alone."""
        for place, call in enumerate(calls):
            sources = sources_of(call) if isinstance(call, Call) else []
            for source in sources:
                self.readers.setdefault(source, []).append(place)
            earlier = own = 1 << place
            for position in [s[0] for s in sources]:
                earlier |= self.before[position]
                own |= self.needs[position]
            for position in controls.get(place, ()):
                earlier |= self.before[position]
            self.before.append(earlier)
            self.needs.append(own)

    def memory(self, source: Source) -> Source:
        """The value whose memory `source` shows."""
        call = self.calls[source[0]]
        while isinstance(call, Call) and call.prototype.kind in ALIASES:
            source = sources_of(call)[0]
            call = self.calls[source[0]]
        return source

    def shown(self, source: Source) -> list[Source]:
        """`source` and the values that show its memory."""
        found = [source]
        for place in self.readers.get(source, []):
            call = self.calls[place]
            assert isinstance(call, Call)
            if call.prototype.kind in ALIASES and sources_of(call)[0] == source:
                found += self.shown((place, 0))
        return found

    def late_reader(self, source: Source, writer: int) -> Call | None:
        """A call that reads this memory and may run after `writer`, or None."""
        for value in self.shown(source):
            for place in self.readers.get(value, []):
                call = self.calls[place]
                assert isinstance(call, Call)
                alias = call.prototype.kind in ALIASES
                if not alias and place != writer and not self.before[writer] >> place & 1:
                    return call
        return None

    def mixing(self, source: Source, writer: int) -> Call | None:
        """A call on a way from this memory to `writer` that is not elementwise, or None."""
        reached = {source[0]}
        for place, call in enumerate(self.calls[: writer + 1]):
            if not isinstance(call, Call) or not self.needs[writer] >> place & 1:
                continue
            if reached.isdisjoint(s[0] for s in sources_of(call)):
                continue
            reached.add(place)
            if call.prototype.kind not in POINTWISE | ALIASES:
                return call
        return None


def sources_of(call: Call) -> list[Source]:
    """Every value a call reads, in port order."""
    found: list[Source] = []
    for source in call.sources:
        found += source if isinstance(source, list) else [source] if source is not None else []
    return found
