"""FlexAttention, compiled: the Triton kernel that torch.compile writes for a mask given as a
function."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from ..inputs import Inputs
from ..points import Point
from .base import Attention, AttentionWithLse, Contender


class Flex(Contender):
    name = "flex"
    title = "FlexAttention"
    needs = "torch.compile: Triton on a GPU, a C++ compiler on a CPU (forward alone)"

    def refuses(self, point: Point, direction: str) -> str | None:
        if point.deterministic and direction != "fwd":
            return "FlexAttention has no deterministic switch"
        return None

    def build(self, point: Point, inputs: Inputs) -> Attention:
        return self._build(point, inputs, want_lse=False)

    def build_with_lse(self, point: Point, inputs: Inputs) -> AttentionWithLse:
        return self._build(point, inputs, want_lse=True)

    def _build(self, point: Point, inputs: Inputs, want_lse: bool) -> Any:
        # Each point is a new graph, and torch.compile gives up after a number of graphs.
        torch.compiler.reset()
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        options: dict[str, Any] = {
            "block_mask": _block_mask(point, inputs),
            "enable_gqa": point.heads != point.heads_kv,
        }
        if point.softcap:
            options["score_mod"] = _softcap(point.softcap)
        if want_lse:
            options["return_aux"] = AuxRequest(lse=True)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            if point.varlen:
                q, k, v = q[None], k[None], v[None]
            result = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            out, lse = (result[0], result[1].lse) if want_lse else (result, None)
            out = out.transpose(1, 2)
            if point.varlen:
                out, lse = out[0], None if lse is None else lse[0]
            return (out, lse) if want_lse else out

        return call


def _softcap(cap: float) -> Any:
    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return score_mod


def _block_mask(point: Point, inputs: Inputs) -> BlockMask | None:
    """The mask as FlexAttention wants it; None where every key is visible."""
    left, right = point.bounds
    if point.mask == "full" and not point.varlen:
        return None
    device = inputs.q.device
    offset = point.seqlen_k - point.seqlen_q
    document = None
    if point.varlen:
        lengths = torch.tensor(point.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key >= 0
        if left is not None:
            seen = seen & (key >= query + offset - left)
        if right is not None:
            seen = seen & (key <= query + offset + right)
        if document is not None:
            seen = seen & (document[query] == document[key])
        return seen

    return create_block_mask(mask_mod, None, None, point.seqlen_q, point.seqlen_k, device=device)
