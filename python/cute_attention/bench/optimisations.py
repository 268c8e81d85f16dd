"""The steps of `bench steps`: one forward kernel from plain to full. Each step changes what its
title says, and keeps what the steps before it have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..native import rows as tables
from ..rows.row import Row

HEAD_DIM = 128
ARCHITECTURES = ("sm80", "sm90")


@dataclass(frozen=True)
class Step:
    """A row, and why it is faster than the row of the step before."""

    name: str
    row: Row
    why: str

    @property
    def is_first(self) -> bool:
        """Whether it begins a ladder: there is no step before it to compare with."""
        return not self.name.startswith("+")


def _row(arch: str, **columns: str | int) -> Row:
    return Row.of(f"{arch}_fwd_bf16_d{HEAD_DIM}", **columns)


_SMALL: dict[str, str | int] = {"tile_m": 64, "tile_n": 32, "warps": 2}
_PLAIN: dict[str, str | int] = {
    "copies": "plain",
    "loads": "late",
    "swizzle": 0,
    "fragments_ahead": 0,
    "softmax": "exact",
}
_ONE_CONSUMER: dict[str, str | int] = {"tile_m": 64, "warps": 8, "stages": 2}


def _without(columns: dict[str, str | int], *names: str) -> dict[str, str | int]:
    return {name: value for name, value in columns.items() if name not in names}


STEPS: Sequence[Step] = (
    Step(
        "Ampere: plain",
        _row("sm80", **_SMALL, **_PLAIN),
        "Tensor cores by mma.sync and an online softmax, and nothing else: a tile is loaded "
        "through registers when it is needed, and lies in shared memory row by row. All rows begin "
        "in the same bank, so that each phase of an ldmatrix takes 8 passes where 1 would do.",
    ),
    Step(
        "+ swizzle",
        _row("sm80", **_SMALL, **_without(_PLAIN, "swizzle")),
        "The 16-byte vectors of a row change places by an XOR with the row's number. The 8 rows "
        "that ldmatrix reads at a time then lie in 8 different groups of banks, and each needs 1 "
        "pass.",
    ),
    Step(
        "+ asynchronous copies",
        _row("sm80", **_SMALL, **_without(_PLAIN, "swizzle", "copies")),
        "cp.async writes to shared memory past the registers. A thread issues all its copies and "
        "waits once, and no register holds what is under way.",
    ),
    Step(
        "+ double buffers, eager loads",
        _row("sm80", **_SMALL, stages=2, **_without(_PLAIN, "swizzle", "copies", "loads")),
        "The copy of the next tile starts before the products with this one, into a second buffer. "
        "The latency of global memory passes beside the tensor cores, and not before them.",
    ),
    Step(
        "+ fragments ahead",
        _row("sm80", **_SMALL, stages=2, softmax="exact"),
        "The ldmatrix of the next 16 columns of an operand stand before the MMAs of these 16, so "
        "that the MMAs need not wait for shared memory. ptxas moves some loads ahead by itself, in "
        "the step before too: this one is worth what ptxas leaves.",
    ),
    Step(
        "+ optimistic softmax",
        _row("sm80", **_SMALL, stages=2),
        "A row keeps the maximum of its first tiles as reference as long as the exponents stay in "
        "range. Most tiles then multiply no output by a factor, and the result is as exact.",
    ),
    Step(
        "+ larger tiles",
        _row("sm80", stages=2),
        "A tile of 128 x 64 has 4 times the scores of one of 64 x 32. K and V are read half as "
        "often, and barriers and reductions of rows are shared among more scores.",
    ),
    Step(
        "+ one buffer again",
        _row("sm80"),
        "With large tiles V is copied during Q K^T, and the next K during P V: one buffer is "
        "enough. Chips with 164 KB and 100 KB of shared memory need what this saves. This is the "
        "row of the tables.",
    ),
    Step(
        "Hopper: TMA, WGMMA, warp roles",
        _row("sm90", **_ONE_CONSUMER, turns="off", grid="one_tile"),
        "One thread starts the copy of a whole tile, and WGMMA reads its operands from shared "
        "memory, so that no ldmatrix is left. A producer warp loads as far ahead as there are "
        "buffers, and gives most of its registers to the warpgroup that computes.",
    ),
    Step(
        "+ two consumers",
        _row("sm90", stages=2, turns="off", grid="one_tile"),
        "A second warpgroup computes 64 more queries with the same K and V. While one computes its "
        "softmax, the other's products can use the tensor cores.",
    ),
    Step(
        "+ turns",
        _row("sm90", stages=2, grid="one_tile", softmax="optimistic"),
        "The warpgroups hand each other a turn at the tensor cores. So they stay apart by half a "
        "tile, and never both wait for the products or both compute their softmax.",
    ),
    Step(
        "+ straight softmax",
        _row("sm90", stages=2, grid="one_tile"),
        "With turns a warpgroup waits for the other's softmax, so that it should be short. Exact "
        "maxima leave no branch before the exponentials, across which nothing can be scheduled.",
    ),
    Step(
        "+ persistence",
        _row("sm90", stages=2),
        "A CTA on each multiprocessor takes one tile of queries after the other. The loads and the "
        "first products of the next tile run while the output of the last one is stored. This is "
        "the row of the tables.",
    ),
)


def chosen(names: Sequence[str]) -> list[Step]:
    """The steps of some architectures."""
    return [step for step in STEPS if step.row.columns.arch in names]


def table_row(step: Step) -> str | None:
    """The name of the row of the tables that a step is, if it is one."""
    own = {**vars(step.row.columns), "name": ""}
    return next((row.name for row in tables.table() if {**vars(row), "name": ""} == own), None)
