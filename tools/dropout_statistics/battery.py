"""Tests of bytes in a row: each takes *lines*, uint8 `[lines, length]`, and returns a p-value.

They are those of the common batteries (Knuth, Diehard, TestU01, PractRand) that a sequence of bytes
can fail within 10^8 draws. The lines are the bytes of a matrix of scores, read in several orders.
"""

from __future__ import annotations

import math

import pvalues
import torch
from torch import Tensor

CHUNK = 1 << 22


def histogram(values: Tensor, cells: int) -> Tensor:
    """How often each of 0 .. cells - 1 occurs."""
    counts = torch.zeros(cells, dtype=torch.int64)
    for part in values.flatten().split(CHUNK):
        counts += torch.bincount(part.int(), minlength=cells)
    return counts


def groups(lines: Tensor, size: int, lag: int = 1) -> list[Tensor]:
    """Disjoint groups of `size` bytes of a line that lie `lag` apart, one tensor for each place."""
    length = lines.shape[1] // (size * lag) * (size * lag)
    return list(lines[:, :length].unflatten(1, (-1, size, lag)).unbind(2))


def joint(parts: list[Tensor], bits: int, shift: int) -> Tensor:
    """Chi-square's counts of `bits` bits from each part, from bit `shift` on."""
    counts = torch.zeros(1 << bits * len(parts), dtype=torch.int64)
    for chunk in zip(*(part.flatten().split(CHUNK) for part in parts), strict=True):
        cell = torch.zeros_like(chunk[0], dtype=torch.int32)
        for part in chunk:
            cell = (cell << bits) | ((part.int() >> shift) & ((1 << bits) - 1))
        counts += torch.bincount(cell, minlength=counts.numel())
    return counts


def words_of(lines: Tensor, size: int) -> Tensor:
    """`size` little-endian 32-bit words in a row, int64 `[..., size]`."""
    length = lines.shape[1] // (4 * size) * (4 * size)
    words = lines[:, :length].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return words.reshape(-1, size)


def set_bits(x: Tensor) -> Tensor:
    """Bits that are 1 in int64 words below 2^32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101 >> 24) & 0xFF


def frequency(lines: Tensor) -> float:
    """Each value of a byte is equally frequent."""
    return pvalues.cells(histogram(lines, 256))


def pairs(lines: Tensor) -> float:
    """Two bytes that lie 1, 2, 3, 4, 8, 16 or 64 apart are independent."""
    return pvalues.smallest([
        pvalues.cells(joint(groups(lines, 2, lag), 8, 0))
        for lag in (1, 2, 3, 4, 8, 16, 64) if 2 * lag <= lines.shape[1]
    ])  # fmt: skip


def triples(lines: Tensor) -> float:
    """The high and the low five bits of three bytes in a row are independent."""
    return pvalues.smallest([pvalues.cells(joint(groups(lines, 3), 5, s)) for s in (0, 3)])


def quadruples(lines: Tensor) -> float:
    """The high and the low four bits of four bytes in a row, and of four 4 apart."""
    return pvalues.smallest([
        pvalues.cells(joint(groups(lines, 4, lag), 4, shift)) for shift in (0, 4) for lag in (1, 4)
    ])  # fmt: skip


def differences(lines: Tensor) -> float:
    """First, second and third differences of bytes that lie 1 or 4 apart: what a lattice shows."""
    found = []
    for lag in (1, 4):
        a, b, c = groups(lines, 3, lag)
        found += [pvalues.cells(histogram(x, 256)) for x in (b - a, a - 2 * b + c)]
        a, b, c, d = groups(lines, 4, lag)
        found += [pvalues.cells(histogram(x, 256)) for x in (d - 3 * c + 3 * b - a, a ^ b ^ c ^ d)]
    return pvalues.smallest(found)


def runs(lines: Tensor) -> float:
    """Eight decisions in a row at p = 1/2, and five at p = 0.1, as often as their number of drops
    says."""
    half = pvalues.cells(joint(groups(lines, 8), 1, 7))
    drops = sum((part < 26).int() << n for n, part in enumerate(groups(lines, 5)))
    chance = torch.tensor([26 / 256 if n else 230 / 256 for n in (0, 1)], dtype=torch.float64)
    expected = chance
    for _ in range(4):
        expected = torch.outer(chance, expected).flatten()
    return pvalues.smallest([half, pvalues.cells(histogram(drops, 32), expected)])


def gaps(lines: Tensor) -> float:
    """Scores between one that is dropped at p = 0.1 and the next: a geometric distribution."""
    found = []
    last, q = 60, 26 / 256
    chance = [q * (1 - q) ** n for n in range(last)] + [(1 - q) ** last]
    for threshold in (0, 230):  # dropped as small bytes are, and as large ones would be
        flat = lines.flatten()
        counts = torch.zeros(last + 1, dtype=torch.int64)
        for part in flat.split(CHUNK):
            dropped = (part >= threshold) & (part < threshold + 26)
            at = dropped.nonzero().flatten()
            counts += torch.bincount((at.diff() - 1).clamp(max=last), minlength=last + 1)
        found.append(pvalues.cells(counts, torch.tensor(chance, dtype=torch.float64)))
    return pvalues.smallest(found)


def birthdays(lines: Tensor, size: int = 4096, limit: int = 256) -> float:
    """Equal spacings between 4096 sorted words of 32 bits: Poisson with mean 4 (Marsaglia)."""
    days = words_of(lines[: max(1, limit * size * 4 // lines.shape[1] + 1)].reshape(1, -1), size)
    days = days[:limit].sort(1).values
    spacings = days.diff(dim=1).sort(1).values
    repeats = int((spacings.diff(dim=1) == 0).sum())
    return pvalues.poisson(repeats, days.shape[0] * size**3 / 2**34)


def hamming_weights(lines: Tensor) -> float:
    """Numbers of set bits of three words in a row, and of the XOR of two, are independent."""
    words = words_of(lines, 3)
    binomial = torch.tensor([math.comb(32, n) / 2**32 for n in range(33)], dtype=torch.float64)
    class_of = torch.tensor([0] * 14 + [1, 1, 2, 3, 3] + [4] * 14)  # of 0 .. 32 set bits
    chance = torch.zeros(5, dtype=torch.float64).index_add_(0, class_of, binomial)
    three = torch.einsum("i,j,k->ijk", chance, chance, chance).flatten()
    cell = torch.zeros(words.shape[0], dtype=torch.int64)
    for n in range(3):
        cell = 5 * cell + class_of[set_bits(words[:, n])]
    found = [pvalues.cells(histogram(cell, 125), three)]
    for a, b in ((0, 1), (0, 2)):
        found.append(pvalues.cells(histogram(set_bits(words[:, a] ^ words[:, b]), 33), binomial))
    return pvalues.smallest(found)


def matrix_ranks(lines: Tensor, limit: int = 40_000) -> float:
    """Ranks over GF(2) of matrices of 32 words in a row."""
    rows = words_of(lines[: limit * 128 // lines.shape[1] + 1], 32)[:limit].clone()
    rank = torch.zeros(rows.shape[0], dtype=torch.int64)
    for bit in range(32):
        has = (rows >> bit) & 1
        found, at = has.max(1)
        pivot = rows.gather(1, at[:, None])
        rows = rows ^ pivot * has * found[:, None]  # the pivot's own row becomes 0
        rank += found
    chance = [
        2.0 ** (r * (64 - r) - 1024)
        * math.prod((1 - 2.0 ** (n - 32)) ** 2 / (1 - 2.0 ** (n - r)) for n in range(r))
        for r in range(33)
    ]
    return pvalues.cells(histogram(rank, 33), torch.tensor(chance, dtype=torch.float64))


def spectrum(lines: Tensor, limit: int = 1 << 24) -> float:
    """Fourier transforms of decisions at p = 1/2: single peaks, and powers summed over lines."""
    lines = lines[: max(1, limit // lines.shape[1])]
    signs = (lines >= 128).float() * 2 - 1
    power = torch.fft.rfft(signs).abs().square()[:, 1:-1] / lines.shape[1]
    sums = power.double().sum(0)
    worst = [2 * (sums.max().item()), 2 * (sums.min().item())]
    found = [pvalues.chi_square(value, 2 * lines.shape[0]) for value in worst]
    many = [-math.expm1(sums.numel() * math.log1p(-min(p, 1 - 1e-16))) for p in found]
    return pvalues.smallest([pvalues.largest_exponential(power), *many])


def sums(lines: Tensor) -> float:
    """The number of drops in a line varies as it should: p = 0.1 and p = 1/2."""
    found = []
    for k in (26, 128):
        q, n = k / 256, lines.shape[1]
        z = ((lines < k).sum(1, dtype=torch.int64) - n * q) / math.sqrt(n * q * (1 - q))
        found += [pvalues.chi_square((z.double() ** 2).sum().item(), z.numel())]
    return pvalues.smallest(found)


LINE_TESTS = (
    frequency, pairs, triples, quadruples, differences, runs, gaps, birthdays, hamming_weights,
    matrix_ranks, spectrum, sums,
)  # fmt: skip
