"""Whether a candidate replaces the row of the tables, and what the table would say then."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from ..bench.machine import Environment
from ..bench.points import Point
from ..bench.results import Row
from ..native import rows as tables
from ..rows.candidates import HOW
from .measure import TO_PRESENT
from .plan import Entry, Search

# A candidate replaces the row if it is faster by more than the noise on the mean, and nowhere
# slower by more than that.
AHEAD = 1.01
NOT_BEHIND = 0.99
_COLUMNS_OF_A_COMMENT = 125  # as in the tables


@dataclass(frozen=True)
class Standing:
    """A candidate that was measured at every point of its subject."""

    entry: Entry
    ratios: dict[Point, float]  # speed over that of the present row

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios.values())

    @property
    def worst(self) -> float:
        return min(self.ratios.values())

    @property
    def replaces(self) -> bool:
        return self.mean > AHEAD and self.worst >= NOT_BEHIND


@dataclass(frozen=True)
class Verdict:
    """What came of a search."""

    search: Search
    standings: tuple[Standing, ...]  # the fastest on the mean first
    rows: tuple[Row, ...]  # all that was measured of the subject
    incomplete: int  # candidates that are right and were not measured at every point
    faults: Mapping[str, str]  # of kernels that compute something else, by their names

    @property
    def winner(self) -> Standing | None:
        """The fastest that replaces the present row."""
        return next((each for each in self.standings if each.replaces), None)

    def text(self) -> str:
        """The verdict in a sentence."""
        name = self.search.subject.present.name
        count = len(self.standings) + 1
        if self.winner:
            new = self.winner
            said = (
                f"{new.entry.columns.name} replaces {name}: {new.mean:.3f} of its speed on the "
                f"mean of {len(new.ratios)} points, {new.worst:.3f} at worst"
            )
        elif self.standings:
            best = self.standings[0]
            said = (
                f"the table's row {name} is the best of {count}; next is {best.entry.columns.name} "
                f"with {best.mean:.3f} of its speed on the mean, {best.worst:.3f} at worst"
            )
        else:
            said = f"no candidate was measured beside {name} at every point"
        if self.incomplete:
            said += f" ({self.incomplete} candidates are not measured at every point)"
        return said

    def ahead_somewhere(self) -> list[Standing]:
        """Candidates that do not replace the row and are ahead of it at some points: a second row
        of the same key serves those, if the cost model tells them apart."""
        return [
            each
            for each in self.standings
            if each is not self.winner and max(each.ratios.values()) > AHEAD
        ]


def verdict_of(
    search: Search, rows: Iterable[Row], faults: Mapping[str, str] | None = None
) -> Verdict:
    """What the figures say of a search; `faults` are those of kernels that compute something else,
    by their names."""
    faults = faults or {}
    subject = search.subject
    ours = [row for row in rows if row.what == subject.direction]
    mine = [row for row in ours if row.point.key() in {p.key() for p in subject.points}]
    found: dict[str, dict[Point, float]] = {}
    for row in mine:
        if TO_PRESENT in row.metrics:
            found.setdefault(row.contender, {})[row.point.key()] = row.metrics[TO_PRESENT]
    standings, incomplete = [], 0
    for entry in search.entries[1:]:
        ratios = found.get(entry.name, {}) if entry.name not in faults else {}
        failed = any(row.contender == entry.name and row.reason for row in mine)
        if len(ratios) == len({p.key() for p in subject.points}):
            standings.append(Standing(entry, ratios))
        elif entry.name and entry.name not in faults and not failed:
            incomplete += 1
    standings.sort(key=lambda standing: standing.mean, reverse=True)
    return Verdict(search, tuple(standings), tuple(mine), incomplete, faults)


def lines_for_the_table(verdict: Verdict, environment: Environment) -> str:
    """The rows to paste into the .def file, with their evidence above them; rows that differ in
    dtype alone have the same columns, since they are compiled together."""
    winner, present = verdict.winner, verdict.search.subject.present
    if winner is None:
        return ""
    how = {name: getattr(winner.entry.columns, name) for name in HOW}
    key = dataclasses.replace(present, name="", dtype="")
    lines = [
        dataclasses.replace(row, **how).line()
        for row in tables.table()
        if dataclasses.replace(row, name="", dtype="") == key
    ]
    return "\n".join([*_comment(_evidence(verdict, winner, environment)), *lines])


def _evidence(verdict: Verdict, winner: Standing, environment: Environment) -> str:
    speed = {
        (row.point.key(), row.contender): row.metrics["tflops"]
        for row in verdict.rows
        if row.metrics
    }
    present = verdict.search.present
    figures = [
        f"{point.mask} {point.shape_text()} {speed[point, winner.entry.name]:.0f} against "
        f"{speed[point, present.name]:.0f}"
        for point in winner.ratios
        if (point, present.name) in speed
    ]
    before = present.columns
    tile = f"{before.tile_m} x {before.tile_n}, {before.stages} stages, {before.warps} warps"
    return (
        f"On an {environment.device}, TFLOP/s, against {tile}, {before.ptxas}: "
        f"{'; '.join(figures)}; {winner.mean:.2f} of the speed on the mean of "
        f"{len(winner.ratios)} points, {winner.worst:.2f} at worst."
    )


def _comment(text: str) -> Sequence[str]:
    return textwrap.wrap(text, _COLUMNS_OF_A_COMMENT, initial_indent="// ", subsequent_indent="// ")
