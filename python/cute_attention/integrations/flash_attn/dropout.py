"""Dropout as flash-attn scales it: what is kept is multiplied by exactly 1 / (1 - p).

`attention` rounds p to k / 256 and multiplies what it keeps by 256 / (256 - k), so that the
expectation is exact. flash-attn rounds the share that it drops, but not the factor. The ratio of
the two factors multiplies the output here, and through autograd the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checks import dropout_p as check_dropout_p
from ...semantics.dropout import keep_scale


def check_dropout(name: str, dropout_p: float) -> None:
    """A number from 0 to before 1."""
    check_dropout_p(name, "dropout_p", dropout_p)
    if dropout_p == 1:
        raise ValueError(f"{name}: dropout_p is {dropout_p}, expected 0 <= dropout_p < 1")


def draw_rng_state(q: Tensor) -> Tensor:
    """What decides which values are dropped, int64 `[2]` from PyTorch's generator of q's device.
    The first number is the seed of `attention`; flash-attn's states have two."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def seed_of(rng_state: Tensor) -> Tensor:
    """`dropout_seed` of `attention`, for what `draw_rng_state` returned."""
    return rng_state[:1]


def ratio(dropout_p: float) -> float:
    """flash-attn's factor of what is kept over ours; dropout_p is less than 1.

    `attention` keeps nothing from p = 511/512 on: its factor is 0 there, and so is every output.
    """
    ours = keep_scale(dropout_p)
    return 1.0 / (1.0 - dropout_p) / ours if ours else 1.0


def rescaled(out: Tensor, dropout_p: float) -> Tensor:
    """An output of `attention` with what was kept multiplied by 1 / (1 - p)."""
    factor = ratio(dropout_p)
    return out if factor == 1.0 else out * factor
