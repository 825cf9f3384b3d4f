"""The options of one invocation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    @property
    def file_name(self) -> str:
        """The name of the result files: one per command, mode, dtype and device."""
        both = {(False,): "-inference", (True,): "-training"}.get(self.modes, "")
        mode = "" if self.command == "kernels" else both
        part = f"-{'-'.join(self.names)}" if self.names else ""
        if self.command == "gpu":  # it has modes and types of its own
            return f"gpu-{self.device}{part}"
        return f"{self.command}{mode}-{'-'.join(self.dtypes)}-{self.device}{part}"
