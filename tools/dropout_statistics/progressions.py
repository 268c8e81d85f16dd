"""Tests of single progressions, whose words are known: what the average over rows would hide."""

from __future__ import annotations

from collections.abc import Callable

import pvalues
import torch
from torch import Tensor

from cute_attention.semantics import dropout

Mixer = Callable[[Tensor], Tensor]


def progressions(heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Starts and steps of 512 classes of queries of each head, int32 `[heads * 512, 1]`."""
    words = dropout.row_words(
        dropout.as_seed(seed, torch.get_default_device()), (0, heads), (0, 1024)
    ).to(torch.int32)
    start, step = words.unflatten(-1, (-1, 2, 8)).unbind(2)
    return start.reshape(-1, 1), step.reshape(-1, 1) | 1


def chi_square_of_rows(values: Tensor) -> tuple[float, int]:
    """Sum over rows of the chi-square of a row's bytes, uint8 `[rows, n]`, and its degrees."""
    rows, n = values.shape
    cells = values.long() + 256 * torch.arange(rows)[:, None]
    counts = torch.bincount(cells.flatten(), minlength=256 * rows).double()
    return ((counts - n / 256) ** 2).sum().item() * 256 / n, 255 * rows


def relations(mixer: Mixer, x: Tensor, difference: Tensor | int) -> tuple[Tensor, ...]:
    """What the bytes of the words of x, x + d, x + 2d and x + 3d could have to do with each other.

    Each is uint8 with a last dimension of the four bytes, and uniform if they have nothing to do
    with each other.
    """
    a, b, c, d = (
        mixer(x + difference * times).view(torch.uint8).unflatten(-1, (-1, 4)) for times in range(4)
    )
    return a - b, a ^ b, a - 2 * b + c, a - 3 * b + 3 * c - d, a ^ b ^ c ^ d


def near_returns(mixer: Mixer, heads: int, columns: int, seed: int = 1) -> float:
    """Bytes at the lag after which the progression of a row all but comes back.

    Each row has a lag below n at which step * lag modulo 2^32 lies within 2^32 / n of 0. A mixer
    that does not spread the low bits of so small a difference gives the two words related bytes, by
    a relation of the row's own. `columns` is the number of classes of keys; n is half of it.
    """
    lags = torch.arange(1, columns // 2, dtype=torch.int32)
    starts, steps = progressions(heads, seed)
    found = torch.zeros(5, 4, dtype=torch.float64)  # relation, byte
    degrees = 0
    for start, step in zip(starts.split(64), steps.split(64), strict=True):
        distance = (step * lags).long().abs()  # of the signed word
        lag = lags[distance.argmin(1)][:, None]
        at = start + step * torch.arange(columns // 2, dtype=torch.int32)
        for n, values in enumerate(relations(mixer, at, step * lag)):
            for byte in range(4):
                chi, more = chi_square_of_rows(values[..., byte])
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


def worst_relation(mixer: Mixer, difference: int, samples: int = 1 << 20) -> float:
    """The largest chi-square of a relation, in standard deviations above its mean, of random x.

    This asks more of a mixer than dropout does: a row takes one difference a few thousand times.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(difference)
    x = torch.randint(-(2**31), 2**31, (1, samples), generator=generator).to(torch.int32)
    signed = (difference + 2**31) % 2**32 - 2**31
    chi = [
        chi_square_of_rows(values[..., byte])[0]
        for values in relations(mixer, x, signed)
        for byte in range(4)
    ]
    return (max(chi) - 255) / 510**0.5


def differences_table(mixers: dict[str, Mixer]) -> str:
    """`worst_relation` at small differences, and at odd multiples of powers of two."""
    exponents = (0, 2, 4, 5, 6, 7, 8, 10, 12, 16, 20)
    powers = (0, 8, 12, 14, 16, 18, 20, 22, 24)
    header = [f"2^{n}" for n in exponents] + [f"odd * 2^{n}" for n in powers]
    lines = ["| mixer | " + " | ".join(header) + " |", "|---" * (1 + len(header)) + "|"]
    noise = [0x51D3A9C7, 0x2F6B8E35, 0x7C94D10B, 0x1E87F263]  # odd
    for name, mixer in mixers.items():
        values = [
            max(worst_relation(mixer, 2**n + some % 2**n) for some in noise) for n in exponents
        ]
        values += [
            max(worst_relation(mixer, some * 2**n % 2**32) for some in noise) for n in powers
        ]
        lines.append(f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    return "\n".join(lines)
