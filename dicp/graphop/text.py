"""Generated text with symbolic sizes: texts and expressions in sequence. Numbers replace the
expressions for each set of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dicp.graphop.assemble import plain_size
from dicp.graphop.program import Node
from dicp.template import one_line


@dataclass(frozen=True)
class Symbolic:
    """A size that only a run knows: an expression over the program's symbols."""

    expression: str


@dataclass(frozen=True)
class Text:
    """Text between the symbolic sizes that it contains."""

    parts: tuple[str | Symbolic, ...]

    @classmethod
    def of(cls, *items: object) -> Text:
        """The items one after the other: texts, sizes, and what `str` writes."""
        parts = (p for item in items for p in (item.parts if isinstance(item, Text) else (item,)))
        merged: list[str | Symbolic] = []
        for is_text, group in groupby(parts, lambda part: not isinstance(part, Symbolic)):
            found: list[Any] = list(group)
            merged += ["".join(map(str, found))] if is_text else found
        return cls(tuple(merged))

    def at(self, size: Callable[[str], int]) -> str:
        """The text with every expression replaced by its number."""
        return "".join(p if isinstance(p, str) else str(size(p.expression)) for p in self.parts)

    def shown(self) -> str:
        """The text for dumps, with expressions in angle brackets."""
        return "".join(p if isinstance(p, str) else f"<{p.expression}>" for p in self.parts)

    def __len__(self) -> int:
        return len(self.shown())

    def encode(self) -> list[Any]:
        return [p if isinstance(p, str) else {"size": p.expression} for p in self.parts]

    @classmethod
    def decode(cls, parts: Sequence[Any]) -> Text:
        return cls(tuple(p if isinstance(p, str) else Symbolic(p["size"]) for p in parts))


def size_part(size: Any) -> str | Symbolic:
    """A size as a part of a text."""
    return str(size) if isinstance(size, int) else Symbolic(str(plain_size(size)))


def joined(separator: str, items: Iterable[object]) -> Text:
    """The items with `separator` between them."""
    parts = [part for item in items for part in (separator, item)]
    return Text.of(*parts[1:])


def size_list(sizes: Iterable[Any], separator: str = ", ") -> Text:
    """Sizes with `separator` between them."""
    return joined(separator, map(size_part, sizes))


def blocks_of(lines: Iterable[tuple[Node, Sequence[str | Text]]]) -> list[dict[str, Any]]:
    """The lines of a graph's nodes in blocks, each after a comment that names its ATen call."""
    return [
        {"comment": comment, "lines": [line for _, own in group for line in own]}
        for comment, group in groupby(lines, lambda item: _comment(item[0]))
    ]


def _comment(node: Node) -> str:
    return one_line(str(node.origin)) if node.origin else ""
