"""Rows that may be faster than one of the tables, found before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from ..errors import RowError
from ..native.core import Device
from ..native.rows import TableRow
from ..problem import Problem
from . import proofs
from .cost import relative_estimate
from .ranges import operand_bytes, variants
from .row import Row

# The most shared memory of a CTA: max_shared_memory of config.h.
_SHARED_MEMORY = {"sm80": 163 * 1024, "sm90": 227 * 1024}
_TILES_FIRST = 3
# Registers that an sm90 kernel needs beside accumulators and operands, or ptxas spills. All forward
# rows that were compiled with 24 and fewer have spilled: 192 x 128 at head dims 96 and 128, 192 x
# 96 at 192 and 128. 192 x 112 at head dim 96, with 28, has not. Of the tables' rows the backward of
# head dim 64 has the fewest, 16.
_REGISTERS_LEFT = {"forward": 28, "backward": 16}
# The columns that say how a row computes, and not what.
HOW = ("tile_m", "tile_n", "stages", "warps", "ptxas")


@dataclass(frozen=True)
class Candidate:
    """A row that may be faster than the present one."""

    row: Row
    estimate: float  # what it is expected to take, over what the present row is expected to


@dataclass
class Search:
    """What came of a search: rows in the order in which they are worth compiling, and those that
    cannot be, with the reason."""

    kept: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Row, str]] = field(default_factory=list)


def row_of(columns: TableRow) -> Row:
    """The row with these columns, under the name that they give it."""
    values = dataclasses.asdict(columns)
    del values["name"]
    values |= values.pop("study")
    return Row(**values)


def _changes(row: TableRow, present: TableRow) -> int:
    return sum(getattr(row, name) != getattr(present, name) for name in HOW)


def ranked(
    present: TableRow, problems: Sequence[Problem], device: Device
) -> tuple[list[Candidate], int]:
    """All rows within the ranges but the present one, the most promising first, and how many are
    left out because their tiles do not fit shared memory.

    The cost model knows tiles and warps, and hardly stages or the level of ptxas. So rows that
    differ in the latter alone are a group, in it those first that differ least from the present
    row. The list goes through the groups diagonally: a variant of a tile comes after the first
    variants of the next `_TILES_FIRST` tiles.
    """
    room = min(_SHARED_MEMORY[present.arch], device.shared_memory_per_block)
    fitting, too_large = [], 0
    for row in variants(present):
        if operand_bytes(row) > room:
            too_large += 1
        elif _changes(row, present):
            fitting.append(row)

    def shape(row: TableRow) -> tuple[int, int, int]:
        return row.tile_m, row.tile_n, row.warps

    groups = []
    for _, group in groupby(sorted(fitting, key=shape), key=shape):
        rows = sorted(group, key=lambda row: _changes(row, present))
        groups.append((relative_estimate(rows[0], present, problems, device), rows))
    groups.sort(key=lambda group: (group[0], _changes(group[1][0], present)))
    places = [
        (tile + _TILES_FIRST * variant, tile, estimate, row)
        for tile, (estimate, rows) in enumerate(groups)
        for variant, row in enumerate(rows)
    ]
    places.sort(key=lambda place: place[:2])
    return [Candidate(row_of(row), estimate) for _, _, estimate, row in places], too_large


def proven(candidates: Sequence[Candidate], count: int, jobs: int) -> Search:
    """The first `count` candidates that the layout lab finds no fault with: layouts without bank
    conflicts, accumulators that leave registers for the rest, a CTA that fits a multiprocessor. The
    lab looks at `jobs` of them at a time, and at no more than it must.

    Raises:
        BuildError: the layout lab lacks something; the message says how to get it.
    """
    search = Search()
    with ThreadPoolExecutor(jobs) as pool:
        for some in _portions(candidates, jobs):
            if len(search.kept) >= count:
                break
            for candidate, reason in zip(some, pool.map(_fault, some), strict=True):
                if reason:
                    search.refused.append((candidate.row, reason))
                elif len(search.kept) < count:
                    search.kept.append(candidate)
    return search


def _portions(candidates: Sequence[Candidate], size: int) -> Iterator[Sequence[Candidate]]:
    for first in range(0, len(candidates), size):
        yield candidates[first : first + size]


def _fault(candidate: Candidate) -> str:
    """What the layout lab objects to, in a line; "" for nothing."""
    try:
        reports = candidate.row.check()
    except RowError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return "; ".join(lines[1:] or lines)[:300]
    left, needed = proofs.registers_left(reports), _REGISTERS_LEFT[candidate.row.columns.direction]
    if left is not None and left < needed:
        return f"it would spill: accumulators and operands leave {left} registers, not {needed}"
    return ""
