"""The quick form of tools/dropout_statistics: our bits pass, and those of bad mixers fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cute_attention.semantics.dropout import as_seed, drop_count, mix, random_bytes

TOOL = Path(__file__).parents[1] / "tools" / "dropout_statistics"
sys.path.insert(0, str(TOOL))

import progressions  # noqa: E402
import pvalues  # noqa: E402
from battery import histogram  # noqa: E402
from examine import QUICK, examine  # noqa: E402
from sources import MIXERS, xor_multiply  # noqa: E402


@pytest.mark.parametrize("source", ["ours", "philox", "steps: small", "steps: the same"])
def test_good_bits_pass(source: str) -> None:
    """100 p-values of a fixed seed: none below 1 in 10^5."""
    for test, found in examine(source, sizes=QUICK).items():
        assert min(found.values()) > 1e-5, (test, found)


@pytest.mark.parametrize(
    ("source", "failed"),
    [
        ("mixer: none", {"runs", "gaps", "spectrum", "rectangles_at_offsets", "all_rectangles"}),
        ("mixer: one xorshift", {"runs", "gaps", "spectrum", "pairs_at_offsets"}),
        ("mixer: one multiplication", {"near_returns"}),
    ],
)
def test_bad_bits_fail(source: str, failed: set[str]) -> None:
    results = examine(source, sizes=QUICK)
    assert failed <= {test for test, found in results.items() if min(found.values()) < 1e-10}


def test_keep_rates_of_a_hundred_million_draws() -> None:
    """To 1 in 10^4 of the draws, for every drop count."""
    counts, seed = torch.zeros(256, dtype=torch.int64), as_seed(2, "cpu")
    for head in range(96):
        counts += histogram(random_bytes(seed, (head, head + 1), (0, 1024), (0, 1024)), 256)
    dropped = counts.cumsum(0) / counts.sum()
    assert counts.sum() > 100_000_000
    assert (dropped - torch.arange(1, 257) / 256).abs().max() < 1e-4
    assert abs(dropped[drop_count(0.1) - 1].item() - 26 / 256) < 1e-4


def test_a_changed_bit_changes_half_of_the_others() -> None:
    """The largest of 1024 means of 2^16 signs is 0.0156 with probability 1 / 16."""
    largest, mean = progressions.avalanche(mix, 1 << 16)
    assert largest < 0.02 and mean < 0.0036  # random: 0.0031
    assert progressions.avalanche(MIXERS["one multiplication"], 1 << 16)[0] == 1


def test_the_last_shift_is_needed() -> None:
    assert progressions.near_returns(mix, 1, 2048) > 1e-5
    cheaper = xor_multiply(16, 0x21F0AAAD, 15, 0x735A2D97)
    assert progressions.near_returns(cheaper, 1, 2048) < 1e-10


def test_mix_is_a_bijection() -> None:
    """Its inverse, step by step, gives 2^20 inputs back."""
    x = torch.arange(-(2**31), 2**31, 2**12 - 1).to(torch.int32)
    y = mix(x.clone())
    for factor in (0x735A2D97, 0x21F0AAAD):
        y ^= ((y >> 15) & 0x1FFFF) ^ ((y >> 30) & 3)  # undoes y ^= y >> 15
        y *= (pow(factor, -1, 2**32) + 2**31) % 2**32 - 2**31
    y ^= (y >> 16) & 0xFFFF
    assert torch.equal(y, x)
    assert torch.equal(mix(x.clone()), xor_multiply(16, 0x21F0AAAD, 15, 0x735A2D97, 15)(x.clone()))


def test_p_values() -> None:
    """Quantiles from tables."""
    assert pvalues.chi_square(18.307, 10) == pytest.approx(0.1, rel=1e-3)  # 0.05 above
    assert pvalues.chi_square(3.940, 10) == pytest.approx(0.1, rel=1e-3)  # 0.05 below
    assert pvalues.normal(1.959964) == pytest.approx(0.05, rel=1e-5)
    assert pvalues.poisson(9, 4.0) == pytest.approx(2 * 0.021363, rel=1e-4)
    assert pvalues.poisson(0, 4.0) == pytest.approx(2 * 0.018316, rel=1e-4)
    assert pvalues.smallest([0.5, 0.01]) == pytest.approx(1 - 0.99**2)
    assert pvalues.cells(torch.tensor([10, 20, 30, 40])) == pytest.approx(2 * 0.000170, rel=1e-2)
