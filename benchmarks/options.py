"""The options of one invocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar


class OptionError(LookupError):
    """A name that an option of the command line cannot take."""


class Named(Protocol):
    """A model or a kernel."""

    @property
    def name(self) -> str: ...


Chosen = TypeVar("Chosen", bound=Named)


@dataclass(frozen=True)
class Options:
    """The command line, checked; `names` selects models or kernels, empty means all."""

    command: str
    backends: tuple[str, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    modes: tuple[bool, ...]
    """Which of inference (False) and training (True)."""
    device: str
    quick: bool
    layers: tuple[int, ...]
    out: Path

    def case(self, model: str, backend: str, train: bool, dtype: str) -> dict[str, Any]:
        """The part of the options that a measurement in a process of its own gets."""
        return {
            "model": model, "backend": backend, "train": train, "dtype": dtype,
            "device": self.device,
        }  # fmt: skip

    def cases(self, models: Sequence[Chosen]) -> list[tuple[Chosen, str, bool]]:
        """Each model with each dtype in each mode."""
        return [(m, d, t) for t in self.modes for d in self.dtypes for m in models]

    @property
    def file_name(self) -> str:
        """The name of the result files: one per command, mode, dtype and device."""
        both = {(False,): "-inference", (True,): "-training"}.get(self.modes, "")
        mode = "" if self.command == "kernels" else both
        part = f"-{'-'.join(self.names)}" if self.names else ""
        if self.command == "gpu":  # it has modes and types of its own
            return f"gpu-{self.device}{part}"
        return f"{self.command}{mode}-{'-'.join(self.dtypes)}-{self.device}{part}"


def chosen(kind: str, table: Sequence[Chosen], names: Sequence[str]) -> list[Chosen]:
    """The named entries in the order of the table, all without names.

    Raises OptionError for a name that is not in the table.
    """
    known = [entry.name for entry in table]
    wrong = sorted({*names} - {*known})
    if wrong:
        raise OptionError(f"unknown {kind} {wrong}; known: {', '.join(known)}")
    return [entry for entry in table if not names or entry.name in names]


def mode_of(train: bool) -> str:
    return "training" if train else "inference"
