"""A process that runs tests, seen from inside: what it tells the one that waits for it."""

from __future__ import annotations

import importlib
import json
import os
from typing import Protocol

from dicp.conformance.names import EAGER_DEVICE


class Tell(Protocol):
    def __call__(self, **event: object) -> None:
        """Hand an event, which JSON holds, to the process that waits."""


def open_answers() -> Tell:
    """The function that tells events on stdout, a line for each; what else is printed goes to
    stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**event: object) -> None:
        answers.write(json.dumps(event) + "\n")

    return tell


def register(device: str) -> None:
    """Make a device known to PyTorch, if it is the eager one."""
    if device == EAGER_DEVICE:
        importlib.import_module("dicp.device.active")
