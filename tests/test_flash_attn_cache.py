"""flash_attn_with_kvcache of both versions: appended bits, rotary, pages, padding, masks, LSE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import flash_attn, flash_attn_interface
from cute_attention.cache_arguments import CacheArguments
from cute_attention.flash_attn.layers.rotary import apply_rotary_emb
from cute_attention.inference.append import append
from flash_attn_plain import CLOSE, cumulative, plain, rotated

BATCH, ROOM, HEADS, HEADS_KV, DIM = 3, 24, 4, 2, 16
LENGTHS = torch.tensor([0, 7, 13], dtype=torch.int32)
LEFTPAD = torch.tensor([0, 2, 5], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02]) * torch.arange(1, BATCH + 1)[:, None]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


class Paged:
    """A cache of pages in a random order, and the same as one sequence after the other."""

    def __init__(self, page_size: int, dim: int = DIM, cached: int = BATCH) -> None:
        count = -(-ROOM // page_size)
        self.pages = rand(2 * cached * count, page_size, HEADS_KV, dim)
        order = torch.randperm(2 * cached * count)[: cached * count]
        self.table = order.view(cached, count).int()

    def flat(self) -> Tensor:
        return self.pages[self.table.long()].flatten(1, 2)


def expected(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, leftpad: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """`plain` for each sequence of its own keys."""
    slopes = options.pop("slopes", None)
    results = []
    for b, end in enumerate(lengths.tolist()):
        keys = slice(0 if leftpad is None else int(leftpad[b]), end)
        mine = None if slopes is None else slopes[b]
        results.append(
            plain(q[b : b + 1], k[b : b + 1, keys], v[b : b + 1, keys], slopes=mine, **options)
        )
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def appended(cache: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    """The cache with the new tokens in it."""
    result = cache.clone()
    for b, start in enumerate(lengths.tolist()):
        result[b, start : start + new.shape[1]] = new[b]
    return result


def assert_close(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)


MASKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": torch.tensor([4, 1])}, {"window": (4, 1)}),
    ({"causal": True, "softcap": 3.0}, {"causal": True, "softcap": 3.0}),
    ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
]


@pytest.mark.parametrize(("theirs", "ours"), MASKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("page_size", [None, 4, 5])
def test_masks_and_where_tokens_lie(
    theirs: dict[str, Any], ours: dict[str, Any], padded: bool, page_size: int | None
) -> None:
    torch.manual_seed(0)
    q, k, v = (
        rand(BATCH, 3, HEADS, DIM),
        rand(BATCH, 3, HEADS_KV, DIM),
        rand(BATCH, 3, HEADS_KV, DIM),
    )
    leftpad = LEFTPAD if padded else None
    given: dict[str, Any] = {"cache_seqlens": LENGTHS, "cache_leftpad": leftpad}
    if page_size is None:
        k_cache, v_cache = rand(BATCH, ROOM, HEADS_KV, DIM), rand(BATCH, ROOM, HEADS_KV, DIM)
        before = k_cache, v_cache
    else:
        k_pages, v_pages = Paged(page_size), Paged(page_size)
        v_pages.table = k_pages.table
        before = k_pages.flat(), v_pages.flat()
        k_cache, v_cache = k_pages.pages, v_pages.pages
        given["block_table"] = k_pages.table
    k_after, v_after = appended(before[0], k, LENGTHS), appended(before[1], v, LENGTHS)
    saved = k_cache.clone()
    results = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, return_softmax_lse=True, **given, **theirs
    )
    assert_close(results, expected(q, k_after, v_after, LENGTHS + 3, leftpad, **ours))
    if page_size is None:
        assert torch.equal(k_cache, k_after)
        assert torch.equal(v_cache, v_after)
    else:
        assert torch.equal(k_pages.flat(), k_after)
        assert torch.equal(v_pages.flat(), v_after)
        others = torch.ones(len(saved), dtype=torch.bool).index_fill(
            0, k_pages.table.flatten().long(), False
        )
        assert torch.equal(k_cache[others], saved[others])


@pytest.mark.parametrize("lengths", [6, LENGTHS, None])
def test_without_new_tokens(lengths: int | Tensor | None) -> None:
    torch.manual_seed(0)
    q, k_cache, v_cache = (
        rand(BATCH, 2, HEADS, DIM),
        rand(5, ROOM, HEADS_KV, DIM),
        rand(5, ROOM, HEADS_KV, DIM),
    )
    saved = k_cache.clone()
    ends = LENGTHS if isinstance(lengths, Tensor) else torch.full((BATCH,), lengths or ROOM)
    results = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    assert_close(results, expected(q, k_cache, v_cache, ends, causal=True))
    assert torch.equal(k_cache, saved)


def test_a_cached_sequence_for_each_of_the_batch() -> None:
    torch.manual_seed(0)
    q, k, v = (
        rand(BATCH, 2, HEADS, DIM),
        rand(BATCH, 2, HEADS_KV, DIM),
        rand(BATCH, 2, HEADS_KV, DIM),
    )
    # With strides that do not let the first two dimensions become one.
    k_cache = rand(6, HEADS_KV, ROOM, DIM).transpose(1, 2)
    v_cache = rand(6, HEADS_KV, ROOM, DIM).transpose(1, 2)
    index = torch.tensor([4, 0, 3], dtype=torch.int32)
    k_after, v_after = appended(k_cache[index], k, LENGTHS), appended(v_cache[index], v, LENGTHS)
    others = [1, 2, 5]
    saved = k_cache[others].clone()
    results = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, cache_batch_idx=index, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_close(results, expected(q, k_after, v_after, LENGTHS + 2, causal=True))
    assert torch.equal(k_cache[index], k_after)
    assert torch.equal(k_cache[others], saved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary(interleaved: bool, masked: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (rand(BATCH, 3, heads, DIM, dtype=dtype) for heads in (HEADS, HEADS_KV, HEADS_KV))
    k_cache, v_cache = (rand(BATCH, ROOM, HEADS_KV, DIM, dtype=dtype) for _ in range(2))
    angle = torch.rand(ROOM, 4) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    places = LENGTHS[:, None].long() + torch.arange(3)
    k_turned = rotated(k, cos, sin, places, interleaved)
    q_turned = rotated(q, cos, sin, places if masked else places[:, :1].expand(-1, 3), interleaved)
    k_after, v_after = appended(k_cache, k_turned, LENGTHS), appended(v_cache, v, LENGTHS)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS, causal=masked,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    torch.testing.assert_close(k_cache, k_after)  # a fused multiply-add may round differently
    assert torch.equal(v_cache, v_after)
    wanted = expected(q_turned, k_after, v_after, LENGTHS + 3, causal=masked)[0]
    tolerance = CLOSE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out.double(), wanted, **tolerance)


def test_apply_rotary_emb() -> None:
    torch.manual_seed(0)
    x = rand(2, 5, 3, 16).requires_grad_()
    angle = torch.rand(9, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    offsets = torch.tensor([0, 3])
    places = offsets[:, None] + torch.arange(5)
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    torch.testing.assert_close(out, rotated(x, cos, sin, places, False))
    (grad,) = torch.autograd.grad(out, x, out)  # a rotation: turned back
    torch.testing.assert_close(grad, x.detach())
    packed = apply_rotary_emb(
        x.flatten(0, 1), cos, sin, True, seqlen_offsets=offsets, cu_seqlens=cumulative(5, 5),
        max_seqlen=5,
    )  # fmt: skip
    torch.testing.assert_close(packed.view_as(x), rotated(x, cos, sin, places, True))
    y = x.detach().clone()
    assert apply_rotary_emb(y, cos, sin, inplace=True, seqlen_offsets=2) is y
    torch.testing.assert_close(y, rotated(x, cos, sin, torch.arange(2, 7).expand(2, 5), False))
    with pytest.raises(ValueError, match=r"cos and sin .* have 9 positions, expected at least 12"):
        apply_rotary_emb(y, cos, sin, seqlen_offsets=7)


@pytest.mark.parametrize("chunk", [0, 3, 5])
@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("with_qv", [False, True])
def test_packed_queries_and_new_keys(chunk: int, page_size: int | None, with_qv: bool) -> None:
    """FlashAttention-3: packed q, k and v, pages chosen by cache_batch_idx, chunks, qv, leftpad."""
    torch.manual_seed(0)
    dim_v = 24
    many_q, many_new = [2, 3, 1], [3, 0, 2]
    cu_q, cu_new = cumulative(*many_q), cumulative(*many_new)
    q, qv = rand(6, HEADS, DIM), rand(6, HEADS, dim_v)
    k, v = rand(5, HEADS_KV, DIM), rand(5, HEADS_KV, dim_v)
    index = torch.tensor([3, 0, 2], dtype=torch.int32)
    given: dict[str, Any] = {}
    if page_size is None:
        k_cache, v_cache = rand(4, ROOM, HEADS_KV, DIM), rand(4, ROOM, HEADS_KV, dim_v)
        flat_k, flat_v = k_cache, v_cache
    else:
        k_pages, v_pages = Paged(page_size, cached=4), Paged(page_size, dim_v, cached=4)
        v_pages.table = k_pages.table
        k_cache, v_cache, given["page_table"] = k_pages.pages, v_pages.pages, k_pages.table
        flat_k, flat_v = k_pages.flat(), v_pages.flat()
    k_after, v_after = flat_k[index].clone(), flat_v[index].clone()
    for b, start in enumerate(LENGTHS.tolist()):
        rows = slice(cu_new[b], cu_new[b + 1])
        k_after[b, start : start + many_new[b]] = k[rows]
        v_after[b, start : start + many_new[b]] = v[rows]
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, qv if with_qv else None, cache_seqlens=LENGTHS,
        cache_batch_idx=index, cache_leftpad=LEFTPAD, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new,
        max_seqlen_q=3, causal=True, attention_chunk=chunk, return_softmax_lse=True, **given,
    )  # fmt: skip
    assert lse.shape == (HEADS, 6)
    for b, (start, end) in enumerate(zip(LEFTPAD.tolist(), LENGTHS.tolist(), strict=True)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(start, end + many_new[b])
        wanted = plain(
            q[None, rows], k_after[b : b + 1, keys], v_after[b : b + 1, keys], causal=True,
            chunk=chunk, qv=qv[None, rows] if with_qv else None,
        )  # fmt: skip
        assert_close((out[rows], lse[:, rows]), (wanted[0][0], wanted[1][0]))
    now = flat_k if page_size is None else k_pages.flat()
    assert torch.equal(now[index], k_after)


def test_hints_and_other_angles() -> None:
    torch.manual_seed(0)
    q, k, v = (
        rand(BATCH, 2, HEADS, DIM),
        rand(BATCH, 2, HEADS_KV, DIM),
        rand(BATCH, 2, HEADS_KV, DIM),
    )
    k_cache, v_cache = rand(BATCH, ROOM, HEADS_KV, DIM), rand(BATCH, ROOM, HEADS_KV, DIM)
    angle = torch.rand(ROOM, 8) * 6
    elsewhere = torch.tensor([3, 4, 5], dtype=torch.int32)
    places = elsewhere[:, None].long() + torch.arange(2)
    k_turned = rotated(k, angle.cos(), angle.sin(), places, True)
    q_turned = rotated(q, angle.cos(), angle.sin(), places, True)
    k_after, v_after = appended(k_cache, k_turned, LENGTHS), appended(v_cache, v, LENGTHS)
    hint = flash_attn_interface.get_scheduler_metadata(
        BATCH, 2, ROOM, HEADS, HEADS_KV, DIM, LENGTHS
    )
    results = flash_attn_interface.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=angle.cos(), rotary_sin=angle.sin(),
        cache_seqlens=LENGTHS, rotary_seqlens=elsewhere, causal=True, scheduler_metadata=hint,
        num_splits=3, pack_gqa=True, return_softmax_lse=True,
    )  # fmt: skip
    assert_close(results, expected(q_turned, k_after, v_after, LENGTHS + 2, causal=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_tokens_that_the_host_has_not_counted(packed: bool, paged: bool) -> None:
    """As on a GPU, where reading the lengths would wait: what has no place is left out."""
    torch.manual_seed(0)
    lengths = torch.tensor([0, 11, 14], dtype=torch.int32)  # of 12; the last has no room at all
    k, v = rand(BATCH, 3, HEADS_KV, DIM), rand(BATCH, 3, HEADS_KV, DIM)
    given: dict[str, Any] = {}
    if paged:
        caches = rand(7, 4, HEADS_KV, DIM), rand(7, 4, HEADS_KV, DIM)
        table = torch.tensor([[6, 0, 1], [3, 4, 5], [2, 2, 2]], dtype=torch.int32)
        given["block_table"] = table
        places = [(6, 0), (6, 1), (6, 2)], [(5, 3)]
    else:
        caches = rand(BATCH, 12, HEADS_KV, DIM), rand(BATCH, 12, HEADS_KV, DIM)
        places = [(0, 0), (0, 1), (0, 2)], [(1, 11)]
    wanted = [cache.clone() for cache in caches]
    for cache, new in zip(wanted, (k, v), strict=True):
        for b, targets in enumerate(places):
            for i, target in enumerate(targets):
                cache[target] = new[b, i]
    if packed:  # with rows that belong to no sequence
        k, v = (torch.cat((t.flatten(0, 1), rand(2, HEADS_KV, DIM))) for t in (k, v))
        given["cu_seqlens_k_new"] = cumulative(3, 3, 3)
    q = rand(BATCH, 1, HEADS, DIM)
    append(CacheArguments(q, *caches, lengths, "reference", 1.0, k=k, v=v, **given))
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


def wrong(**changes: Any) -> dict[str, Any]:
    return {
        "q": rand(BATCH, 1, HEADS, DIM), "k_cache": rand(BATCH, ROOM, HEADS_KV, DIM),
        "v_cache": rand(BATCH, ROOM, HEADS_KV, DIM), "cache_seqlens": LENGTHS, **changes,
    }  # fmt: skip


NEW = torch.zeros(BATCH, 12, HEADS_KV, DIM)
SHORT = torch.arange(BATCH * 2, dtype=torch.int32).view(BATCH, 2)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": NEW, "v": NEW}, ValueError, "cache_seqlens and the new tokens make 25"),
    ({"k": NEW}, TypeError, "v is None"),
    ({"k": NEW.half(), "v": NEW}, TypeError, "k has dtype torch.float16"),
    ({"k": NEW, "v": NEW, "cache_seqlens": None}, ValueError, "cache_seqlens is None"),
    ({"cache_seqlens": LENGTHS.float()}, TypeError, "cache_seqlens has dtype torch.float32"),
    ({"cache_leftpad": LENGTHS[:2]}, ValueError, r"cache_leftpad has shape \[2\]"),
    ({"cache_batch_idx": LENGTHS}, ValueError, r"cache_batch_idx is \[0, 7, 13\]"),
    ({"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)}, ValueError, "rotary_cos"),
    ({"k_cache": torch.zeros(BATCH, ROOM, HEADS_KV, 8)}, ValueError, "k_cache has shape"),
    ({"softmax_scale": "a"}, TypeError, "softmax_scale is a str"),
    ({"window_size": (1, 2, 3)}, TypeError, r"window_size is \(1, 2, 3\)"),
    ({"block_table": SHORT.float()}, TypeError, "block_table has dtype"),
    ({"block_table": SHORT[:2]}, ValueError, r"block_table has shape \[2, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "words"), ERRORS, ids=[case[2] for case in ERRORS])
def test_errors(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^flash_attn_with_kvcache: {words}"):
        flash_attn.flash_attn_with_kvcache(**wrong(**changes))


def test_a_table_that_is_too_short_is_named() -> None:
    pages = torch.zeros(6, 4, HEADS_KV, DIM)
    q = rand(BATCH, 1, HEADS, DIM)
    words = r"block_table has shape \[3, 2\], expected \[batch, at least 4\]"
    with pytest.raises(RuntimeError, match=words):
        flash_attn.flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=LENGTHS, block_table=SHORT
        )
    with pytest.raises(RuntimeError, match="page_table has shape"):
        flash_attn_interface.flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=LENGTHS, page_table=SHORT
        )
    with pytest.raises(RuntimeError, match="block_table holds 6, expected pages from 0 to 5"):
        flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=1, block_table=SHORT + 2)


def test_a_negative_length_is_named() -> None:
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match="flash_attn_with_kvcache: cache_seqlens is -1, expected"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=-1)
