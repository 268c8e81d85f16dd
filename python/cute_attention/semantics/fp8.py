"""Caches of FP8: numbers are rounded into them, and widened to q's dtype on the way out.

PyTorch's indexing knows no FP8 on some devices, so what it moves are bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def movable(tensor: Tensor) -> Tensor:
    """`tensor`, as bytes of the same memory where it is FP8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What was taken out of a `movable` cache, in q's dtype: a copy where it was FP8."""
    return rows.view(FP8).to(dtype) if rows.dtype == torch.uint8 else rows


def rounded(rows: Tensor, cache: Tensor) -> Tensor:
    """`rows` as they go into `movable(cache)`."""
    return movable(rows.to(cache.dtype))
