"""The only package that touches PyTorch's private names, which it gives public ones.

One file per concern; import from this package. The release is checked once, at import, against the
window these names were verified with; outside it the import fails and says so. Files that import
sympy, AOTAutograd or Dynamo, which takes seconds, are imported when a name of theirs is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dicp.torch_private.releases import NEWEST, check_release, release_of

check_release(torch.__version__)

# ruff: noqa: E402
from dicp.torch_private.devices import *
from dicp.torch_private.graphs import *
from dicp.torch_private.imports import *
from dicp.torch_private.modes import *
from dicp.torch_private.operators import *
from dicp.torch_private.profiling import *
from dicp.torch_private.tensors import *

if TYPE_CHECKING:
    from dicp.torch_private.aot import *
    from dicp.torch_private.aot_cache import *
    from dicp.torch_private.dynamo import *
    from dicp.torch_private.guards import *
    from dicp.torch_private.op_database import *
    from dicp.torch_private.symbols import *

_DEFERRED = ("symbols", "guards", "aot", "aot_cache", "dynamo", "op_database")
"""The files above that are imported on demand, in order of increasing imports."""


def __getattr__(name: str) -> Any:
    """A name of a deferred file, which is imported with those before it."""
    for part in () if name.startswith("_") else _DEFERRED:
        found = vars(import_module(f"{__name__}.{part}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
