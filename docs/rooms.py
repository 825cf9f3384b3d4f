"""Draws pictures of the code: `python docs/rooms.py` rewrites them in architecture.md and README.

rooms: a room is a module or folder of `dicp`, a vendor one of its own; an arrow is an import.
    Arrows that longer ways imply are left out. README shows the folders alone.
pipeline: the stages that the docstring of compile_fx.py lists.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "architecture.md", ROOT / "README.md", ROOT / "README.zh.md")
PICTURE = re.compile(r"(<!-- (rooms|folders|pipeline) -->\n).*?(?=<!-- end -->)", re.S)
PIPELINE = ROOT / "dicp" / "dynamo_bridge" / "compile_fx.py"
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


def folders() -> set[tuple[str, str]]:
    """The arrows between rooms that are folders, imports through single modules included."""
    after: dict[str, set[str]] = {}
    for a, b in edges():
        after.setdefault(a, set()).add(b)
    found = set()
    for start in filter(is_folder, after):
        pending, seen = list(after[start]), set()
        while pending:
            room = pending.pop()
            if room in seen or room == start:
                continue
            seen.add(room)
            if is_folder(room):
                found.add((start, room))
            else:
                pending += after.get(room, ())
    return found


def is_folder(room: str) -> bool:
    return (ROOT / "dicp" / room).is_dir() or room == "target"


def stages() -> list[tuple[str, str]]:
    """The stages of the pipeline, each with what it does, from the compiler's docstring."""
    text = ast.get_docstring(ast.parse(PIPELINE.read_text())) or ""
    return re.findall(r"^(\w+) {2,}(.*)$", text, re.M)


def drawn(kind: str) -> str:
    """A picture as a Mermaid diagram."""
    if kind == "pipeline":
        found = stages()
        boxes = [f'    {name}["{name}: {text}"]' for name, text in found]
        lines = [*boxes, "    " + " --> ".join(name for name, _ in found)]
    else:
        arrows = reduced(edges() if kind == "rooms" else folders())
        lines = [f"    {a.replace('/', '_')}[{a}] --> {b.replace('/', '_')}[{b}]"
                 for a, b in arrows]  # fmt: skip
    return "\n".join(["```mermaid", "graph TD", *lines, "```", ""])


def page(path: Path) -> str:
    """A page with the pictures as the code has them now."""
    return PICTURE.sub(lambda found: found[1] + drawn(found[2]), path.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
