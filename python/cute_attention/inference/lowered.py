"""The ops of kernels for a call with a KV cache: append and rotate, then attend.

Kernels do all of it where the cache lies (`in_place.py`), unless the call has something that they
do not know. What they cannot write PyTorch's operations do (`append.py`). What they cannot read
becomes packed sequences, as those of `attention_varlen`: a contiguous cache with gaps between the
sequences, of `cache_batch_idx` a copy of the rows that it names, of a table a copy of all pages
that it has entries for (up to `max_seqlen_k`, where that is given), of `qv` one of keys and values
beside each other, unless they are so wide that a kernel reads `qv` (`latent.py`). Nothing here
waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..ops.cache import implement
from ..semantics.fp8 import movable, widened
from ..semantics.rotary import places_in
from .append import append, rotated_queries, table_of, total_lengths
from .in_place import appends, attend_in_place, obstacle
from .spans import Spans, attend_spans, equal_spans, spans_of


@torch.no_grad()
def lowered_forward(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """Appends the new keys and values, and returns output and LSE of attention to all. What has no
    place in the cache is not written."""
    with torch.autocast(call.q.device.type, enabled=False):
        if call.batch == 0:
            return _nothing(call)
        in_place = call.backend != "reference" and not obstacle(call)
        if in_place and appends(call):
            return attend_in_place(call, call.q, call.cache_seqlens, appending=True)
        if call.k is not None:
            append(call)
        q = call.q if call.rotary_cos is None else rotated_queries(call)
        total = total_lengths(call)
        return attend_in_place(call, q, total) if in_place else _attend_packed(call, q, total)


def _nothing(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """The results of a batch without sequences."""
    q = call.q
    heads = q.shape[-2]
    shape = (heads, q.shape[0]) if call.packed else (0, heads, q.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], call.v_cache.shape[-1])
    return out, q.new_full(shape, -torch.inf, dtype=dtype)


def _attend_packed(call: CacheArguments, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences as packed ones, with gaps where the cache has more room than tokens."""
    batch, device = call.batch, q.device
    longest = min(call.max_seqlen_k or call.room, call.room)
    keys, values = (
        widened(_rows(call, movable(cache), longest), q.dtype)
        for cache in (call.k_cache, call.v_cache)
    )
    room = keys.shape[1]
    starts = torch.arange(batch, device=device) * room
    ends = starts + total.clamp(0, room)
    gap = room
    if call.leftpad is not None:
        starts, gap = torch.minimum(starts + call.leftpad, ends), 2 * room
    spans = Spans(starts, ends, min(longest, room), gap)
    if call.cu_seqlens_q is not None:
        queries = spans_of(call.cu_seqlens_q, call.max_seqlen_q)
    else:
        queries = equal_spans(batch, q.shape[1], device)
    if call.block_table is not None and call.window[0] is not None:
        first = total.long() - queries.lengths - call.window[0]
        values = values.masked_fill(_before(first, room), 0)
    if call.qv is not None:
        q = torch.cat((q, call.qv), -1)
    rows = q if call.packed else q.flatten(0, 1)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    joined = keys if call.qv is None else torch.cat((keys, values), -1)
    chunk = call.attention_chunk
    out, lse = attend_spans(rows, joined, values, queries, spans, _options(call), chunk)
    if room < call.room:
        beyond = _of_longer(call, total, room, rows.shape[0])
        out.masked_fill_(beyond[:, None, None], torch.nan)
        lse.masked_fill_(beyond, torch.nan)
    if call.packed:
        return out, lse
    shape = batch, q.shape[1]
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()


def _of_longer(call: CacheArguments, total: Tensor, room: int, rows: int) -> Tensor:
    """Which of the rows of queries belong to a sequence of more than `room` tokens, of which the
    copies have the first alone, bool `[rows]`."""
    longer = total > room
    if call.cu_seqlens_q is None:
        return longer.repeat_interleave(rows // call.batch, output_size=rows)
    sequence, _ = places_in(call.cu_seqlens_q, rows)
    inside = torch.arange(rows, device=longer.device) < call.cu_seqlens_q[-1]
    return longer[sequence] & inside


def _before(first: Tensor, room: int) -> Tensor:
    """Where tokens `[batch, room, 1, 1]` lie before token `first`, `[batch]`, of their sequence. A
    table may have anything for pages before the first token that a window shows, NaN as well: with
    a probability of 0 it would be NaN in the output."""
    return (torch.arange(room, device=first.device) < first[:, None])[..., None, None]


def _options(call: CacheArguments) -> dict[str, Any]:
    """Those of `attention_varlen`; fewer options take less time."""
    options: dict[str, Any] = {"scale": call.scale, "backend": call.backend}
    if call.window != (None, None):
        options["window"] = call.window
    if call.softcap:
        options["softcap"] = call.softcap
    for name in ("alibi_slopes", "sink"):
        if getattr(call, name) is not None:
            options[name] = getattr(call, name)
    return options


def _rows(call: CacheArguments, cache: Tensor, longest: int) -> Tensor:
    """The tokens of the sequences of this call, `[batch, room, heads_kv, dim]`: the cache itself,
    or a copy of what a table or `cache_batch_idx` names. Entries of the table for pages that a
    sequence does not need may hold anything."""
    table = table_of(call)
    if table is not None:
        needed = table[:, : -(-longest // cache.shape[1])].clamp(0, max(cache.shape[0] - 1, 0))
        return cache[needed].flatten(1, 2)
    if call.cache_batch_idx is not None:
        return cache[:, :longest].index_select(0, call.cache_batch_idx)
    return cache[: call.batch]


implement("", lowered_forward, "CUDA")
