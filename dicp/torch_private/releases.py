"""The window of PyTorch releases that dicp was verified with."""

from __future__ import annotations

from typing import Final

OLDEST: Final = (2, 11)
NEWEST: Final = (2, 13)


def release_of(version: str) -> tuple[int, int]:
    """The (major, minor) of a version such as ``2.13.0+cpu`` or ``2.13.0a0+git123``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def check_release(version: str) -> None:
    """Raises ImportError when this PyTorch release was not verified with dicp."""
    if OLDEST <= release_of(version) <= NEWEST:
        return
    window = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    raise ImportError(
        f"dicp needs PyTorch {window} and found {version}. "
        f'Install one of them, for example: pip install "torch=={NEWEST[0]}.{NEWEST[1]}.*"'
    )
