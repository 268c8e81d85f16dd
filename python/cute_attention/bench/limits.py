"""The figures above which `robustness` fails."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# The time of an input over that of standard normal ones. The reference backend is not about speed
# and has no limit.
TIME_LIMITS = {"sm90": 1.15, "sm80": 1.25}
ERROR_LIMIT = 1.10  # the rms error over that of the better peer


@dataclass(frozen=True)
class Limits:
    """The limits of one run."""

    time: dict[str, float] = field(default_factory=lambda: dict(TIME_LIMITS))
    error: float = ERROR_LIMIT

    def time_of(self, contender: str) -> float:
        """The limit for the time of a contender. `auto` has that of sm90, whose output it takes on
        a Hopper GPU."""
        if contender == "reference":
            return math.inf
        return self.time["sm90" if contender == "auto" else contender]
