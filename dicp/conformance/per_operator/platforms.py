"""Platform flags: `--NAME` for each target that says what its hardware is called."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dicp.config import Config
from dicp.discovery import SUFFIX, discover
from dicp.errors import InvalidTargetError
from dicp.target import find_target

OTHERS = ("cambricon", "iluvatar", "moore", "kunlun", "hygon", "ali", "qy")
"""Platforms of the public scripts that no target here is for."""


def platforms() -> dict[str, str]:
    """The backend of each platform that an installed target is for."""
    found = {}
    for name in sorted(discover()):
        with contextlib.suppress(InvalidTargetError):  # another vendor's package is damaged
            if platform := find_target(name).platform:
                found[platform] = name + SUFFIX
    return found


def listed(there: dict[str, str]) -> str:
    return ", ".join(f"--{platform} ({backend})" for platform, backend in there.items())


def backends_of(flags: Sequence[str]) -> list[str]:
    """The backends that flags such as "--NAME" stand for. Raises LookupError."""
    there = platforms()
    for flag in flags:
        if flag.removeprefix("--") not in there:
            raise LookupError(f"no target is for {flag}; there are {listed(there)}")
    return [there[flag.removeprefix("--")] for flag in flags]


def device_of(backend: str) -> tuple[str, str]:
    """Where a backend's tensors lie, and a line for the user if a simulator stands in."""
    name = backend.removesuffix(SUFFIX)
    if name not in discover():
        return "cpu", ""
    target = find_target(name)
    if not target.simulated(Config.from_env({}, target.options)):
        return target.device_type or "cpu", ""
    return "cpu", f"{backend}: no chip is at hand, its simulator runs"
