"""The outcome of one proof."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A rule applied to a part of a kernel: whether it holds, and the number that shows it."""

    rule: str
    subject: str
    ok: bool
    number: str
    conflicts: int = 0  # of banks in a tile, to compare with the counters of a GPU
