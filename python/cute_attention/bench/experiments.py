"""`experiments`: what one size after the other does to time, memory and speed, all else equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..dispatch.jit import best_rows, chip_of
from ..native import packages
from ..native.rows import TableRow
from ..rows.candidates import row_of
from ..rows.ranges import operand_bytes, variants
from ..rows.row import Row as KernelRow
from .again import again
from .contenders import CONTENDERS, Contender
from .contenders.blocks import BuiltRow, KeyBlocks
from .inputs import Inputs
from .points import Point
from .problems import problem_of
from .results import Row
from .speed import Bench, Case, Settings

METRICS = {
    "time_ms": "time, ms",
    "memory_mib": "peak memory, MiB",
    "tflops": "TFLOP/s",
}


@dataclass(frozen=True)
class Experiment:
    """One thing that is varied."""

    name: str
    title: str
    axis: str  # its name on the axis of a plot


EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment("block", "block size", "block: queries x keys, or keys"),
        Experiment("dtype", "dtype", "dtype of q, k and v"),
        Experiment("length", "sequence length", "sequence length, tokens"),
        Experiment("head-dim", "head dim", "head dim, elements"),
        Experiment("heads", "heads", "heads of queries"),
    )
}
_DTYPES = ("fp32", "fp16", "bf16")  # the first on the reference backend
_MOST_BLOCKS = 6  # each is a kernel to compile


@dataclass(frozen=True)
class Values:
    """What the sizes are varied over, and the blocks of keys where there is no GPU."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[int, ...]
    keys: tuple[int, ...]


GPU = Values(
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    head_dims=(32, 64, 96, 128, 192, 256),
    heads=(1, 2, 4, 8, 16, 32),
    keys=(256, 512, 1024, 2048, 4096),
)
CPU = Values(
    lengths=(64, 128, 256, 512),
    head_dims=(16, 32, 64, 128),
    heads=(1, 2, 4, 8),
    keys=(32, 64, 128, 256),
)


def points_of(name: str, base: Point, values: Values) -> Iterator[tuple[str, Point]]:
    """The points of an experiment, each with the value that is varied, in a word."""
    if name == "length":
        for length in values.lengths:
            yield str(length), replace(base, seqlen_q=length, seqlen_k=length)
    elif name == "head-dim":
        for head_dim in values.head_dims:
            yield str(head_dim), replace(base, head_dim=head_dim, head_dim_v=head_dim)
    elif name == "heads":
        for heads in values.heads:
            yield str(heads), replace(base, heads=heads, heads_kv=heads)
    elif name == "dtype":
        for dtype in _DTYPES:
            yield dtype, replace(base, dtype=dtype)


def blocks_of(
    base: Point, device: torch.device, values: Values, kernels: Path | None = None
) -> list[Contender]:
    """Ours with other blocks: forward rows like that of the tables, from a folder of kernels or
    compiled; where there is no such row, as without a GPU, the reference backend on blocks of
    keys."""
    if device.type == "cuda":
        capability, room = chip_of(device)
        for family in packages.families_for(capability):
            if rows := rows_like(base, family, room):
                return [BuiltRow(row, kernels) for row in rows]
    return [KeyBlocks(keys) for keys in values.keys if keys <= base.seqlen_k]


def block_point(base: Point) -> Point:
    """The point at which blocks are measured: without a mask, all of them do the same work."""
    return replace(base, causal=False, window=None)


def rows_like(base: Point, family: str, room: int) -> list[KernelRow]:
    """The forward row of the tables that serves a point, and some with other tiles; none where no
    row of the family serves it."""
    found = best_rows(problem_of(base, "fwd"), family, room)
    return [row_of(row) for row in _tiles_like(found[0], room)] if found else []


def _tiles_like(present: TableRow, room: int) -> list[TableRow]:
    """The row and some that differ in one side of the tile, and in warps where these follow it."""
    one_side = [
        row
        for row in variants(present)
        if (row.stages, row.ptxas) == (present.stages, present.ptxas)
        and (row.tile_m == present.tile_m) != (row.tile_n == present.tile_n)
        and operand_bytes(row) <= room
    ]
    tiles = {(row.tile_m, row.tile_n): row for row in reversed(one_side)}  # with the fewest warps
    others = list(tiles.values())
    spread = others[:: max(1, -(-len(others) // (_MOST_BLOCKS - 1)))]
    return sorted([present, *spread], key=lambda row: (row.tile_m, row.tile_n))


def can_be(case: Case, direction: str, device: torch.device) -> bool:
    """False for what no machine can measure, of which nothing is told: the backward of a forward
    row's tile, and fp32 where a contender computes fp16 and bf16 alone."""
    if isinstance(case.contender, BuiltRow) and direction != "fwd":
        return False
    return case.point.dtype != "fp32" or device.type not in case.contender.half_on


class Experiments(Bench):
    """One run. `measure_all` hands over the rows of each value as they are finished; the case of a
    row is the experiment and the value."""

    def __init__(
        self, settings: Settings, base: Point, values: Values, kernels: Path | None = None
    ) -> None:
        super().__init__(settings)
        self.base, self.values, self.kernels = base, values, kernels

    def measure_all(self, names: Sequence[str], done: Callable[[list[Row]], None]) -> None:
        """Measures the experiments of these names."""
        for name in names:
            if name == "block":
                base = block_point(self.base)
                blocks = blocks_of(base, self.settings.device, self.values, self.kernels)
                cases = [Case(each, base, f"{name} {each.name}") for each in blocks]
                self._measure_together(base, cases, done)
                continue
            for value, point in points_of(name, self.base, self.values):
                cases = [Case(each, point, f"{name} {value}") for each in self._who(name)]
                self._measure_together(point, cases, done)

    def _measure_direction(
        self, cases: Sequence[Case], direction: str, inputs: Inputs
    ) -> list[Row]:
        possible = [case for case in cases if can_be(case, direction, self.settings.device)]
        return super()._measure_direction(possible, direction, inputs)

    def _who(self, name: str) -> list[Contender]:
        """The contenders of an experiment. In that of dtypes the reference backend is one: it is
        ours that computes fp32."""
        chosen = list(self.settings.contenders)
        reference = CONTENDERS["reference"]
        if name == "dtype" and reference not in chosen:
            chosen.append(reference)
        return chosen

    def count(self, names: Sequence[str]) -> int:
        """How often `done` is called."""
        points = sum(
            1 if name == "block" else len([*points_of(name, self.base, self.values)])
            for name in names
        )
        return points * len(self.settings.directions)

    def _command(self, case: Case, direction: str) -> str:
        chosen = [each.name for each in self.settings.contenders]
        return again(
            "experiments",
            self.base,
            self.settings.device,
            experiments=case.name.partition(" ")[0],
            direction=direction,
            contenders=",".join(chosen),
            rounds=str(self.settings.rounds),
            time_ms=f"{self.settings.time_ms:g}",
        )


def default_contenders(device: torch.device) -> str:
    """The fastest backend of ours that is here, and PyTorch's fused kernels; on a CPU also the
    formula."""
    if device.type != "cuda":
        return "reference,flash,plain"
    ours = [name for name in ("sm90", "sm80") if not CONTENDERS[name].missing(device)]
    return ",".join([*(ours[:1] or ["reference"]), "cudnn", "flash"])
