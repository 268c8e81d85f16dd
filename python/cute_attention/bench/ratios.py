"""Ours against the best peer, or against other builds: per point, and over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .contenders import BUILD, OURS, PEER
from .points import Point
from .results import Row


@dataclass(frozen=True)
class Versus:
    """One of our contenders against the best peer of a point, or against itself in another build;
    ratio > 1 means that ours is faster."""

    point: Point
    what: str
    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        return self.ours.metrics["tflops"] / self.peer.metrics["tflops"]


@dataclass(frozen=True)
class Summary:
    contender: str
    what: str
    geomean: float
    worst: Versus
    behind: tuple[Versus, ...]  # points at which ours is slower, the slowest first
    count: int

    @property
    def ahead(self) -> int:
        """The number of points at which ours is at least as fast."""
        return self.count - len(self.behind)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def best(rows: Iterable[Row], role: str) -> Row | None:
    """The fastest measured row of a role."""
    measured = [row for row in rows if row.role == role and "tflops" in row.metrics]
    return max(measured, key=lambda row: row.metrics["tflops"], default=None)


def by_point(rows: Iterable[Row]) -> dict[tuple[str, Point], list[Row]]:
    """Rows of the same direction and point, in the order of their first appearance."""
    groups: dict[tuple[str, Point], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.what, row.point), []).append(row)
    return groups


def versus(rows: Iterable[Row]) -> list[Versus]:
    """Each of our measured rows against the best peer of its point, where both exist."""
    pairs = []
    for (what, point), group in by_point(rows).items():
        peer = best(group, PEER)
        if peer is None:
            continue
        ours = [row for row in group if row.role == OURS and "tflops" in row.metrics]
        pairs += [Versus(point, what, row, peer) for row in ours]
    return pairs


def versus_builds(rows: Iterable[Row]) -> list[Versus]:
    """Each of our measured rows against the same contender in each other build."""
    pairs = []
    for (what, point), group in by_point(rows).items():
        measured = [row for row in group if "tflops" in row.metrics]
        ours = {row.contender: row for row in measured if row.role == OURS}
        for row in measured:
            name = row.contender.partition(" ")[0]
            if row.role == BUILD and name in ours:
                pairs.append(Versus(point, what, ours[name], row))
    return pairs


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """A summary of each backend of ours in each direction."""
    pairs = versus(rows)
    return _summaries(((pair.what, pair.ours.contender), pair) for pair in pairs)


def build_summaries(rows: Iterable[Row]) -> list[Summary]:
    """A summary of each backend of ours in each direction and each other build, whose contender it
    names."""
    pairs = versus_builds(rows)
    return _summaries(((pair.what, pair.peer.contender), pair) for pair in pairs)


def _summaries(keyed: Iterable[tuple[tuple[str, str], Versus]]) -> list[Summary]:
    groups: dict[tuple[str, str], list[Versus]] = {}
    for key, pair in keyed:
        groups.setdefault(key, []).append(pair)
    return [
        Summary(
            contender=contender,
            what=what,
            geomean=geometric_mean([pair.ratio for pair in pairs]),
            worst=min(pairs, key=lambda pair: pair.ratio),
            behind=tuple(
                sorted((pair for pair in pairs if pair.ratio < 1), key=lambda pair: pair.ratio)
            ),
            count=len(pairs),
        )
        for (what, contender), pairs in groups.items()
    ]
