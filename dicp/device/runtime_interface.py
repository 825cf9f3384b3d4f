"""The runtime interface of a vendor: its functions, and a library or ctypes table checked for them.

`native/runtime.h` declares the interface. A vendor's package registers, in the entry-point group
`dicp.devices`, a callable without arguments that returns its library: a path, a `ctypes.CDLL`, or
any object with the functions as ctypes attributes (`runtime_template.py` shows one).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from dicp.errors import RuntimeLibraryError, VendorNotFoundError

GROUP = "dicp.devices"
PREFIX = "dicp_rt_"
HEADER = Path(__file__).parent / "native" / "runtime.h"


@cache
def functions() -> tuple[str, ...]:
    """The functions of the interface, without their prefix, in the order of the header."""
    return tuple(re.findall(rf"^int {PREFIX}(\w+)\(", HEADER.read_text(), re.MULTILINE))


def missing(library: Any) -> list[str]:
    """The functions that `library` lacks, in the header's order."""
    return [PREFIX + name for name in functions() if not hasattr(library, PREFIX + name)]


def addresses(library: Any, path: str) -> list[int]:
    """The addresses of the functions, in order. Raises RuntimeLibraryError."""
    lacking = missing(library)
    if lacking:
        raise RuntimeLibraryError(path, lacking)
    found = [getattr(library, PREFIX + name) for name in functions()]
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]


def vendors() -> dict[str, EntryPoint]:
    """The installed vendors' runtimes by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_vendor(name: str) -> tuple[Any, str]:
    """The runtime library of the vendor called `name`, and where it comes from.

    Raises VendorNotFoundError.
    """
    points = vendors()
    if name not in points:
        raise VendorNotFoundError(name, sorted(points))
    made = points[name].load()()
    if isinstance(made, (str, Path)):
        return ctypes.CDLL(str(made)), str(made)
    return made, points[name].value


def declare(library: Any, names: Sequence[str] | None = None) -> None:
    """Set the argument types of a library's functions, for calls from Python."""
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    kinds = {"int": number, "size_t": size, "double": ctypes.c_double}
    text = HEADER.read_text()
    for name, inside in re.findall(rf"^int {PREFIX}(\w+)\(([^)]*)\)", text, re.MULTILINE):
        if names is not None and name not in names:
            continue
        types = []
        for argument in inside.split(","):
            word = argument.split()[0]
            types.append(address if "*" in argument else kinds.get(word, address))
        function = getattr(library, PREFIX + name)
        function.argtypes, function.restype = types, number
