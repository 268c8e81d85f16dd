"""How attention is told where tokens are: rotary embeddings, ALiBi, or T5's relative biases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROTARY_BASE = 10_000.0
_BUCKETS = 32
_FARTHEST = 128  # tokens; all that are farther share the last bucket
_BIAS_STD = 0.02


@dataclass(frozen=True)
class Places:
    """What all layers of a forward pass are told about positions."""

    angles: Tensor | None = None  # turn q and k: [seqlen_q, head_dim / 2], or [batch, ...]
    options: dict[str, Tensor] = field(default_factory=dict)  # of `attention`


class Rotary(nn.Module):
    """Rotary embeddings: q and k are turned by angles that grow with the position."""

    frequencies: Tensor  # radians per token, [head_dim / 2]

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        pairs = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("frequencies", _ROTARY_BASE**-pairs, persistent=False)

    def forward(self, positions: Tensor, seqlen_k: int) -> Places:
        """For queries at `positions`, the last of `seqlen_k` keys."""
        return Places(angles=positions[..., None] * self.frequencies)


class Alibi(nn.Module):
    """ALiBi: a score falls with the distance, at each head by another slope."""

    slopes: Tensor  # [heads]

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, positions: Tensor, seqlen_k: int) -> Places:
        """`attention` computes the distances itself."""
        return Places(options={"alibi_slopes": self.slopes})


class RelativeBias(nn.Module):
    """T5's relative position bias: a learned number for each head and bucket of distances is added
    to the scores. As in T5, all layers share it."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(_BUCKETS, heads))

    def initialise(self) -> None:
        nn.init.normal_(self.table, std=_BIAS_STD)

    def forward(self, positions: Tensor, seqlen_k: int) -> Places:
        """A bias `[1, heads, seqlen_q, seqlen_k]`. It has one value for each difference of two
        positions, so the table is read once for each of these, and not for each score."""
        seqlen_q = positions.numel()
        # From the last query's first key to the first query's last key, which comes after it, so
        # that the causal mask hides it.
        distances = torch.arange(seqlen_k - 1, -seqlen_q, -1, device=positions.device)
        values = F.embedding(bucket_of(distances.clamp(min=0)), self.table).T
        # Each row begins one distance later than the row below it; the last query has the first.
        bias = values.unfold(-1, seqlen_k, 1).flip(-2)  # (heads, seqlen_q, seqlen_k)
        return Places(options={"bias": bias[None]})


POSITIONS: dict[str, type[Rotary] | type[Alibi] | type[RelativeBias]] = {
    "rotary": Rotary,
    "alibi": Alibi,
    "t5": RelativeBias,
}


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of Press et al. 2022: a geometric sequence from `2^(-8 / heads)` to `2^-8`. Where
    `heads` is no power of two, that of the power below it, and then every other slope of the power
    above it."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes)


def bucket_of(distances: Tensor) -> Tensor:
    """T5's buckets for keys that are not after their query: one for each short distance, and from
    half of the buckets on wider and wider ones, up to `_FARTHEST`."""
    exact = _BUCKETS // 2
    scale = (_BUCKETS - exact) / math.log(_FARTHEST / exact)
    wide = exact + (torch.log(distances.clamp(min=1) / exact) * scale).long()
    return torch.where(distances < exact, distances, wide.clamp(max=_BUCKETS - 1))
