"""Tests of matrices of scores, uint8 `[matrices, rows, cols]`, and the orders to read them in."""

from __future__ import annotations

import math

import pvalues
import torch
from battery import joint
from torch import Tensor

RATES = (1, 13, 26, 64, 128, 192, 230, 255)  # drop counts: p from 1/256 to 255/256
OFFSETS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROW_OFFSETS = (1, 2, 4, 7, 8, 16, 64, 256)  # where all columns take part


def rows(block: Tensor) -> Tensor:
    return block.flatten(0, 1)


def columns(block: Tensor) -> Tensor:
    return block.transpose(1, 2).flatten(0, 1)


def diagonals(block: Tensor) -> Tensor:
    """Scores (i, i + d) of every d at which the diagonal crosses all rows."""
    n, rows, cols = block.shape
    shape, strides = (n, cols - rows + 1, rows), (rows * cols, 1, cols + 1)
    return block.contiguous().as_strided(shape, strides).flatten(0, 1)


def antidiagonals(block: Tensor) -> Tensor:
    return diagonals(block.flip(1))


def words(block: Tensor) -> Tensor:
    """The bytes of a class of queries in the order of its words."""
    parts = block.unflatten(1, (-1, 2, 8)).unflatten(-1, (-1, 2, 8))
    return parts.permute(0, 1, 3, 4, 6, 2, 5).flatten(3).flatten(0, 2)


def across(block: Tensor) -> Tensor:
    """One score of each matrix: along heads or seeds."""
    return block.flatten(1).t()


def centred(block: Tensor, drop_count: int) -> Tensor:
    """Drops as numbers of mean 0 and variance 1."""
    q = drop_count / 256
    return ((block < drop_count).float() - q) / math.sqrt(q * (1 - q))


def keep_rate(counts: Tensor) -> float:
    """Drops are as many as they should be, for eight values of p; `counts` of each byte's value."""
    found = []
    n = counts.sum().item()
    for k in RATES:
        q = k / 256
        dropped = counts[:k].sum().item()
        found.append(pvalues.normal((dropped - n * q) / math.sqrt(n * q * (1 - q))))
    return pvalues.smallest(found)


def bytes_of_a_word(block: Tensor) -> float:
    """The six pairs of bytes of a word, and half of each of the four."""
    parts = list(words(block).unflatten(-1, (-1, 4)).unbind(-1))
    found = [pvalues.cells(joint([parts[a], parts[b]], 8, 0)) for a in range(4) for b in range(a)]
    found += [pvalues.cells(joint(parts, 4, shift)) for shift in (0, 4)]
    return pvalues.smallest(found)


def _correlations(drops: Tensor) -> Tensor:
    """Standard normal sums over all pairs of scores (di, dj) apart: float32 `[rows/2, cols/2]`."""
    height, width = drops.shape
    power = torch.fft.rfft2(drops, (2 * height, 2 * width)).abs().square()
    total = torch.fft.irfft2(power, (2 * height, 2 * width))[: height // 2, : width // 2]
    pairs = torch.outer(height - torch.arange(height // 2), width - torch.arange(width // 2))
    return total / pairs.sqrt()


def pairs_at_offsets(block: Tensor) -> float:
    """Drops of two scores (di, dj) apart are not correlated, at any offset, nor at special ones."""
    found = []
    for k in (26, 128):
        z = sum(_correlations(centred(matrix, k)) for matrix in block) / math.sqrt(block.shape[0])
        special = [z[0, [d for d in OFFSETS if d < z.shape[1]]]]
        special += [z[di, [0, 1, di]] for di in OFFSETS if di < z.shape[0]]
        found += [
            pvalues.largest_normal(z.flatten()[1:]),
            pvalues.largest_normal(torch.cat(special)),
        ]
    return pvalues.smallest(found)


def rectangles_at_offsets(block: Tensor) -> float:
    """Drops of the corners of rectangles: (i, j), (i, j + dj), (i + di, j) and (i + di, j + dj).

    Their product is 0 on average: for some di and every dj, and for special ones.
    """
    found = []
    width = block.shape[2]
    pairs = (width - torch.arange(width // 2)).double()
    for k in (26, 128):
        for di in (d for d in ROW_OFFSETS if d < block.shape[1]):
            total = torch.zeros(width // 2, dtype=torch.float64)
            for matrix in block[:2]:
                drops = centred(matrix, k)
                for some in (drops[di:] * drops[:-di]).split(64):
                    power = torch.fft.rfft(some, 2 * width).abs().square().double().sum(0)
                    total += torch.fft.irfft(power)[: width // 2]
            z = total / (pairs * len(block[:2]) * (block.shape[1] - di)).sqrt()
            special = z[[d for d in OFFSETS if d < width // 2]]
            found += [pvalues.largest_normal(z[1:]), pvalues.largest_normal(special)]
    return pvalues.smallest(found)


def rectangles(square: Tensor, drop_count: int) -> float:
    """The same over every rectangle of a matrix, by the Gram matrix of its rows: standard normal.

    With drops d of mean 0 and variance 1, the sum over pairs of rows of (sum over j of d[i, j] *
    d[i', j])^2 is that over all rectangles twice, and that over pairs of equal columns. Products of
    different rectangles are not correlated, so the variance is their number.
    """
    drops = centred(square, drop_count).double()
    gram, squares = drops @ drops.t(), drops.square()
    twice = (gram.square() - squares @ squares.t()).triu(1).sum().item()
    return twice / 2 / math.sqrt(math.prod(math.comb(n, 2) for n in drops.shape))


def sum_and_largest(z: Tensor) -> float:
    """Standard normal values that should be independent: their squares' sum, and the largest."""
    total = pvalues.chi_square(z.square().sum().item(), z.numel())
    return pvalues.smallest([total, pvalues.largest_normal(z)])


def pairs_of_lines(block: Tensor) -> float:
    """No two rows and no two columns of a matrix are correlated: the largest correlation."""
    found = []
    for matrix in block[:4]:
        for lines in (matrix[:2048], matrix[:, :2048].t()):
            signs = centred(lines, 128)
            gram = signs @ signs.t() / math.sqrt(lines.shape[1])
            at = torch.triu_indices(*gram.shape, 1)
            found.append(pvalues.largest_normal(gram[at[0], at[1]]))
    return pvalues.smallest(found)


def spectrum_2d(block: Tensor) -> float:
    """The largest peak of two-dimensional Fourier transforms of decisions at p = 1/2 and 0.1."""
    found = []
    for matrix in block:
        for k in (26, 128):
            drops = centred(matrix, k)
            power = torch.fft.rfft2(drops).abs().square() / drops.numel()
            found.append(pvalues.largest_exponential(power[1:, 1:-1]))
    return pvalues.smallest(found)


ORDERS = (rows, columns, diagonals, antidiagonals, words)
MATRIX_TESTS = (
    bytes_of_a_word, pairs_at_offsets, rectangles_at_offsets, pairs_of_lines, spectrum_2d,
)  # fmt: skip
