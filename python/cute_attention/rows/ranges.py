"""The columns that a kernel of each family may have: what a search for a faster row tries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from ..native.rows import TableRow

_ELEMENT_BYTES = 2
_WARPGROUP = 64  # rows of an MMA of a warpgroup, which has 4 warps


@dataclass(frozen=True)
class Ranges:
    """Values of the columns that say how a row computes. Not every combination is a kernel: the
    kernels' own assertions and the layout lab's proofs refuse the others."""

    tile_m: tuple[int, ...]
    tile_n: tuple[int, ...]
    stages: tuple[int, ...]
    warps: Callable[[int, int], tuple[int, ...]]  # of tile_m and tile_n
    ptxas: tuple[str, ...] = ("O1", "O3")


def _warpgroups(rows: int) -> tuple[int, ...]:
    """A producer warpgroup, and one for each 64 rows."""
    return (4 * (rows // _WARPGROUP + 1),)


_RANGES = {
    ("sm80", "forward"): Ranges(
        (64, 128), (32, 48, 64, 80, 96, 112, 128), (1,), lambda tile_m, tile_n: (4, 8)
    ),
    ("sm80", "backward"): Ranges(
        (16, 32, 64, 128), (32, 64, 96, 128), (1, 2), lambda tile_m, tile_n: (4, 8)
    ),
    ("sm90", "forward"): Ranges(
        (64, 128, 192),
        tuple(range(64, 257, 16)),
        (2, 3, 4),
        lambda tile_m, tile_n: _warpgroups(tile_m),
    ),
    ("sm90", "backward"): Ranges(
        (64, 128), (64, 128, 192), (2, 3), lambda tile_m, tile_n: _warpgroups(tile_n)
    ),
}
# Where the sm90 backward is two kernels, their tiles are what registers hold.
_TWO_KERNELS = Ranges((128,), (64,), (2, 3, 4), lambda tile_m, tile_n: (12,))
# With sums of dQ above head dim 128 shared memory and registers hold no other tiles.
_IN_CHUNKS = Ranges((64,), (128,), (2,), lambda tile_m, tile_n: (12,))
# With qv two warpgroups have the same 64 rows, and Q fills a third of the shared memory.
_WITH_QV = Ranges((64,), (32, 48, 64), (2, 3, 4), lambda tile_m, tile_n: (12,))


def ranges_of(row: TableRow) -> Ranges:
    """The ranges of the family that a row is of."""
    if "qv" in row.score_mods:
        return _WITH_QV
    if row.computes_in_chunks():
        return _IN_CHUNKS
    return _TWO_KERNELS if row.has_two_kernels() else _RANGES[row.arch, row.direction]


def variants(row: TableRow) -> Iterator[TableRow]:
    """Every row that computes what this one does and has its columns within the ranges; all have
    the name of this one."""
    ranges = ranges_of(row)
    for tile_m, tile_n, stages, ptxas in product(
        ranges.tile_m, ranges.tile_n, ranges.stages, ranges.ptxas
    ):
        for warps in ranges.warps(tile_m, tile_n):
            yield dataclasses.replace(
                row, tile_m=tile_m, tile_n=tile_n, stages=stages, warps=warps, ptxas=ptxas
            )


def operand_bytes(row: TableRow) -> int:
    """The shared memory that the tiles of a CTA take, without which no row of the columns can be:
    of those that pass by there are as many as stages."""
    both = row.head_dim + row.head_dim_v  # the columns of K and V, or of Q and dO
    if row.direction == "forward":
        columns_of_q = both if "qv" in row.score_mods else row.head_dim
        elements = row.tile_m * columns_of_q + row.stages * row.tile_n * both
    else:
        step = _WARPGROUP if row.has_two_kernels() else row.tile_m
        elements = (row.tile_n + row.stages * step) * both
    return _ELEMENT_BYTES * elements
