"""Packed queries with keys from pages, as flash_attn_varlen_func takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import tensors
from .pages import check_integers, check_room, check_table, gather
from .spans import Spans, attend_spans, spans_of


def attend_pages(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Tensor, Tensor, int, int],
    block_table: Tensor,
    options: dict[str, Any],
    leftpad: Tensor | None = None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE, without a gradient. The pages of all sequences are copied into one tensor,
    `[batch, max_seqlen_k up to whole pages, heads_kv, head_dim]`.

    Args:
        name: the function that was called.
        q: queries `[total_q, heads, head_dim]`.
        k: pages of keys `[pages, page_size, heads_kv, head_dim]`.
        v: pages of values, likewise.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
        block_table: int32 `[batch, pages of a sequence]`.
        options: of `attention_varlen`.
        leftpad: the first key of each sequence, `[batch]`; None for 0.
        used: how many keys each sequence has, `[batch]`; None for what cu_seqlens_k says.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    tensors(name, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_table(name, "block_table", block_table, q.device)
    batch = cu_seqlens_q.shape[0] - 1
    check_integers(name, "cu_seqlens_q", cu_seqlens_q, batch + 1, q.device)
    check_integers(name, "cu_seqlens_k", cu_seqlens_k, batch + 1, q.device)
    if block_table.shape[0] != batch:
        raise ValueError(
            f"{name}: block_table has shape {list(block_table.shape)}, expected [{batch}, pages of "
            "a sequence] (as many rows as sequences)"
        )
    for label, pages in (("k", k), ("v", v)):
        if pages.dim() != 4:
            raise ValueError(
                f"{name}: {label} has shape {list(pages.shape)}, expected [pages, page_size, "
                "heads_kv, head_dim] with a block_table"
            )
    check_room(name, "block_table", block_table, k.shape[1], max_seqlen_k)
    with torch.no_grad():
        keys, values = (gather(pages, block_table, max_seqlen_k) for pages in (k, v))
        room = keys.shape[1]
        lengths = cu_seqlens_k.diff() if used is None else used
        starts = torch.arange(batch, device=q.device) * room
        ends = starts + lengths.clamp(max=room)
        if leftpad is not None:
            starts = torch.minimum(starts + leftpad, ends)
        spans = Spans(starts, ends, max_seqlen_k, gap=room * (1 if leftpad is None else 2))
        queries = spans_of(cu_seqlens_q, max_seqlen_q)
        return attend_spans(q, keys.flatten(0, 1), values.flatten(0, 1), queries, spans, options)
