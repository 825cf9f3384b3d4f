"""The runtime interface of a vendor: its functions, and a library or ctypes table checked for them.

`native/runtime.h` declares the interface. A vendor's package registers, in the entry-point group
`dicp.devices`, a callable without arguments that returns its library: a path, a `ctypes.CDLL`, or
any object with the functions as ctypes attributes (`runtime_template.py` shows one).
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from dicp.errors import RuntimeLibraryError, VendorNotFoundError

GROUP = "dicp.devices"
PREFIX = "dicp_rt_"
HEADER = Path(__file__).parent / "native" / "runtime.h"
_TEXT = HEADER.read_text()
_NUMBERS = {name: int(n, 0) for name, n in re.findall(r"^#define DICP_RT_(\w+) (\w+)", _TEXT, re.M)}
IDENTIFIER_BYTES, UNSUPPORTED = _NUMBERS["IDENTIFIER_BYTES"], _NUMBERS["UNSUPPORTED"]
DTYPES, REDUCTIONS = (
    tuple(name.lower() for name in re.findall(r"DICP_RT_(\w+)", names))
    for names in re.findall(r"^enum \{([^}]*)\}", _TEXT, re.M)
)
"""What collectives are asked for; a place in the tuple is the header's code."""


@cache
def _blocks() -> tuple[tuple[str, ...], ...]:
    """The functions, required and optional, without their prefix, in the order of the header."""
    blocks = _TEXT.split("\n// Optional, all or none: ")
    return tuple(tuple(re.findall(rf"^int {PREFIX}(\w+)\(", b, re.MULTILINE)) for b in blocks)


def functions() -> tuple[str, ...]:
    """The required functions, without their prefix, in the order of the header."""
    return _blocks()[0]


def collectives() -> tuple[str, ...]:
    """The functions of which a library has all or none, in the order of the header."""
    return _blocks()[1]


def has_collectives(library: Any) -> bool:
    return any(hasattr(library, PREFIX + name) for name in collectives())


def _needed(library: Any) -> tuple[str, ...]:
    """The functions that `library` has to have, in the header's order."""
    return functions() + (collectives() if has_collectives(library) else ())


def missing(library: Any) -> list[str]:
    """The functions that `library` lacks, in the header's order."""
    return [PREFIX + n for n in _needed(library) if not hasattr(library, PREFIX + n)]


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


def declare(library: Any) -> None:
    """Set the argument types of a complete library's functions, for calls from Python."""
    needed = _needed(library)
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    kinds = {"int": number, "size_t": size, "double": ctypes.c_double}
    for name, inside in re.findall(rf"^int {PREFIX}(\w+)\(([^)]*)\)", _TEXT, re.MULTILINE):
        if name not in needed:
            continue
        types = []
        for argument in inside.split(","):
            word = argument.split()[0]
            types.append(address if "*" in argument else kinds.get(word, address))
        function = getattr(library, PREFIX + name)
        function.argtypes, function.restype = types, number


def last_error(library: Any) -> str:
    """The text of the function that failed last in this thread."""
    text = ctypes.create_string_buffer(512)
    library.dicp_rt_last_error(text, len(text))
    return text.value.decode(errors="replace")
