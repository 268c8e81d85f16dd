"""The ops of kernels for a call with a KV cache: append and rotate by PyTorch's operations, then
attend by a kernel.

The kernel reads the cache where it lies (`in_place.py`) unless the call has something that it does
not know. Then it gets packed sequences, as `attention_varlen` does: a contiguous cache with gaps
between the sequences, of `cache_batch_idx` a copy of the rows that it names, of a table a copy of
all pages that it has entries for (up to `max_seqlen_k`, where that is given), of `qv` one of keys
and values beside each other, unless they are so wide that a kernel reads `qv` (`latent.py`).
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..ops.cache import implement
from ..semantics.fp8 import movable, rounded, widened
from ..semantics.rotary import places_in, rotate
from .checked import NAME
from .in_place import attend_in_place, obstacle
from .spans import Spans, attend_spans, equal_spans, spans_of


@torch.no_grad()
def lowered_forward(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """Appends the new keys and values, and returns output and LSE of attention to all. What has no
    place in the cache is not written."""
    with torch.autocast(call.q.device.type, enabled=False):
        if call.batch == 0:
            return _nothing(call)
        if call.k is not None:
            _append(call)
        q = call.q if call.rotary_cos is None else _rotated_queries(call)
        total = call.cache_seqlens + _new_lengths(call)
        in_place = call.backend != "reference" and not obstacle(call)
        return (attend_in_place if in_place else _attend_packed)(call, q, total)


def _nothing(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """The results of a batch without sequences."""
    q = call.q
    heads = q.shape[-2]
    shape = (heads, q.shape[0]) if call.packed else (0, heads, q.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], call.v_cache.shape[-1])
    return out, q.new_full(shape, -torch.inf, dtype=dtype)


def _new_lengths(call: CacheArguments) -> int | Tensor:
    """How many tokens of each sequence are appended."""
    if call.k is None:
        return 0
    return call.k.shape[1] if call.cu_seqlens_k_new is None else call.cu_seqlens_k_new.diff()


def _table(call: CacheArguments) -> Tensor | None:
    """The table, of the sequences of this call."""
    if call.block_table is None or call.cache_batch_idx is None:
        return call.block_table
    return call.block_table[call.cache_batch_idx]


def _append(call: CacheArguments) -> None:
    """Writes k, turned where there are angles, and v to their places in the cache."""
    assert call.k is not None
    assert call.v is not None
    k, v = call.k, call.v
    sequence, place = _places(call, k, call.cu_seqlens_k_new)
    if call.rotary_cos is not None and call.rotary_sin is not None:
        angles = place + _angle_lengths(call)[sequence]
        turn = call.rotary_cos, call.rotary_sin, angles, call.rotary_interleaved
        k = rotate(NAME, k, *turn)
    position = place + call.cache_seqlens[sequence]
    if call.cu_seqlens_k_new is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        sequence, place, position = (t.flatten() for t in (sequence, place, position))
    if k.shape[0]:
        _write(call, (k, v), sequence, place, position)


def _write(
    call: CacheArguments,
    new: tuple[Tensor, Tensor],
    sequence: Tensor,
    place: Tensor,
    position: Tensor,
) -> None:
    """Writes rows of tokens to the positions of their sequences, which the host has not seen. A
    token without a place repeats the write of its sequence's first token; where that has none
    either, what the cache holds is written back."""
    row = torch.arange(new[0].shape[0], device=new[0].device)
    exists = position < call.room
    if call.cu_seqlens_k_new is not None:  # rows after the last sequence repeat its last row
        count = call.cu_seqlens_k_new[-1]
        exists = exists & (count > 0)
        row = row.minimum(count - 1).clamp(min=0)
    row = torch.where(exists[row], row, row - place[row]).clamp(min=0)
    slot, offset = _slots(call, sequence[row], position[row].clamp(max=call.room - 1))
    slots = call.k_cache.shape[0]
    exists = exists[row] & (slot >= 0) & (slot < slots)
    where = slot.clamp(0, slots - 1), offset
    for cache, values in zip((call.k_cache, call.v_cache), new, strict=True):
        into = movable(cache)
        kept = torch.where(exists[:, None, None], rounded(values, cache)[row], into[where])
        into.index_put_(where, kept)


def _slots(call: CacheArguments, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the cache the tokens at `position` of `sequence` lie: the first two indices."""
    table = _table(call)
    if table is not None:
        page_size = call.k_cache.shape[1]
        return table[sequence, position // page_size].long(), position % page_size
    index = call.cache_batch_idx
    return (sequence if index is None else index[sequence].long()), position


def _places(
    call: CacheArguments, tokens: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of each token `[batch, seqlen]`, or `[total]` where packed, the sequence and its place."""
    if cu_seqlens is not None:
        return places_in(cu_seqlens, tokens.shape[0])
    shape = batch, seqlen = tokens.shape[:2]
    device = tokens.device
    return (
        torch.arange(batch, device=device)[:, None].expand(shape),
        torch.arange(seqlen, device=device).expand(shape),
    )


def _angle_lengths(call: CacheArguments) -> Tensor:
    return call.cache_seqlens if call.rotary_seqlens is None else call.rotary_seqlens


def _rotated_queries(call: CacheArguments) -> Tensor:
    """q turned: query i by the angle of the i-th new key where a mask tells queries apart, else all
    by that of the first."""
    assert call.rotary_cos is not None
    assert call.rotary_sin is not None
    sequence, place = _places(call, call.q, call.cu_seqlens_q)
    angles = _angle_lengths(call)[sequence] + (place if call.is_masked else torch.zeros_like(place))
    turn = call.rotary_cos, call.rotary_sin, angles, call.rotary_interleaved
    return rotate(NAME, call.q, *turn)


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
    if call.qv is not None:
        q = torch.cat((q, call.qv), -1)
    rows = q if call.packed else q.flatten(0, 1)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    joined = keys if call.qv is None else torch.cat((keys, values), -1)
    chunk = call.attention_chunk
    out, lse = attend_spans(rows, joined, values, queries, spans, _options(call), chunk)
    if call.packed:
        return out, lse
    shape = batch, q.shape[1]
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()


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
    table = _table(call)
    if table is not None:
        needed = table[:, : -(-longest // cache.shape[1])].clamp(0, max(cache.shape[0] - 1, 0))
        return cache[needed].flatten(1, 2)
    if call.cache_batch_idx is not None:
        return cache[:, :longest].index_select(0, call.cache_batch_idx)
    return cache[: call.batch]


implement("", lowered_forward, "CUDA")
