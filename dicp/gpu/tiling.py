"""Tilings of matrix products: the candidates, and which of them are worth trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import starmap

import torch

from dicp.gpu.thresholds import ENOUGH_TILES, MIN_STEPS, MIN_TILE_SIDE, PARTS, TILINGS
from dicp.gpu.tiles import extent, power_of_two
from dicp.loop.ir.index import Size


@dataclass(frozen=True)
class Tiling:
    """Rows, columns and depth of a block, pipeline stages, warps, split-K factor."""

    y: int
    x: int
    k: int
    stages: int
    warps: int
    parts: int = 1
    """Split-K factor: partial sums of each element, which a second kernel adds up."""

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))


def candidates(
    rows: Size, columns: Size, depth: Size, dtype: torch.dtype, batch: Size = 1
) -> list[Tiling]:
    """The tilings worth trying for a product, without duplicates."""
    whole = list(dict.fromkeys(_fitted(rows, columns, depth, dtype)))
    return [*whole, *(t for w in whole for t in _in_parts(w, (batch, rows, columns, depth)))]


def _in_parts(tiling: Tiling, shape: tuple[Size, ...]) -> Iterator[Tiling]:
    """`tiling` with split-K, where without it the tiles are too few and the depth is great."""
    batch, rows, columns, depth = (extent(s) for s in shape)
    tiles = batch * -(-rows // tiling.y) * -(-columns // tiling.x)
    for parts in PARTS:
        busy = tiles * parts <= 2 * ENOUGH_TILES
        if tiles < ENOUGH_TILES and busy and depth >= parts * MIN_STEPS * tiling.k:
            yield replace(tiling, parts=parts)


def _fitted(rows: Size, columns: Size, depth: Size, dtype: torch.dtype) -> Iterator[Tiling]:
    most = [max(MIN_TILE_SIDE, power_of_two(extent(s))) for s in (rows, columns, depth)]
    for tiling in starmap(Tiling, TILINGS):
        if tiling.y > 2 * most[0] or tiling.x > 2 * most[1]:
            continue
        deep = tiling.k // 2 if dtype == torch.float32 else tiling.k
        yield Tiling(
            min(tiling.y, most[0]), min(tiling.x, most[1]), min(deep, most[2]), tiling.stages,
            tiling.warps,
        )  # fmt: skip
