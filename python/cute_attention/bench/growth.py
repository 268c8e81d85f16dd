"""How a figure grows with the sequence length."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .results import Row

# Growth with an exponent up to this counts as linear. A constant part of a figure only lowers the
# exponent; what can raise it a little is rounding to whole tiles and to blocks of the allocator.
LINEAR = 1.1


def series(rows: Iterable[Row], metric: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(contender, what) -> [(seqlen, value)] in the order of the lengths."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if metric in row.metrics:
            point = row.point.seqlen_q, row.metrics[metric]
            groups.setdefault((row.contender, row.what), []).append(point)
    return {key: sorted(values) for key, values in groups.items()}


def exponent(values: list[tuple[int, float]]) -> float | None:
    """e of value ~ seqlen^e between the two longest sequences; None with fewer than two."""
    if len(values) < 2:
        return None
    (short, small), (long, large) = values[-2:]
    if small <= 0 or large <= 0 or long <= short:
        return None
    return math.log(large / small) / math.log(long / short)
