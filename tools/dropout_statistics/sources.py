"""What is tested: the bits of dropout, the same with other mixers or with chosen progressions, and
Philox.

A source is a function of the arguments of `dropout.random_bytes`. All but Philox are that function
itself, with its mixer or its words of the queries replaced, so that they differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from cute_attention.semantics import dropout

Range = tuple[int, int]
Source = Callable[[Tensor, Range, Range, Range], Tensor]
Mixer = Callable[[Tensor], Tensor]


def shifted(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` of the unsigned word."""
    return (x >> bits) & ((1 << 32 - bits) - 1)


def xor_multiply(*steps: int) -> Mixer:
    """A mixer of XORs with the shifted word and multiplications: shift, factor, shift, ..."""

    def mix(x: Tensor) -> Tensor:
        for n, step in enumerate(steps):
            if n % 2:
                x *= (step + 2**31) % 2**32 - 2**31
            else:
                x ^= shifted(x, step)
        return x

    return mix


MIXERS: dict[str, Mixer] = {
    "none": lambda x: x,
    "one xorshift": xor_multiply(15),
    "one multiplication": xor_multiply(15, 0x735A2D97, 16),
    "lowbias32": xor_multiply(16, 0x7FEB352D, 15, 0x846CA68B, 16),
    "21f0aaad": xor_multiply(16, 0x21F0AAAD, 15, 0x735A2D97, 15),
    "murmur3 fmix32": xor_multiply(16, 0x85EBCA6B, 13, 0xC2B2AE35, 16),
}


def ours(seed: Tensor, heads: Range, rows: Range, cols: Range) -> Tensor:
    return dropout.random_bytes(seed, heads, rows, cols)


def with_mixer(mixer: Mixer, source: Source = ours) -> Source:
    def draw(seed: Tensor, heads: Range, rows: Range, cols: Range) -> Tensor:
        with mock.patch.object(dropout, "mix", mixer):
            return source(seed, heads, rows, cols)

    return draw


def philox_bytes(seed: Tensor, heads: Range, rows: Range, cols: Range) -> Tensor:
    """What the bits are compared with: a call of Philox for each 16 scores of a row."""
    calls = torch.arange(cols[0] // 16, -(-cols[1] // 16))
    queries, head_indices = torch.arange(*rows)[:, None], torch.arange(*heads)[:, None, None]
    words = dropout.philox((queries, calls, head_indices, torch.zeros((), dtype=torch.int64)), seed)
    low_bytes = words.to(torch.int32).view(torch.uint8).flatten(-2)
    return low_bytes[..., cols[0] % 16 :][..., : cols[1] - cols[0]]


def with_steps(steps: Callable[[Tensor], Tensor]) -> Source:
    """Our bits with steps that a function chooses, given the number of the class of queries.

    Starts stay random, so that what a test finds is due to the step.
    """

    def draw(seed: Tensor, heads: Range, rows: Range, cols: Range) -> Tensor:
        drawn = dropout.row_words

        def row_words(seed: Tensor, heads: Range, rows: Range) -> Tensor:
            words = drawn(seed, heads, rows).unflatten(-1, (-1, 2, 8)).clone()
            classes = torch.arange(rows[0] // 2, rows[1] // 2).view(-1, 8)
            words[:, :, 1] = steps(classes)
            return words.flatten(1)

        with mock.patch.object(dropout, "row_words", row_words):
            return dropout.random_bytes(seed, heads, rows, cols)

    return draw


# Steps that random words take once in millions of rows, or never in so many rows at once.
CHOSEN_STEPS: dict[str, Source] = {
    "small": with_steps(lambda n: 2 * n + 1),
    "near 2^31": with_steps(lambda n: 2**31 + 2 * n + 1),
    "near 2^32 / 3": with_steps(lambda n: 2**32 // 3 + 2 * n),
    "2^16 apart": with_steps(lambda n: (2**16 * n + 1) % 2**32),
    "the same": with_steps(lambda n: torch.full_like(n, 0x9E3779B9)),
    "1 for all": with_steps(torch.ones_like),
}
