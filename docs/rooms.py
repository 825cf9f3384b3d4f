"""Draws the rooms of the package from its imports: `python docs/rooms.py` rewrites architecture.md.

A room is a module or folder of `dicp`, a vendor one of its own; an arrow is an import. Arrows that
longer ways imply are left out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = re.compile(r"(?<=<!-- rooms -->\n).*?(?=<!-- end -->)", re.S)
BELOW = {
    "errors", "config", "version", "torch_private", "serialize", "origin", "operators", "rules",
    "template", "explain", "__init__", "__main__",
}  # fmt: skip
"""Modules that nearly every room imports, or that only print: a picture with them says less."""


def room_of(parts: tuple[str, ...]) -> str:
    depth = 2 if parts[0] == "vendor" and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dicp."):
            names = [(*node.module.split("."), alias.name) for alias in node.names]  # type: ignore[union-attr]
            found |= {room_of(name[1:]) for name in names}
    return found


def edges() -> set[tuple[str, str]]:
    """Every (importing room, imported room)."""
    found = set()
    for path in (ROOT / "dicp").rglob("*.py"):
        source = room_of(path.relative_to(ROOT / "dicp").with_suffix("").parts)
        found |= {(source, target) for target in imports(path)}
    return {(a, b) for a, b in found if a != b and not BELOW & {a, b}}


def reduced(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""
    after: dict[str, set[str]] = {}
    for a, b in arrows:
        after.setdefault(a, set()).add(b)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        pending = [start]
        while pending:
            new = after.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        return seen

    implied = {(a, c) for a in after for b in after[a] for c in reach(b)}
    return sorted(arrows - implied)


def picture() -> str:
    """The rooms as a Mermaid diagram."""
    lines = [f"    {a.replace('/', '_')}[{a}] --> {b.replace('/', '_')}[{b}]"
             for a, b in reduced(edges())]  # fmt: skip
    return "\n".join(["```mermaid", "graph TD", *lines, "```", ""])


def page() -> str:
    """The page with the picture as the code has it now."""
    return PICTURE.sub(lambda _: picture(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
