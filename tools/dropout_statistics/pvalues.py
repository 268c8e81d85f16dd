"""From test statistics to p-values.

Each p-value here is small if the statistic is unlikely for random bits, on either side: bits that
are more even than random ones are as wrong as uneven ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def two_sided(lower: float, upper: float) -> float:
    """From the probabilities of at most, and of at least, what came."""
    return min(1.0, 2 * min(lower, upper))


def chi_square(statistic: float, degrees: float) -> float:
    half, x = (torch.tensor(value / 2, dtype=torch.float64) for value in (degrees, statistic))
    lower, upper = torch.special.gammainc(half, x), torch.special.gammaincc(half, x)
    return two_sided(lower.item(), upper.item())


def normal(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def poisson(count: int, mean: float) -> float:
    expected = torch.tensor(mean, dtype=torch.float64)

    def at_most(n: int) -> float:
        number = torch.tensor(n + 1.0, dtype=torch.float64)
        return torch.special.gammaincc(number, expected).item()

    return two_sided(at_most(count), 1.0 if count == 0 else 1 - at_most(count - 1))


def smallest(values: list[float]) -> float:
    """The smallest of several p-values, as one p-value of their number (Sidak)."""
    least = min(values)
    return -math.expm1(len(values) * math.log1p(-least)) if least < 1 else 1.0


def largest_normal(z: Tensor) -> float:
    """The largest magnitude of many independent standard normal values."""
    p = normal(z.abs().max().item())
    return -math.expm1(z.numel() * math.log1p(-p)) if p < 1 else 1.0


def largest_exponential(values: Tensor) -> float:
    """The largest of many independent exponential values of mean 1; only too large ones count."""
    p = math.exp(-values.max().item())
    return -math.expm1(values.numel() * math.log1p(-p)) if p < 1 else 1.0


def cells(counts: Tensor, probabilities: Tensor | None = None) -> float:
    """Chi-square of counts in cells, equally likely unless `probabilities` says otherwise."""
    counts = counts.double()
    if probabilities is None:  # the variance of chi-square is exact, however few a cell has
        expected = counts.mean()
        return chi_square(((counts - expected) ** 2 / expected).sum().item(), counts.numel() - 1)
    expected = probabilities.double() * counts.sum()
    rare = expected < 10  # joined to one cell, since chi-square would be wrong in them
    if rare.any():
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
        if expected[-1] < 1:
            counts, expected = counts[:-1], expected[:-1]
    return chi_square(((counts - expected) ** 2 / expected).sum().item(), counts.numel() - 1)
