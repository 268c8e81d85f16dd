"""What a point asks of a kernel, as dispatch sees it."""

from __future__ import annotations

import torch

from ..arguments import FEATURES
from ..dispatch.backends import whole_vectors
from ..problem import Problem
from .points import Point

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def problem_of(point: Point, direction: str, device: torch.device | None = None) -> Problem:
    """What a point asks of a kernel of a direction, "fwd" or "bwd"."""
    left, right = point.bounds
    bits = sum(bit for bit, name in FEATURES.items() if getattr(point, name, False))
    return Problem(
        direction=DIRECTIONS[direction],
        dtype=point.dtype,
        batch=len(point.documents),
        seqlen_q=max(length for length, _ in point.documents),
        seqlen_k=max(length for _, length in point.documents),
        heads=point.heads,
        heads_kv=point.heads_kv,
        head_dim=whole_vectors(point.head_dim),
        head_dim_v=whole_vectors(point.head_dim_v),
        window_left=-1 if left is None else left,
        window_right=-1 if right is None else right,
        softcap=point.softcap,
        features=bits,
        device=device,
    )
