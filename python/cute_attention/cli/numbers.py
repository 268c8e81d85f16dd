"""Numbers on the command line, for `type` of argparse."""

from __future__ import annotations

import argparse
import math

_OLDEST_CHIP = 80  # compute capability, major * 10 + minor


def chips(text: str) -> tuple[int, ...]:
    """Compute capabilities that an sm80 row is built for: "80,90"."""
    found = tuple(int(word) for word in text.split(",") if word.isdigit())
    if len(found) != len(text.split(",")) or min(found) < _OLDEST_CHIP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 80,90")
    return found


def positive(text: str) -> int:
    """An int above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def positive_float(text: str) -> float:
    """A number above 0, and finite."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return found
