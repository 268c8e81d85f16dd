"""New keys are appended to pages, or to rows that are named, while the forward already reads: the
bits are those of steps that wait for each other (test_cache_beside.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention.inference import PagedCache, attention_with_cache, explain_with_cache
from test_cache_beside import (
    BF16,
    HEADS,
    HEADS_KV,
    Step,
    check_packed_tokens,
    compare_steps,
    numbers,
)
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu


def in_pages(step: Step, page: int, shared: int = 0) -> Step:
    """Puts the caches of a step into pages of any order. The first tokens, `shared` of them, lie in
    the same pages for all sequences, which are full."""
    batch, room = step.caches[0].shape[:2]
    width = room // page
    table = torch.randperm(batch * width, device="cuda").view(batch, width)
    pages = []
    for cache in step.caches:
        pages.append(torch.empty_like(cache).view(batch * width, page, *cache.shape[2:]))
        pages[-1][table.flatten()] = cache.reshape(pages[-1].shape)
    table[:, : shared // page] = table[0, : shared // page]
    step.caches = pages
    step.options["block_table"] = table.int()
    return step


# New tokens at the first, the last and a middle place of a page and of a tile of keys.
EDGES = [0, 1, 15, 16, 17, 112, 126, 127, 128, 129, 143, 144, 255, 256, 400, 511]


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("new", [1, 3, 20])
def test_edges_of_pages(dim: int, new: int, rotary: bool) -> None:
    """20 new tokens begin in one tile of keys and end in the next."""
    step = in_pages(Step(dim, EDGES, new, new, 640, rotary), 16)
    for splits in (0, 1, 3):
        step.both(num_splits=splits)
    step.both(window=(100, 0), num_splits=2)


@pytest.mark.parametrize("page", [48, 64, 256])
def test_other_sizes_of_pages(page: int) -> None:
    """Pages in which tiles of keys begin and end, and new tokens for one of several queries."""
    step = in_pages(Step(128, EDGES, 1, 1, 768), page)
    step.both(num_splits=1)
    step.both(num_splits=3)
    in_pages(Step(128, EDGES, 150, 2, 768), page).both(num_splits=2)


@pytest.mark.parametrize("page", [16, 64])
def test_a_prefix_is_shared(page: int) -> None:
    """Full pages that several sequences read, behind which each one has its own."""
    lengths = [256, 257, 300, 384, 511, 256]
    for new in (1, 5, 130):
        step = in_pages(Step(128, lengths, new, min(new, 5), 768), page, shared=256)
        step.both(num_splits=1)
        step.both(num_splits=3)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_are_named(dim: int, page: int) -> None:
    """`cache_batch_idx`: sequences have other rows of the cache, or of the table."""
    step = Step(dim, [300, 131, 128, 0, 511], 2, 2, 640)
    if page:
        in_pages(step, page)
    rows = torch.tensor([3, 0, 4, 2, 1], dtype=torch.int32, device="cuda")
    order = rows.argsort().to(rows.device)
    if page:
        step.options["block_table"] = step.options["block_table"][order]
    else:
        step.caches = [cache[order] for cache in step.caches]
    for splits in (1, 3):
        step.both(cache_batch_idx=rows, num_splits=splits)
    if not page:
        leftpad = torch.tensor([5, 131, 100, 0, 129], dtype=torch.int32, device="cuda")
        step.both(cache_batch_idx=rows, leftpad=leftpad)


def test_chunks_of_a_prompt_in_pages() -> None:
    """Most tiles of keys are older than the chunk, and CTAs have tiles of several sequences."""
    in_pages(Step(128, [900, 0, 513, 1000, 128], 300, 300, 1408), 16).both()
    in_pages(Step(64, [900, 0, 513, 1000, 128], 300, 300, 1408, rotary=False), 64).both(
        num_splits=2
    )


def test_packed_tokens_in_pages() -> None:
    """Prompts and decoding in one call, sequences with new tokens and without them."""
    check_packed_tokens(in_pages(Step(128, [250, 256, 0, 384, 130], 1, 1, 1024), 16))


def test_no_page_and_no_room() -> None:
    """What has no page, or no room, is not written."""
    step = in_pages(Step(128, [300, 131, 640, 637, 16], 5, 1, 640), 16)
    step.options["block_table"][4, 1] = -1  # the last sequence's new tokens have none
    early, waits = ([cache.clone() for cache in step.caches] for _ in range(2))
    out, wanted = step.run(early, num_splits=1), step.run_apart(waits, num_splits=1)
    assert_same_bits(out[:4], wanted[:4], "out")
    for cache, want in zip(early, waits, strict=True):
        assert_same_bits(cache, want, "cache")


@pytest.mark.parametrize("of_a_page", [True, False])
def test_keys_and_values_of_one_tensor(of_a_page: bool) -> None:
    """Pages `[2, page_size, ...]`, keys before values, or `[page_size, 2, ...]`, as engines have
    them."""
    step = in_pages(Step(128, EDGES, 1, 1, 640), 16)
    dim = 1 if of_a_page else 2
    early, waits = (torch.stack(step.caches, dim).unbind(dim) for _ in range(2))
    out, wanted = step.run(list(early)), step.run_apart(list(waits))
    assert_same_bits(out, wanted, "out")
    for cache, want in zip(early, waits, strict=True):
        assert_same_bits(cache, want, "cache")


def test_latent_attention_in_pages() -> None:
    """Values that are columns of the keys: that kernel waits before it reads anything."""
    batch, room, dim, dim_v = 3, 256, 576, 512
    lengths = torch.tensor([0, 130, 240], dtype=torch.int32, device="cuda")
    memory, new = numbers(batch * room // 64, 64, 1, dim), numbers(batch, 2, 1, dim)
    table = torch.randperm(len(memory), device="cuda").int().view(batch, -1)
    q = numbers(batch, 2, 16, dim)
    options: dict[str, Any] = {"causal": True, "block_table": table, "backend": "sm90"}
    apart = memory.clone()
    for b, length in enumerate(lengths.tolist()):
        for i in range(2):
            place = int(table[b, (length + i) // 64]), (length + i) % 64
            apart[place] = new[b, i]
    tensors = q, memory, memory[..., :dim_v], lengths
    new_tokens = {"k": new, "v": new[..., :dim_v]}
    if explain_with_cache(*tensors, **new_tokens, **options).chosen is None:
        pytest.skip("no kernel of this GPU is built for latent attention")
    out = attention_with_cache(*tensors, **new_tokens, **options)
    wanted = attention_with_cache(q, apart, apart[..., :dim_v], lengths + 2, **options)
    assert_same_bits(memory, apart, "cache")
    assert_same_bits(out, wanted, "out")


@pytest.mark.parametrize("page", [0, 16])
def test_sequences_that_read_what_others_write(page: int) -> None:
    """Where a caller does what it may not, as with sequences that pad a batch and all have the same
    page, everything ends, nothing else is written, and the other sequences are right."""
    step = Step(128, [200, 150, 333, 150, 3], 1, 1, 640)
    rows = torch.tensor([0, 0, 2, 0, 4], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"num_splits": 2}
    if page:
        in_pages(step, page)
        step.options["block_table"] = step.options["block_table"][rows.long()]
    else:
        options["cache_batch_idx"] = rows
    step.k[3], step.v[3] = step.k[1], step.v[1]
    early, waits = ([cache.clone() for cache in step.caches] for _ in range(2))
    out, wanted = step.run(early, **options), step.run_apart(waits, **options)
    assert_same_bits(out[[2, 4]], wanted[[2, 4]], "out")
    for cache, want in zip(early, waits, strict=True):
        assert_same_bits(cache, want, "cache")


def a_step(dim: int) -> Step:
    return in_pages(Step(dim, [256, 260, 400, 500], 1, 1, 1024), 16, shared=256)


def test_a_few_steps_in_pages() -> None:
    compare_steps(lambda: a_step(128), False, 4, 3)


@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("graph", [False, True])
def test_steps_of_a_stream_in_pages(graph: bool, splits: int) -> None:
    compare_steps(lambda: a_step(128), graph, 200, splits)


def test_forks_of_a_paged_cache() -> None:
    """Sequences that share a page of which a part is filled: each appends to its own copy."""
    sizes: dict[str, Any] = {"heads_kv": HEADS_KV, "head_dim": 128, "dtype": BF16}
    cache = PagedCache(pages=64, page_size=16, device="cuda", **sizes)
    first = cache.allocate()
    torch.manual_seed(3)
    tokens = numbers(2, 1, 200, HEADS_KV, 128)

    def attend(sequences: list[int], new: Tensor) -> Tensor:
        """One query for each sequence, after its new tokens `[2, batch, seqlen, heads, dim]`."""
        batch, seqlen = new.shape[1:3]
        step = cache.append(sequences, seqlen)
        q = torch.ones(batch, 1, HEADS, 128, device="cuda", dtype=BF16)
        return attention_with_cache(
            q, cache.k[0], cache.v[0], step.cache_seqlens, k=new[0], v=new[1],
            block_table=step.block_table, causal=True, backend="sm90", num_splits=1,
        )  # fmt: skip

    attend([first], tokens)
    sequences = [first, cache.fork(first), cache.fork(first)]
    whole = tokens.expand(2, 3, -1, -1, -1)
    for _ in range(20):
        new = numbers(2, 3, 1, HEADS_KV, 128)
        whole = torch.cat((whole, new), 2)
        out = attend(sequences, new)
        q = torch.ones(3, 1, HEADS, 128, device="cuda", dtype=BF16)
        wanted = attention_with_cache(
            q, whole[0].contiguous(), whole[1].contiguous(), None, causal=True, backend="sm90",
            num_splits=1,
        )  # fmt: skip
        assert_same_bits(out, wanted, "out")
