"""New keys and values written to a cache, and queries turned, by PyTorch's operations: where the
kernel that does both does not know the call (`in_place.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache_arguments import CacheArguments
from ..semantics.fp8 import movable, rounded
from ..semantics.rotary import places_in, rotate
from .checked import NAME


def total_lengths(call: CacheArguments) -> Tensor:
    """How many tokens each sequence has with its new ones."""
    if call.k is None:
        return call.cache_seqlens
    new = call.k.shape[1] if call.cu_seqlens_k_new is None else call.cu_seqlens_k_new.diff()
    return call.cache_seqlens + new


def table_of(call: CacheArguments) -> Tensor | None:
    """The table, of the sequences of this call."""
    if call.block_table is None or call.cache_batch_idx is None:
        return call.block_table
    return call.block_table[call.cache_batch_idx]


def append(call: CacheArguments) -> None:
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
    table = table_of(call)
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


def rotated_queries(call: CacheArguments) -> Tensor:
    """q turned: query i by the angle of the i-th new key where a mask tells queries apart, else all
    by that of the first."""
    assert call.rotary_cos is not None
    assert call.rotary_sin is not None
    sequence, place = _places(call, call.q, call.cu_seqlens_q)
    angles = _angle_lengths(call)[sequence] + (place if call.is_masked else torch.zeros_like(place))
    turn = call.rotary_cos, call.rotary_sin, angles, call.rotary_interleaved
    return rotate(NAME, call.q, *turn)
