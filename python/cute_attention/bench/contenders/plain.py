"""The plain formula, written out in PyTorch: what all other contenders improve."""

from __future__ import annotations

import torch

from ..inputs import Inputs
from ..points import Point
from ..visible import visible
from .base import BASELINE, Attention, AttentionWithLse, Contender


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T) v with every product in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, seqlen, dim]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.softmax(scores, -1) @ v
    return out.transpose(1, 2), scores


class Plain(Contender):
    name = "plain"
    title = "PyTorch, written out"
    role = BASELINE
    features = frozenset({"softcap"})
    needs = "nothing; memory grows with the square of the sequence"

    def build(self, point: Point, inputs: Inputs) -> Attention:
        with_lse = self._build(point, inputs, want_lse=False)
        return lambda q, k, v: with_lse(q, k, v)[0]

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        return self._build(point, inputs, want_lse=True)

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> AttentionWithLse:
        device = inputs.q.device
        masks = {
            shape: visible(*shape, point.bounds, device) for shape in sorted(set(point.documents))
        }

        def dense(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            mask = masks[q.shape[1], k.shape[1]]
            out, scores = plain_attention(q, k, v, mask, point.softcap)
            return out, torch.logsumexp(scores.float(), -1) if want_lse else scores

        def packed(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            parts = [
                dense(*document)
                for document in zip(
                    *(x[None].split(list(point.lengths), 1) for x in (q, k, v)), strict=True
                )
            ]
            out = torch.cat([part[0] for part in parts], 1)[0]
            return out, torch.cat([part[1] for part in parts], -1)[0] if want_lse else out

        return packed if point.varlen else dense
