"""Lists of operators in environment variables: regular expressions matched in full."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache

from dicp.errors import ConfigValueError, DicpWarning
from dicp.torch_private import registered_names


@cache
def operator_names() -> frozenset[str]:
    """The names of all ATen operators, with and without their overloads."""
    names = [name[1:] for name in registered_names() if name[0] == "aten"]
    full = {f"{base}.{overload}" for base, overload in names if overload}
    return frozenset({base for base, _ in names} | full)


class Patterns:
    """Comma-separated regular expressions over operator names such as `add.out` and `conv2d`.

    Raises ConfigValueError for an entry that is no regular expression; warns of one that matches no
    operator.
    """

    def __init__(self, source: str, text: str, known: Collection[str] | None = None) -> None:
        self.entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        self._patterns = []
        for entry in self.entries:
            try:
                self._patterns.append(re.compile(entry))
            except re.error as error:
                expected = f"regular expressions separated by commas ({entry!r}: {error})"
                raise ConfigValueError(source, text, expected, "Correct the entry.") from None
        self._known: dict[str, bool] = {}
        if self.entries:
            self._warn_unmatched(source, operator_names() if known is None else known)

    def _warn_unmatched(self, source: str, known: Collection[str]) -> None:
        for entry, pattern in zip(self.entries, self._patterns, strict=True):
            if any(pattern.fullmatch(name) for name in known):
                continue
            near = get_close_matches(entry, sorted(known), 3)
            hint = f"; near names: {', '.join(near)}" if near else ""
            warnings.warn(
                DicpWarning(f"{source}: {entry!r} matches no operator{hint}"), stacklevel=4
            )

    def __bool__(self) -> bool:
        return bool(self.entries)

    def match(self, name: str) -> bool:
        """Whether an entry matches `name` with its overload, or its operator's bare name."""
        if not self._patterns:
            return False
        found = self._known.get(name)
        if found is None:
            bare = name.partition(".")[0]
            found = any(p.fullmatch(name) or p.fullmatch(bare) for p in self._patterns)
            self._known[name] = found
        return found
