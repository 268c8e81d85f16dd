"""A call with a KV cache in its steps: append, rotate, attend.

Plain PyTorch around `attention` and `attention_varlen`. A kernel that reads pages, appends and
splits keys takes `CacheCall` and returns what `attend_to_cache` does.

The steps read no lengths on the host where these are on a GPU, with one exception: with a table of
pages outside of a CUDA graph, the longest sequence decides how many pages are copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import attention
from .pages import check_entries, check_room, gather
from .rotary import places_in, rotate
from .spans import Spans, attend_spans, equal_spans, spans_of


class CacheCall(NamedTuple):
    """What a call with a cache consists of, checked."""

    name: str  # the function that was called
    table_label: str  # what it calls `table`
    q: Tensor  # [batch, seqlen_q, heads, head_dim], or packed [total_q, heads, head_dim]
    k_cache: Tensor  # [cached sequences, room, heads_kv, head_dim], or pages of the same form
    v_cache: Tensor  # [..., head_dim_v]
    lengths: int | Tensor  # how many tokens of each sequence are in the cache; [batch]
    options: dict[str, Any]  # of `attention`: scale, causal, window, softcap, alibi_slopes
    k: Tensor | None = None  # new keys [batch, seqlen_new, heads_kv, head_dim], or packed
    v: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # of packed queries
    max_seqlen_q: int = 0
    cu_seqlens_new: Tensor | None = None  # of packed new keys
    cos: Tensor | None = None  # [positions, rotary_dim / 2]
    sin: Tensor | None = None
    interleaved: bool = True
    rotary_lengths: int | Tensor | None = None  # in the place of `lengths` for angles
    batch_idx: Tensor | None = None  # [batch], which cached sequence, or row of the table
    leftpad: Tensor | None = None  # [batch], the first token of each sequence
    table: Tensor | None = None  # [cached sequences, pages of a sequence]
    qv: Tensor | None = None  # like q with v's head dim: qv·v joins the scores
    chunk: int = 0  # keys of a query's own chunk only; 0 for all

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def rows_of_table(self) -> Tensor | None:
        """The table, of the sequences of this call."""
        if self.table is None or self.batch_idx is None:
            return self.table
        return self.table[self.batch_idx]

    @property
    def room(self) -> int:
        """How many tokens of a sequence there is room for."""
        pages = 1 if self.table is None else self.table.shape[1]
        return pages * self.k_cache.shape[1]


@torch.no_grad()
def attend_to_cache(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Appends the new keys and values, and returns output and LSE of attention to all.

    Raises:
        ValueError: a sequence has no room for its new tokens.
        RuntimeError: it has none in the table.
    """
    new = _new_lengths(call)
    longest = _check_lengths(call, new)
    if call.k is not None:
        _append(call, is_checked=longest is not None and not _has_table_on_gpu(call))
    q = call.q if call.cos is None else _rotated_queries(call)
    if isinstance(call.lengths, int) and isinstance(new, int):
        total: int | Tensor = call.lengths + new
        if _is_simple(call):
            keys, values = (t[: call.batch, :total] for t in (call.k_cache, call.v_cache))
            return _attend_dense(call, q, keys, values)
    else:
        total = call.lengths + new
    return _attend_packed(call, q, total, call.room if longest is None else longest)


def _is_simple(call: CacheCall) -> bool:
    """Whether queries and keys are slices of one length each, where also the lengths are known."""
    parts = call.table, call.batch_idx, call.leftpad, call.cu_seqlens_q
    return all(part is None for part in parts) and not call.chunk


def _new_lengths(call: CacheCall) -> int | Tensor:
    """How many tokens of each sequence are appended."""
    if call.k is None:
        return 0
    return call.k.shape[1] if call.cu_seqlens_new is None else call.cu_seqlens_new.diff()


def _check_lengths(call: CacheCall, new: int | Tensor) -> int | None:
    """The longest sequence with its new tokens, checked against the room that there is; None where
    the host cannot know it, or would have to wait for a GPU for no other reason."""
    known = [value for value in (call.lengths, new) if isinstance(value, Tensor)]
    if known and (
        torch.compiler.is_compiling()
        or (known[0].is_cuda and (call.table is None or torch.cuda.is_current_stream_capturing()))
    ):
        return None
    total = call.lengths + new
    lengths = total.tolist() if isinstance(total, Tensor) else [total] * call.batch
    longest = max(lengths, default=0)
    rows = call.rows_of_table
    if call.table is not None and rows is not None:
        page_size = call.k_cache.shape[1]
        check_room(call.name, call.table_label, call.table, page_size, longest)
        if not rows.is_cuda:
            pages = call.k_cache.shape[0]
            check_entries(call.name, call.table_label, rows, page_size, pages, lengths)
    elif longest > call.room:
        raise ValueError(
            f"{call.name}: cache_seqlens and the new tokens make {longest}, expected at most "
            f"{call.room} (the tokens that k_cache has room for)"
        )
    return longest


def _has_table_on_gpu(call: CacheCall) -> bool:
    """Whether there is a table whose entries the host does not check."""
    return call.table is not None and call.table.is_cuda


def _append(call: CacheCall, is_checked: bool) -> None:
    """Writes k, turned where there are angles, and v to their places in the cache."""
    assert call.k is not None
    assert call.v is not None
    k, v = call.k, call.v
    sequence, place = _places(call, k, call.cu_seqlens_new)
    if call.cos is not None and call.sin is not None:
        angles = place + _of_each(_angle_lengths(call), sequence)
        k = rotate(call.name, k, call.cos, call.sin, angles, call.interleaved)
    position = place + _of_each(call.lengths, sequence)
    if not is_checked:
        _append_what_fits(call, k, v, sequence, place, position)
        return
    if call.cu_seqlens_new is not None:
        rows = slice(int(call.cu_seqlens_new[-1]))  # what follows belongs to no sequence
        k, v, sequence, position = k[rows], v[rows], sequence[rows], position[rows]
    where = _slots(call, sequence, position)
    call.k_cache.index_put_(where, k)
    call.v_cache.index_put_(where, v)


def _append_what_fits(
    call: CacheCall, k: Tensor, v: Tensor, sequence: Tensor, place: Tensor, position: Tensor
) -> None:
    """Writes tokens to their places where the host has not seen these. A token without a place
    repeats the write of its sequence's first token; where that has none either, what the cache
    holds is written back."""
    if call.cu_seqlens_new is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        sequence, place, position = (t.flatten() for t in (sequence, place, position))
    row = torch.arange(k.shape[0], device=k.device)
    exists = position < call.room
    if call.cu_seqlens_new is not None:  # rows after the last sequence repeat its last row
        count = call.cu_seqlens_new[-1]
        exists = exists & (count > 0)
        row = row.minimum(count - 1).clamp(min=0)
    row = torch.where(exists[row], row, row - place[row]).clamp(min=0)
    slot, offset = _slots(call, sequence[row], position[row].clamp(max=call.room - 1))
    slots = call.k_cache.shape[0]
    exists = exists[row] & (slot >= 0) & (slot < slots)
    where = slot.clamp(0, slots - 1), offset
    for cache, values in ((call.k_cache, k), (call.v_cache, v)):
        kept = torch.where(exists[:, None, None], values[row], cache[where])
        cache.index_put_(where, kept)


def _slots(call: CacheCall, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the cache the tokens at `position` of `sequence` lie: the first two indices."""
    rows = call.rows_of_table
    if rows is not None:
        page_size = call.k_cache.shape[1]
        return rows[sequence, position // page_size].long(), position % page_size
    return (sequence if call.batch_idx is None else call.batch_idx[sequence].long()), position


def _places(call: CacheCall, tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each token `[batch, seqlen]`, or `[total]` where packed, the sequence and its place."""
    if cu_seqlens is not None:
        return places_in(cu_seqlens, tokens.shape[0])
    batch, seqlen = tokens.shape[:2]
    device = tokens.device
    shape = batch, seqlen
    return (
        torch.arange(batch, device=device)[:, None].expand(shape),
        torch.arange(seqlen, device=device).expand(shape),
    )


def _of_each(lengths: int | Tensor, sequence: Tensor) -> int | Tensor:
    return lengths if isinstance(lengths, int) else lengths[sequence]


def _angle_lengths(call: CacheCall) -> int | Tensor:
    return call.lengths if call.rotary_lengths is None else call.rotary_lengths


def _rotated_queries(call: CacheCall) -> Tensor:
    """q turned: query i by the angle of the i-th new key where a mask tells queries apart, else all
    by that of the first."""
    assert call.cos is not None
    assert call.sin is not None
    sequence, place = _places(call, call.q, call.cu_seqlens_q)
    first = _of_each(_angle_lengths(call), sequence)
    is_masked = call.options.get("causal") or call.options.get("window") or call.chunk
    angles = first + (place if is_masked else torch.zeros_like(place))
    return rotate(call.name, call.q, call.cos, call.sin, angles, call.interleaved)


def _joined(call: CacheCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, with qv and v beside them where qv·v joins the scores."""
    if call.qv is None:
        return q, k
    return torch.cat((q, call.qv), -1), torch.cat((k, v), -1)


def _attend_dense(call: CacheCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k = _joined(call, q, k, v)
    return attention(q, k, v, return_lse=True, **call.options)


def _attend_packed(
    call: CacheCall, q: Tensor, total: int | Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """The sequences as packed ones, with gaps where the cache has more room than tokens."""
    batch, device = call.batch, q.device
    keys, values = (_rows(call, cache, longest) for cache in (call.k_cache, call.v_cache))
    room = keys.shape[1]
    starts = torch.arange(batch, device=device) * room
    ends = starts + (min(total, room) if isinstance(total, int) else total.clamp(0, room))
    gap = room
    if call.leftpad is not None:
        starts, gap = torch.minimum(starts + call.leftpad, ends), 2 * room
    spans = Spans(starts, ends, min(longest, room), gap)
    if call.cu_seqlens_q is not None:
        queries = spans_of(call.cu_seqlens_q, call.max_seqlen_q)
    else:
        queries = equal_spans(batch, q.shape[1], device)
    packed = call.cu_seqlens_q is not None
    rows = q if packed else q.flatten(0, 1)
    side = call.qv if packed or call.qv is None else call.qv.flatten(0, 1)
    rows, joined = _joined(call._replace(qv=side), rows, keys.flatten(0, 1), values.flatten(0, 1))
    out, lse = attend_spans(
        rows, joined, values.flatten(0, 1), queries, spans, call.options, call.chunk
    )
    if packed:
        return out, lse
    shape = batch, q.shape[1]
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()


def _rows(call: CacheCall, cache: Tensor, longest: int) -> Tensor:
    """The tokens of the sequences of this call, `[batch, room, heads_kv, dim]`: the cache itself,
    or a copy of what a table or `batch_idx` names."""
    rows = call.rows_of_table
    if rows is not None:
        return gather(cache, rows, longest)
    if call.batch_idx is not None:
        return cache[:, :longest].index_select(0, call.batch_idx)
    return cache[: call.batch]
