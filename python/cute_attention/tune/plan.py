"""The candidates of each subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..native.core import Device
from ..native.rows import TableRow
from ..rows.candidates import HOW, Candidate, proven, ranked, row_of
from ..rows.cost import relative_estimate
from ..rows.row import Row
from .subjects import Subject

# What nvcc takes for a row on one core, in seconds, on an AMD EPYC: 25 to 60.
BUILD_SECONDS = 40
# The share of the time that compiling may take; measuring has the rest.
BUILD_SHARE = 0.6


@dataclass(frozen=True)
class Entry:
    """A kernel that is, or may be, in the folder of a search."""

    columns: TableRow
    estimate: float  # what it is expected to take, over what the present row is
    name: str = ""  # of the kernel, once it is compiled
    file: str = ""  # of its library
    seconds: float = 0.0  # of its compiler
    error: str = ""  # of its compiler


@dataclass(frozen=True)
class Search:
    """A subject and its candidates; the first entry is the present row itself, compiled like the
    others."""

    subject: Subject
    entries: tuple[Entry, ...]
    refused: tuple[tuple[str, str], ...] = ()  # rows that cannot be, and why
    considered: int = 0  # rows within the ranges

    @property
    def present(self) -> Entry:
        return self.entries[0]

    def with_entries(self, entries: Sequence[Entry]) -> Search:
        return replace(self, entries=tuple(entries))


def candidates_for(minutes: float, jobs: int, subjects: int) -> int:
    """How many rows of a subject can be compiled in the time, beside the present one."""
    builds = int(BUILD_SHARE * minutes * 60 * jobs / BUILD_SECONDS / max(subjects, 1))
    return max(1, builds - 1)


def search_of(
    subject: Subject,
    own: Sequence[dict[str, Any]],
    count: int,
    device: Device,
    jobs: int,
) -> Search:
    """The candidates of a subject that are worth compiling, the most promising first.

    Args:
        subject: what is tuned.
        own: columns and values of rows that the user wants tried; they come first.
        count: how many candidates.
        device: for which estimates are made.
        jobs: how many rows the layout lab looks at at a time.

    Raises:
        ValueError: a column or a value of `own` is none that can be.
        BuildError: the layout lab lacks something.
    """
    present, problems = subject.present, subject.problems()
    for columns in own:
        if unknown := [name for name in columns if name not in HOW]:
            raise ValueError(f"--row has {unknown[0]!r}, expected columns of {', '.join(HOW)}")
    try:
        made = [Row.of(present.name, **columns) for columns in own]
    except TypeError as error:  # a word in place of a number
        raise ValueError(f"--row: {error}") from error
    given = [row for row in dict.fromkeys(made) if row != row_of(present)]
    asked = [
        Candidate(row, relative_estimate(row.columns, present, problems, device)) for row in given
    ]
    order, too_large = ranked(present, problems, device)
    rest = [candidate for candidate in order if candidate.row not in given]
    found = proven([*asked, *rest], count, jobs)
    entries = [Entry(candidate.row.columns, candidate.estimate) for candidate in found.kept]
    refused = tuple((row.name, reason) for row, reason in found.refused)
    return Search(subject, (Entry(present, 1.0), *entries), refused, len(order) + too_large + 1)
