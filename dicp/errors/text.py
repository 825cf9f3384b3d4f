"""Parts of messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_SHOWN_DIAGNOSTICS = 3
_SHOWN_SOURCES = 8


def nearest(name: str, known: Sequence[str]) -> str | None:
    matches = difflib.get_close_matches(name.lower(), known, n=1)
    return matches[0] if matches else None


def did_you_mean(nearest: str | None) -> str:
    return f" Did you mean {nearest!r}?" if nearest else ""


def nearest_is(name: str, known: Sequence[str]) -> str:
    """The known name that is nearest, as the end of a clause; empty if none is near."""
    near = nearest(name, known)
    return f"; the nearest is {near!r}" if near else ""


def amount(wanted: int) -> str:
    return f" ({wanted} bytes)" if wanted else ""


def at(user_line: str) -> str:
    return f" At: {user_line.strip()}." if user_line.strip() else ""


def meaning_at(operator: str, place: str) -> str:
    """The function of `Semantics` that says what a graph operator computes, and its line."""
    return f"the meaning of {operator}{place and f' at {place}'}"


def sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _shape(shape: object) -> str:
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, Sequence) else f"[{shape}]"


def operands(dtypes: Sequence[object], shapes: Sequence[object]) -> str:
    pairs = zip(dtypes, shapes, strict=False)
    return ", ".join(f"{dtype}{_shape(shape)}" for dtype, shape in pairs)


def indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def shortened(sources: Sequence[str]) -> list[str]:
    rest = len(sources) - _SHOWN_SOURCES
    return [*sources[:_SHOWN_SOURCES], *([f"... and {rest} more"] if rest > 0 else [])]


def compiled_from(sources: Sequence[str]) -> list[str]:
    """Lines that list the operators a kernel computes; none where they are not known."""
    return ["compiled from:", *indented("\n".join(shortened(sources)))] if sources else []


def first_errors(diagnostics: str) -> str:
    """The first lines that report an error, or the first lines of all if none does."""
    lines = [line for line in diagnostics.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    rest = len(errors) - _SHOWN_DIAGNOSTICS
    shown = errors[:_SHOWN_DIAGNOSTICS] or ["(the compiler printed nothing)"]
    return "\n".join([*shown, *([f"... and {rest} more"] if rest > 0 else [])])
