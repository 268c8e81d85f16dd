"""PagedCache: what each sequence holds after any order of steps, sharing, and what it says."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_attention import attention
from cute_attention.errors import OutOfPagesError
from cute_attention.inference import PagedCache, attention_with_cache
from tolerances import assert_close

SIZES = {"page_size": 4, "heads_kv": 1, "head_dim": 2, "head_dim_v": 3}


class Book:
    """A cache, and beside it the tokens that each sequence should have, as plain lists."""

    def __init__(self, pages: int, layers: int = 2) -> None:
        self.cache = PagedCache(pages, layers=layers, **SIZES)
        self.tokens: dict[int, list[float]] = {}
        self.count = 0.0

    def append(self, sequences: list[int], counts: list[int]) -> None:
        step = self.cache.append(sequences, counts)
        lengths = [len(self.tokens[s]) for s in sequences]
        assert step.cache_seqlens.tolist() == lengths
        assert step.block_table.dtype == step.cache_seqlens.dtype == torch.int32
        written = []
        for b, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            for _ in range(count):
                self.count += 1
                page, place = divmod(len(self.tokens[sequence]), 4)
                self.tokens[sequence].append(self.count)
                for layer, (k, v) in enumerate(zip(self.cache.k, self.cache.v, strict=True)):
                    slot = int(step.block_table[b, page]), place
                    written += [slot] if layer == 0 else []
                    k[slot] = self.count + layer / 4
                    v[slot] = -self.count - layer / 4

        places = Counter(slot for sequence in self.tokens for slot in self.places(sequence))
        assert all(places[slot] == 1 for slot in written)  # attention_with_cache asks for it

    def places(self, sequence: int) -> list[tuple[int, int]]:
        """Page and row of each token."""
        pages = self.cache.pages(sequence)
        return [(pages[t // 4], t % 4) for t in range(len(self.tokens[sequence]))]

    def check(self) -> None:
        """Each sequence holds its tokens in all layers; pages are used as often as they are held,
        and shared only where they are full or forked."""
        users = [0] * (self.cache.free_pages + len(self.used()))
        for sequence, tokens in self.tokens.items():
            pages = self.cache.pages(sequence)
            assert self.cache.length(sequence) == len(tokens)
            assert len(pages) == -(-len(tokens) // 4)
            for page in pages:
                users[page] += 1
            for layer, (k, v) in enumerate(zip(self.cache.k, self.cache.v, strict=True)):
                wanted = torch.tensor(tokens) + layer / 4
                held = k[list(pages)].flatten(0, 1)[: len(tokens), 0, 0]
                assert torch.equal(held, wanted)
                held = v[list(pages)].flatten(0, 1)[: len(tokens), 0, 2]
                assert torch.equal(held, -wanted)
        assert users == self.cache._users
        assert sum(count == 0 for count in users) == self.cache.free_pages

    def used(self) -> set[int]:
        return {page for sequence in self.tokens for page in self.cache.pages(sequence)}


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_steps(seed: int) -> None:
    """Random steps with few pages: what does not fit raises and changes nothing."""
    rng = random.Random(seed)
    book = Book(pages=rng.choice([6, 20]))
    refused = 0
    for _ in range(150):
        live = list(book.tokens)
        action = rng.choice(["allocate", "append", "append", "append", "fork", "free"])
        if action == "allocate" or not live:
            book.tokens[book.cache.allocate()] = []
        elif action == "fork":
            parent = rng.choice(live)
            book.tokens[book.cache.fork(parent)] = list(book.tokens[parent])
        elif action == "free":
            sequence = rng.choice(live)
            book.cache.free(sequence)
            del book.tokens[sequence]
        else:
            some = rng.sample(live, rng.randint(1, len(live)))
            counts = [rng.choice([0, 1, 1, 3, 4, 9]) for _ in some]
            try:
                book.append(some, counts)
            except OutOfPagesError:
                refused += 1
        book.check()
    assert refused or book.cache.free_pages


def test_a_partly_filled_page_is_copied_when_it_is_written() -> None:
    book = Book(pages=8)
    first = book.cache.allocate()
    book.tokens[first] = []
    book.append([first], [6])
    second = book.cache.fork(first)
    book.tokens[second] = list(book.tokens[first])
    assert book.cache.pages(first) == book.cache.pages(second)
    assert book.cache.free_pages == 6
    book.append([first, second], [1, 1])  # one of them keeps the page
    assert book.cache.free_pages == 5
    assert book.cache.pages(first)[0] == book.cache.pages(second)[0]
    assert book.cache.pages(first)[1] != book.cache.pages(second)[1]
    book.check()
    third = book.cache.fork(second)
    book.tokens[third] = list(book.tokens[second])
    book.cache.free(second)
    del book.tokens[second]
    book.append([third], [1])  # nobody else has the page any more
    assert book.cache.free_pages == 5
    book.check()


def test_a_full_page_is_shared_and_not_copied() -> None:
    book = Book(pages=4)
    first = book.cache.allocate()
    book.tokens[first] = []
    book.append([first], [8])
    second = book.cache.fork(first)
    book.tokens[second] = list(book.tokens[first])
    book.append([first, second], [1, 1])
    assert book.cache.pages(first)[:2] == book.cache.pages(second)[:2]
    assert book.cache.free_pages == 0
    book.check()


def test_out_of_pages() -> None:
    cache = PagedCache(3, **SIZES)
    one, other = cache.allocate(), cache.allocate()
    cache.append([one], 8)
    words = "PagedCache.append: 2 more pages are needed and 1 of 3 are free"
    with pytest.raises(OutOfPagesError, match=words):
        cache.append([one, other], [1, 1])
    assert (cache.length(one), cache.length(other), cache.free_pages) == (8, 0, 1)
    cache.free(one)
    cache.append([other], 12)
    assert cache.free_pages == 0


def test_the_table() -> None:
    cache = PagedCache(8, **SIZES)
    one, other = cache.allocate(), cache.allocate()
    table, lengths = cache.append([one, other], [9, 2], width=5)
    assert lengths.tolist() == [0, 0]
    assert table.shape == (2, 5)
    assert (table[0, 3:] == -1).all()
    assert (table[1, 1:] == -1).all()
    assert len(set(table.flatten().tolist())) == 5
    assert cache.append([other], 1)[0].shape == (1, 1)
    assert cache.append([], []).block_table.shape == (0, 0)


def test_errors() -> None:
    with pytest.raises(ValueError, match="PagedCache: page_size is 0, expected an int >= 1"):
        PagedCache(3, **{**SIZES, "page_size": 0})
    cache = PagedCache(3, **SIZES)
    one = cache.allocate()
    cache.append([one], 5)
    with pytest.raises(ValueError, match="tokens is -1, expected an int >= 0"):
        cache.append([one], -1)
    with pytest.raises(ValueError, match=r"sequences is \[0, 0\], expected each sequence once"):
        cache.append([one, one], 1)
    with pytest.raises(ValueError, match=r"tokens is \[1, 2\], expected 1 numbers"):
        cache.append([one], [1, 2])
    with pytest.raises(ValueError, match="width is 1, expected at least 2"):
        cache.append([one], 1, width=1)
    with pytest.raises(ValueError, match=r"width is 4\.0, expected an int >= 0"):
        cache.append([one], 1, width=4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PagedCache.append: sequences is an int, expected a list"):
        cache.append(one, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PagedCache.append: tokens is a float, expected a list"):
        cache.append([one], 1.5)  # type: ignore[arg-type]
    assert cache.length(one) == 5
    cache.free(one)
    for method in (cache.free, cache.fork, cache.length, cache.pages):
        with pytest.raises(KeyError, match="there is no sequence 0, expected one that allocate"):
            method(one)


def test_numbers_of_numpy() -> None:
    cache = PagedCache(9, **SIZES)
    one, other = cache.allocate(), cache.allocate()
    cache.append(iter([one, other]), np.int64(3), width=np.int32(2))  # type: ignore[arg-type]
    cache.append(np.array([one, other]), np.array([1, 2]))  # type: ignore[arg-type]
    assert (cache.length(one), cache.length(other)) == (4, 5)


def test_attention_to_a_shared_prefix() -> None:
    """Two continuations of one prompt, token by token, as the same tokens without a cache."""
    torch.manual_seed(0)
    cache = PagedCache(12, 16, heads_kv=2, head_dim=8)
    tokens = [torch.randn(2, 30, heads, 8) for heads in (4, 2, 2)]
    for t in tokens:
        t[1, :21] = t[0, :21]

    def step(sequences: list[int], rows: list[int], first: int, end: int) -> Tensor:
        q, k, v = (t[rows, first:end] for t in tokens)
        at = cache.append(sequences, end - first)
        return attention_with_cache(
            q, cache.k[0], cache.v[0], at.cache_seqlens, k=k, v=v, block_table=at.block_table,
            causal=True,
        )  # fmt: skip

    one = cache.allocate()
    outs = [step([one], [0], 0, 21).expand(2, -1, -1, -1)]
    other = cache.fork(one)
    outs += [step([one, other], [0, 1], t, t + 1) for t in range(21, 30)]
    assert cache.pages(one)[0] == cache.pages(other)[0]
    assert_close(torch.cat(outs, 1), attention(*tokens, causal=True), "rounding")
