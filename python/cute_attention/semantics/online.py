"""How rows of the online softmax begin and end: with their sinks, and with their LSE."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sink(peak: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The running maximum and sum of rows that have seen nothing but their sinks. `peak` is the
    lowest finite number, of the shape of `logits`.

    A sink of +inf counts as the largest finite number, beside which every key weighs nothing:
    inf - inf would be NaN."""
    logits = logits.clamp_max(torch.finfo(logits.dtype).max)
    peak = torch.maximum(peak, logits)
    return peak, torch.exp(logits - peak)


def log_sum(peak: Tensor, total: Tensor) -> Tensor:
    """The LSE of rows from their maximum and their sum of `exp(score - maximum)`: -inf where it is
    0, +inf where the maximum is that of a sink of +inf."""
    largest = torch.finfo(peak.dtype).max
    return (peak + total.log()).masked_fill(peak == largest, torch.inf)
