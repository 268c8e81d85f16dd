"""Packed queries with keys from pages, as flash_attn_varlen_func takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import tensors
from ...inference.api import attention_with_cache
from .arguments import renamed
from .pages import check_integers, check_room, int32

# What arguments of `attention_with_cache` are called here.
_LABELS = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k", "leftpad": "leftpad_k"}


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
    """Output and LSE, without a gradient.

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
    tensors(name, q=q, k=k, v=v, block_table=block_table)
    tensors(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    batch = cu_seqlens_q.shape[0] - 1
    check_integers(name, "cu_seqlens_k", cu_seqlens_k, batch + 1, q.device)
    for label, pages in (("k", k), ("v", v)):
        if pages.dim() != 4:
            raise ValueError(
                f"{name}: {label} has shape {list(pages.shape)}, expected [pages, page_size, "
                "heads_kv, head_dim] with a block_table"
            )
    if block_table.dim() == 2:
        if block_table.shape[0] != batch:
            raise ValueError(
                f"{name}: block_table has shape {list(block_table.shape)}, expected [{batch}, "
                "pages of a sequence] (as many rows as sequences)"
            )
        check_room(name, "block_table", block_table, k.shape[1], max_seqlen_k)
    given = {key: value for key, value in options.items() if key != "deterministic"}
    try:
        with torch.no_grad():
            return attention_with_cache(
                q,
                k,
                v,
                int32(cu_seqlens_k.diff() if used is None else used),
                block_table=int32(block_table),
                cu_seqlens_q=int32(cu_seqlens_q),
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                leftpad=int32(leftpad),
                return_lse=True,
                **given,
            )
    except (TypeError, ValueError) as error:
        raise renamed(name, error, _LABELS) from None
