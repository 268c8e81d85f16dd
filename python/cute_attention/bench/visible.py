"""The mask of a point as a tensor."""

from __future__ import annotations

import torch

from .points import Bounds


def visible(
    seqlen_q: int, seqlen_k: int, bounds: Bounds, device: torch.device
) -> torch.Tensor | None:
    """bool [seqlen_q, seqlen_k], True where a query sees a key; None where it sees every key."""
    left, right = bounds
    if left is None and right is None:
        return None
    query = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        mask &= key >= query - left
    if right is not None:
        mask &= key <= query + right
    return mask
