"""The `reference` backend of calls with a KV cache: append, rotate, attend, sequence by sequence.

It reads all lengths on the host, and of the cache nothing but the tokens that a call sees: entries
of `block_table` for pages that lie behind the last token, or before the window of the first query,
are not looked at. Sequence b has the tokens from `leftpad[b]` to before `cache_seqlens[b]` plus its
new ones. Its queries stand at its last tokens, and masks and ALiBi count from `leftpad[b]`. So each
sequence is a call of `attention` by itself, and its output does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Arguments
from ..cache_arguments import CacheArguments
from ..errors import PageError
from .blockwise import blockwise_forward
from .formula import compute_dtype
from .fp8 import movable, rounded, widened
from .invariant import invariant_forward
from .rotary import rotate

_NAME = "attention_with_cache"


class Sequence(NamedTuple):
    """Where the tokens of a sequence lie, in numbers of the host."""

    place: int  # in the batch
    row: int  # of the cache, or of the table
    queries: tuple[int, int]  # rows of packed queries; (0, seqlen_q) where dense
    new: tuple[int, int]  # rows of packed new keys; (0, seqlen_new) where dense
    cached: int  # tokens before this call
    start: int  # the first token that is not padding
    angle: int  # the position of the first new token, to rotary embeddings

    @property
    def total(self) -> int:
        """Tokens in the end, padding included."""
        return self.cached + self.new[1] - self.new[0]


@torch.no_grad()
def cached_forward(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """Writes the new keys and values into the caches, and returns output and LSE of attention to
    all.

    Returns:
        `out` like q with v's head dim, contiguous, in q's dtype; `lse` `[batch, heads, seqlen_q]`,
        packed `[heads, total_q]`, float32 (float64 where q is).

    Raises:
        ValueError: a length is out of range, or a sequence has no room for its new tokens.
        PageError: the table is too short for a sequence, or names no page where one is needed.
    """
    q = call.q
    sequences = read_lengths(call)
    out = q.new_zeros(*q.shape[:-1], call.v_cache.shape[-1])
    heads_first = (q.shape[1], q.shape[0]) if call.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_full(heads_first, -torch.inf, dtype=compute_dtype(q))
    with torch.autocast(q.device.type, enabled=False):
        slots = [_slots(call, each) for each in sequences] if call.k is not None else []
        for each, where in zip(sequences, slots, strict=False):  # all are checked before any write
            _append(call, each, where)
        for each in sequences:
            _attend(call, each, out, lse)
    return out, lse


def read_lengths(call: CacheArguments) -> list[Sequence]:
    """The sequences of a call, their lengths checked."""
    batch = call.batch
    cached = _read("cache_seqlens", call.cache_seqlens)
    starts = _read("leftpad", call.leftpad) or [0] * batch
    angles = _read("rotary_seqlens", call.rotary_seqlens) or cached
    rows = _read_rows(call)
    queries = _ranges("cu_seqlens_q", call.cu_seqlens_q, call.q, batch)
    longest = max((end - start for start, end in queries), default=0)
    if call.packed and longest > call.max_seqlen_q:
        raise ValueError(
            f"{_NAME}: max_seqlen_q is {call.max_seqlen_q}, expected at least {longest} (the "
            "longest sequence of cu_seqlens_q)"
        )
    new = _ranges("cu_seqlens_k_new", call.cu_seqlens_k_new, call.k, batch)
    fields = zip(range(batch), rows, queries, new, cached, starts, angles, strict=True)
    sequences = [Sequence(*values) for values in fields]
    _check_room(call, max((each.total for each in sequences), default=0))
    _check_angles(call, sequences)
    return [each._replace(start=min(each.start, each.total)) for each in sequences]


def _read(label: str, values: Tensor | None) -> list[int]:
    """Numbers that are not negative; nothing where there is no tensor."""
    found: list[int] = [] if values is None else values.tolist()
    if min(found, default=0) < 0:
        raise ValueError(f"{_NAME}: {label} is {found}, expected no negative number")
    return found


def _read_rows(call: CacheArguments) -> list[int]:
    """The row of the cache, or of the table, that is each sequence's."""
    if call.cache_batch_idx is None:
        return list(range(call.batch))
    label, tensor = (
        ("k_cache", call.k_cache) if call.block_table is None else ("block_table", call.block_table)
    )
    found: list[int] = call.cache_batch_idx.tolist()
    if not all(0 <= row < tensor.shape[0] for row in found):
        raise ValueError(
            f"{_NAME}: cache_batch_idx is {found}, expected rows of {label} from 0 to "
            f"{tensor.shape[0] - 1}"
        )
    return found


def _ranges(
    label: str, offsets: Tensor | None, rows: Tensor | None, batch: int
) -> list[tuple[int, int]]:
    """The rows of each sequence; (0, length) where there are no offsets."""
    if rows is None:
        return [(0, 0)] * batch
    if offsets is None:
        return [(0, rows.shape[1])] * batch
    ends = _read(label, offsets)
    pairs = list(pairwise(ends))
    if ends[0] != 0 or any(start > end for start, end in pairs) or ends[-1] > rows.shape[0]:
        raise ValueError(
            f"{_NAME}: {label} is {ends}, expected 0 and then the rows at which sequences end, at "
            f"most {rows.shape[0]}"
        )
    return pairs


def _check_room(call: CacheArguments, longest: int) -> None:
    if call.max_seqlen_k and longest > call.max_seqlen_k:
        raise ValueError(
            f"{_NAME}: max_seqlen_k is {call.max_seqlen_k}, expected at least {longest} (the "
            "longest sequence with its new tokens)"
        )
    if longest <= call.room:
        return
    if call.block_table is None:
        raise ValueError(
            f"{_NAME}: cache_seqlens and the new tokens make {longest}, expected at most "
            f"{call.room} (the tokens that k_cache has room for)"
        )
    page = call.k_cache.shape[1]
    raise PageError(
        f"{_NAME}: block_table has shape {list(call.block_table.shape)}, expected [batch, at least "
        f"{-(-longest // page)}]: a sequence has {longest} tokens, a page holds {page}"
    )


def _check_angles(call: CacheArguments, sequences: list[Sequence]) -> None:
    if call.rotary_cos is None:
        return
    needed = 0
    for each in sequences:
        queries = each.queries[1] - each.queries[0]
        turned = max(each.new[1] - each.new[0], queries if call.is_masked else min(queries, 1))
        needed = max(needed, each.angle + turned if turned else 0)
    if needed > call.rotary_cos.shape[0]:
        raise ValueError(
            f"{_NAME}: rotary_cos has {call.rotary_cos.shape[0]} positions, expected at least "
            f"{needed}"
        )


def _pages(call: CacheArguments, each: Sequence, begin: int, end: int) -> Tensor:
    """The pages of the tokens from `begin` to before `end`, in which no other entry of the table is
    read."""
    assert call.block_table is not None
    page, count = call.k_cache.shape[1], call.k_cache.shape[0]
    entries = call.block_table[each.row, begin // page : -(-end // page)]
    wrong = [entry for entry in entries.tolist() if not 0 <= entry < count]
    if wrong:
        raise PageError(
            f"{_NAME}: block_table holds {wrong[0]}, expected pages from 0 to {count - 1}"
        )
    return entries.long()


def _slots(call: CacheArguments, each: Sequence) -> tuple[Tensor, Tensor] | None:
    """Where the new tokens of a sequence go: pages, and places in them; None without pages."""
    if call.block_table is None or each.total == each.cached:
        return None
    page = call.k_cache.shape[1]
    entries = _pages(call, each, each.cached, each.total)
    place = torch.arange(each.cached, each.total, device=entries.device)
    return entries[place // page - each.cached // page], place % page


def _append(call: CacheArguments, each: Sequence, where: tuple[Tensor, Tensor] | None) -> None:
    """Writes the new tokens of a sequence, keys turned where there are angles."""
    if each.total == each.cached:
        return
    k, v = (_of(rows, call.cu_seqlens_k_new, each.place, each.new) for rows in (call.k, call.v))
    if call.rotary_cos is not None:
        k = _turned(call, k, each.angle, each.angle + each.total - each.cached)
    for cache, rows in ((call.k_cache, k), (call.v_cache, v)):
        into, new = movable(cache), rounded(rows, cache)
        if where is not None:
            into.index_put_(where, new)
        else:
            into[each.row, each.cached : each.total].copy_(new)


def _turned(call: CacheArguments, rows: Tensor, first: int, end: int) -> Tensor:
    """`rows` turned by the angles of positions from `first` to before `end`."""
    assert call.rotary_cos is not None
    assert call.rotary_sin is not None
    positions = torch.arange(first, end, device=rows.device)
    cos, sin = call.rotary_cos, call.rotary_sin
    return rotate(_NAME, rows, cos, sin, positions, call.rotary_interleaved)


def _of(rows: Tensor | None, offsets: Tensor | None, index: int, span: tuple[int, int]) -> Tensor:
    """The rows of a sequence, `[length, heads, dim]`."""
    assert rows is not None
    return rows[index] if offsets is None else rows[slice(*span)]


def _keys(call: CacheArguments, each: Sequence, cache: Tensor, begin: int, end: int) -> Tensor:
    """The tokens from `begin` to before `end`, `[1, end - begin, heads_kv, dim]`: of pages a
    copy."""
    if call.block_table is None:
        return cache[each.row, None, begin:end]
    if begin == end:
        return cache[:1, :0]
    first = begin // cache.shape[1] * cache.shape[1]
    found = cache.index_select(0, _pages(call, each, begin, end)).flatten(0, 1)
    return found[None, begin - first : end - first]


def _attend(call: CacheArguments, each: Sequence, out: Tensor, lse: Tensor) -> None:
    """Fills the rows of a sequence in `out` and `lse`."""
    first, end = each.queries
    if first == end:
        return
    q = _of(call.q, call.cu_seqlens_q, each.place, each.queries)
    if call.rotary_cos is not None:
        count = end - first
        if call.is_masked:
            q = _turned(call, q, each.angle, each.angle + count)
        else:  # all queries by one angle
            whole = q.flatten(0, 1)[None]
            q = _turned(call, whole, each.angle, each.angle + 1).unflatten(1, q.shape[:2])[0]
    if call.qv is not None:
        q = torch.cat((q, _of(call.qv, call.cu_seqlens_q, each.place, each.queries)), -1)
    outs = _of(out, call.cu_seqlens_q, each.place, each.queries)
    lses = lse[:, first:end] if call.packed else lse[each.place]
    for rows, keys in _pieces(call, end - first, each.total - each.start):
        result = _attend_piece(call, each, q[slice(*rows)], keys)
        outs[slice(*rows)].copy_(result[0][0])
        lses[:, slice(*rows)].copy_(result[1][0])


def _pieces(
    call: CacheArguments, seqlen_q: int, seqlen_k: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of queries and of the keys that they may see, the last query of each at its last key.
    There is one, or one for each chunk of keys."""
    shift = seqlen_k - seqlen_q  # query i stands at key i + shift
    whole = (0, seqlen_q), (0, seqlen_k)
    for (first, last), (begin, end) in _chunks(call, whole, shift):
        if call.window_left >= 0:  # what is before the window of the first query is not read
            begin = max(begin, first + shift - call.window_left)
        yield (first, last), (min(begin, end), end)


def _chunks(
    call: CacheArguments, whole: tuple[tuple[int, int], tuple[int, int]], shift: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The queries of each chunk, and its keys; queries before the first key have none."""
    (_, seqlen_q), (_, seqlen_k) = whole
    chunk = call.attention_chunk
    if not chunk:
        yield whole
        return
    for number in range(shift // chunk, (seqlen_k - 1) // chunk + 1):
        begin, end = number * chunk, (number + 1) * chunk
        rows = max(0, begin - shift), min(seqlen_q, end - shift)
        if rows[0] < rows[1]:
            yield rows, (max(0, begin), min(seqlen_k, max(0, end)))


def _attend_piece(
    call: CacheArguments, each: Sequence, q: Tensor, keys: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Output `[1, rows, heads, head_dim_v]` and LSE `[1, heads, rows]` of queries at the end of a
    range of keys, which counts from the first token that is no padding."""
    k, v = (
        widened(
            _keys(call, each, movable(cache), each.start + keys[0], each.start + keys[1]), q.dtype
        )
        for cache in (call.k_cache, call.v_cache)
    )
    if call.qv is not None:
        k = torch.cat((k, v), -1)
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[each.place]
    piece = Arguments(
        q[None], k, v, "reference", call.scale, call.window_left, call.window_right, call.softcap,
        alibi_slopes=slopes, sink=call.sink,
    )  # fmt: skip
    if call.batch_invariant:
        return invariant_forward(piece, keys[0])
    return blockwise_forward(piece)
