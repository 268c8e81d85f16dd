"""Tests of single progressions, whose words are known: what the average over rows would hide."""

from __future__ import annotations

from collections.abc import Callable

import pvalues
import torch
from torch import Tensor

from cute_attention.semantics import dropout

Mixer = Callable[[Tensor], Tensor]


def progressions(heads: int) -> tuple[Tensor, Tensor]:
    """Starts and steps of 512 classes of queries of each head, int32 `[heads * 512, 1]`."""
    words = dropout.row_words(
        dropout.as_seed(1, torch.get_default_device()), (0, heads), (0, 1024)
    ).to(torch.int32)
    start, step = words.unflatten(-1, (-1, 2, 8)).unbind(2)
    return start.reshape(-1, 1), step.reshape(-1, 1) | 1


def chi_square_of_rows(values: Tensor) -> tuple[float, int]:
    """Sum over rows of the chi-square of a row's bytes, uint8 `[rows, n]`, and its degrees."""
    rows, n = values.shape
    cells = values.long() + 256 * torch.arange(rows)[:, None]
    counts = torch.bincount(cells.flatten(), minlength=256 * rows).double()
    return ((counts - n / 256) ** 2).sum().item() * 256 / n, 255 * rows


def near_returns(mixer: Mixer, heads: int, columns: int) -> float:
    """Bytes at the lag after which the progression of a row all but comes back.

    Each row has a lag below n at which step * lag modulo 2^32 lies within 2^32 / n of 0. A mixer
    that does not spread the low bits of so small a difference gives the two words related bytes, by
    a relation of the row's own. `columns` is the number of classes of keys; n is half of it.
    """
    lags = torch.arange(1, columns // 2, dtype=torch.int32)
    starts, steps = progressions(heads)
    found = torch.zeros(2, 4, dtype=torch.float64)
    degrees = 0
    for start, step in zip(starts.split(64), steps.split(64), strict=True):
        distance = (step * lags).long().abs()  # of the signed word
        lag = lags[distance.argmin(1)][:, None]
        at = start + step * torch.arange(columns // 2, dtype=torch.int32)
        first = mixer(at.clone()).view(torch.uint8).unflatten(1, (-1, 4))
        second = mixer(at + step * lag).view(torch.uint8).unflatten(1, (-1, 4))
        for byte in range(4):
            a, b = first[..., byte], second[..., byte]
            for n, values in enumerate((a - b, a ^ b)):
                chi, more = chi_square_of_rows(values)
                found[n, byte] += chi
        degrees += more
    return pvalues.smallest([pvalues.chi_square(x.item(), degrees) for x in found.flatten()])


def avalanche(mixer: Mixer, samples: int) -> tuple[float, float]:
    """A changed bit of the input changes each bit of the output half the time: the largest and the
    mean magnitude of 2 * probability - 1 over the 32 x 32 pairs, of random inputs."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    x = torch.randint(-(2**31), 2**31, (samples,), generator=generator).to(torch.int32)
    y = mixer(x.clone())
    bias = torch.zeros(32, 32)
    for changed in range(32):
        flipped = x ^ torch.tensor(1 << changed, dtype=torch.int64).to(torch.int32)
        difference = y ^ mixer(flipped)
        for bit in range(32):
            bias[changed, bit] = 2 * ((difference >> bit) & 1).float().mean() - 1
    return bias.abs().max().item(), bias.abs().mean().item()
