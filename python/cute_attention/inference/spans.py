"""Packed sequences with gaps between them, and attention in chunks, through `attention_varlen`.

`attention_varlen` takes sequences that follow each other without gaps. Rows between two sequences
become sequences of their own: of queries without keys, whose output is 0, and of keys without
queries, which nobody reads. So a part of a tensor can be attended to without a copy of it, and
without knowing on the host where it lies.

A chunk of attention is a sequence, too. A query at position p (counted as keys are, so that the
last query stands at the last key) sees keys of its own chunk only, from `chunk * (p // chunk)` on.
The queries of a chunk end with its last key, or with the last of all. So they are a sequence whose
masks are aligned to the bottom right as they were, and no score of another chunk is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api import attention_varlen


class Spans(NamedTuple):
    """Where sequences lie in a packed tensor: sequence b from `starts[b]` to before `ends[b]`, each
    after the one before."""

    starts: Tensor  # [batch], integers
    ends: Tensor  # [batch]
    longest: int  # at least the length of the longest sequence
    gap: int = 0  # at least the rows between two sequences and before the first; 0 for none

    @property
    def lengths(self) -> Tensor:
        """`[batch]`."""
        return self.ends - self.starts


def spans_of(cu_seqlens: Tensor, longest: int, used: Tensor | None = None) -> Spans:
    """The sequences of `cu_seqlens`; of each only the first `used` rows, where it is given."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if used is None:
        return Spans(starts, ends, longest)
    return Spans(starts, torch.minimum(starts + used, ends), longest, gap=longest)


def equal_spans(batch: int, length: int, device: torch.device) -> Spans:
    """Sequences of one length, one after the other."""
    ends = torch.arange(1, batch + 1, device=device) * length
    return Spans(ends - length, ends, length)


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Spans,
    keys: Spans,
    options: dict[str, Any],
    chunk: int = 0,
    blind: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's queries to its keys.

    Args:
        q: `[total_q, heads, head_dim]`.
        k: `[total_k, heads_kv, head_dim]`.
        v: `[total_k, heads_kv, head_dim_v]`.
        queries: where the sequences lie in q.
        keys: where they lie in k and v.
        options: of `attention_varlen`.
        chunk: the length of chunks; 0 for none.
        blind: at least how many queries of a sequence stand before its first key; None for the
            length of the longest.

    Returns:
        `out [total_q, heads, head_dim_v]` and `lse [heads, total_q]`; rows of no sequence are 0 and
        -inf.
    """
    rows_q, rows_k, longest_q, longest_k, pieces = packing_of_spans(queries, keys, chunk, blind)
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2 and pieces > 1:
        options = {**options, "alibi_slopes": slopes.repeat_interleave(pieces, 0)}
    return attention_varlen(
        q, k, v, rows_q, rows_k, longest_q, longest_k, return_lse=True, **options
    )


def packing_of_spans(
    queries: Spans, keys: Spans, chunk: int = 0, blind: int | None = None
) -> tuple[Tensor, Tensor, int, int, int]:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the sequences that
    `attention_varlen` gets, and of how many of them each sequence consists. Arguments as above."""
    rows_q, rows_k, pieces = _ends(queries, keys, chunk, blind)
    longest_q, longest_k = queries.longest, keys.longest
    if chunk:
        longest_q, longest_k = min(chunk, longest_q), min(chunk, longest_k)
    return rows_q, rows_k, max(longest_q, queries.gap), max(longest_k, keys.gap), pieces


def _ends(queries: Spans, keys: Spans, chunk: int, blind: int | None) -> tuple[Tensor, Tensor, int]:
    """cu_seqlens_q and cu_seqlens_k, and of how many pieces each sequence consists in them."""
    starts_q, starts_k = queries.starts[:, None], keys.starts[:, None]
    ends_q, ends_k = queries.ends[:, None], keys.ends[:, None]
    # Of each sequence the ends of its pieces, in both tensors.
    columns_q, columns_k = [], []
    if queries.gap:  # queries before the sequence
        columns_q.append(starts_q)
        columns_k.append(pad(keys.ends[:-1], (1, 0))[:, None] if keys.gap else starts_k)
    if keys.gap:  # keys before it
        columns_q.append(starts_q)
        columns_k.append(starts_k)
    limits = _limits(queries, keys, chunk, blind)
    if limits is not None:
        places = limits - (keys.lengths - queries.lengths)[:, None]
        columns_q.append(starts_q + places.clamp(min=0).minimum(ends_q - starts_q))
        columns_k.append(starts_k + limits.clamp(min=0).minimum(ends_k - starts_k))
    columns_q.append(ends_q)
    columns_k.append(ends_k)
    rows_q, rows_k = (
        pad(torch.cat(columns, 1).flatten(), (1, 0)).int() for columns in (columns_q, columns_k)
    )
    batch = queries.starts.shape[0]
    return rows_q, rows_k, (rows_q.shape[0] - 1) // batch if batch else 1


def _limits(queries: Spans, keys: Spans, chunk: int, blind: int | None) -> Tensor | None:
    """The positions inside of any sequence at which a chunk begins."""
    if not chunk:
        return None
    before = -(-(queries.longest if blind is None else blind) // chunk)
    after = -(-keys.longest // chunk)
    if before + after <= 1:
        return None
    # A chunk longer than 2**30 begins at 0 alone.
    steps = torch.arange(1 - before, after, device=queries.starts.device)
    return steps * min(chunk, 2**30)
