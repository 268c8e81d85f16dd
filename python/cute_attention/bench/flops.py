"""The floating-point operations that attention counts as, by the conventions of published figures.

forward   2 · pairs · (head_dim + head_dim_v) per query head: the products q·k and p·v
backward  2 · pairs · (3 head_dim + 2 head_dim_v): q·k again, dq, dk, and the two with v;
          2.5 times the forward where both dims agree

`pairs` counts the (query, key) pairs that the mask shows. As in the FlashAttention papers, a causal
mask over as many keys as queries counts as half of the full square instead of s(s+1)/2. Windows,
and causal masks over other numbers of keys, are counted pair by pair. In packed sequences only the
pairs within a document count.
"""

from __future__ import annotations

from .points import Bounds, Point


def _sum_clamped(first: int, count: int, limit: int) -> int:
    """Sum of min(max(x, 0), limit) for x in range(first, first + count)."""

    def below(end: int) -> int:  # the sum over all x < end
        ramp = max(0, min(end, limit + 1))
        return ramp * (ramp - 1) // 2 + max(0, end - limit - 1) * limit

    return below(first + count) - below(first)


def visible_pairs(seqlen_q: int, seqlen_k: int, bounds: Bounds) -> int:
    """(query, key) pairs that a mask shows, counted exactly; the diagonal ends at the bottom
    right."""
    offset = seqlen_k - seqlen_q
    left, right = bounds
    if right is None:
        past_last = seqlen_q * seqlen_k
    else:
        past_last = _sum_clamped(offset + right + 1, seqlen_q, seqlen_k)
    before_first = 0 if left is None else _sum_clamped(offset - left, seqlen_q, seqlen_k)
    return past_last - before_first


def counted_pairs(point: Point) -> float:
    """Pairs of one head over the whole batch, by the convention in this file's docstring."""
    total = 0.0
    for seqlen_q, seqlen_k in point.documents:
        if point.mask == "causal" and seqlen_q == seqlen_k:
            total += seqlen_q * seqlen_k / 2
        else:
            total += visible_pairs(seqlen_q, seqlen_k, point.bounds)
    return total


def flops(point: Point, direction: str) -> float:
    """Floating-point operations of a point; direction is "fwd", "bwd" or "fwdbwd"."""
    per_pair = {
        "fwd": 2 * (point.head_dim + point.head_dim_v),
        "bwd": 2 * (3 * point.head_dim + 2 * point.head_dim_v),
    }
    parts = ("fwd", "bwd") if direction == "fwdbwd" else (direction,)
    return counted_pairs(point) * point.heads * sum(per_pair[part] for part in parts)
