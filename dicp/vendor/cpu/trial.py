"""Our routines outside of a graph, to compare them with a library before anything is lowered."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dicp.loop.runtime.native import Libraries
from dicp.toolchain import load_library
from dicp.torch_private import disable_current_modes
from dicp.vendor.cpu.calibration import (
    FASTER_ON_TILES,
    PROBLEMS,
    TILE_NAMES,
    ShapeClass,
    Verdict,
    by_onednn,
    compare,
    operands,
)
from dicp.vendor.cpu.routines import Group
from dicp.vendor.cpu.routines.product import variant
from dicp.vendor.cpu.thresholds import TILE_MARGIN
from dicp.vendor.cpu.units import Units

HALF = torch.bfloat16
_ROUTINE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Trial:
    """The routine of bfloat16 products of one class, compiled if the cache lacks it, and loaded."""

    def __init__(self, which: ShapeClass, units: Units, libraries: Libraries) -> None:
        self.which = which
        rows, depth, columns = PROBLEMS[which]
        group = Group.of(variant(HALF, rows, columns, (1, depth)), HALF)
        entry = next(name for name in group.bodies() if "biased" not in name)
        key = units.routines(group)
        unit = units.entries[key]
        self._library = libraries.load(key, lambda: load_library("cpu", unit, [entry]))
        self._routine = _ROUTINE(self._library.address(entry))

    def product(self, x: Tensor, w: Tensor, out: Tensor) -> None:
        """out = x @ w.T for contiguous matrices."""
        (rows, depth), columns = x.shape, w.shape[0]
        sizes = [1, rows, columns, depth, 0, 0, depth, 1, 0, 1, depth, 0, columns, 0]
        args = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (x, w, out)))
        status = (ctypes.c_int64 * 4)()
        self._routine(args, (ctypes.c_int64 * len(sizes))(*sizes), status)

    def verdict(self) -> Verdict:
        """Whether the routine or oneDNN multiplies faster; by the table if that stays unstable."""
        with disable_current_modes(), torch.no_grad():
            x, w = operands(self.which, HALF)
            out = x.new_empty(len(x), len(w))
            return compare(
                lambda: by_onednn(x, w), lambda: self.product(x, w, out), ("onednn", "own"),
                FASTER_ON_TILES, TILE_NAMES, margin=TILE_MARGIN,
            )  # fmt: skip
