"""One proof's outcome."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A rule applied to a part of a kernel: does it hold, and by what number."""

    rule: str
    subject: str
    ok: bool
    number: str
    conflicts: int = 0  # bank conflicts a tile, for comparison with a GPU's counters
