"""What is tuned: rows of the tables, each with the points that it would serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..bench.points import Point
from ..bench.problems import DIRECTIONS, problem_of
from ..dispatch.jit import best_rows
from ..native.rows import TableRow
from ..problem import Problem


@dataclass(frozen=True)
class Subject:
    """A row of the tables and the points at which a faster one is looked for."""

    present: TableRow
    points: tuple[Point, ...]

    @property
    def direction(self) -> str:
        """The direction as the benchmark calls it."""
        return next(word for word, name in DIRECTIONS.items() if name == self.present.direction)

    def problems(self, device: torch.device | None = None) -> list[Problem]:
        """What the points ask of a kernel."""
        return [problem_of(point, self.direction, device) for point in self.points]


def subjects_of(
    points: Iterable[Point], directions: Sequence[str], arch: str, shared_memory: int
) -> list[Subject]:
    """The rows of a family that would serve the points in each direction.

    Args:
        points: of the benchmark.
        directions: some of `DIRECTIONS`.
        arch: "sm80" or "sm90".
        shared_memory: bytes of a CTA on the GPU for which rows are tuned.

    Raises:
        ValueError: no row of the tables serves a point.
    """
    found: dict[TableRow, list[Point]] = {}
    for direction in directions:
        for point in points:
            rows = best_rows(problem_of(point, direction), arch, shared_memory)
            if not rows:
                raise ValueError(
                    f"no row of the tables of {arch} computes the {DIRECTIONS[direction]} of "
                    f"{point.text()}"
                )
            found.setdefault(rows[0], []).append(point)
    return [Subject(row, tuple(served)) for row, served in found.items()]
