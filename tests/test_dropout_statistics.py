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
from sources import MIXERS, shifted, xor_multiply  # noqa: E402


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
    """To 1 in 10^4 of the draws; over all drop counts to 4 standard deviations at p = 1/2."""
    counts, seed = torch.zeros(256, dtype=torch.int64), as_seed(2, "cpu")
    for head in range(96):
        counts += histogram(random_bytes(seed, (head, head + 1), (0, 1024), (0, 1024)), 256)
    deviation = (counts.cumsum(0) / counts.sum() - torch.arange(1, 257) / 256).abs()
    assert counts.sum() > 100_000_000
    assert deviation.max() < 2e-4
    for p in (0.05, 0.1, 0.2, 0.25, 0.5, 0.9):
        assert deviation[drop_count(p) - 1] < 1e-4, p


def test_a_changed_bit_changes_half_of_the_others() -> None:
    """The largest of 1024 means of 2^16 signs is 0.0156 with probability 1 / 16."""
    largest, mean = progressions.avalanche(mix, 1 << 16)
    assert largest < 0.02 and mean < 0.0036  # random: 0.0031
    assert progressions.avalanche(MIXERS["one multiplication"], 1 << 16)[0] == 1


def test_the_last_shift_is_needed() -> None:
    """Without it, some bits of the input change some bits of the output never, or always."""
    cheaper = xor_multiply(15, 0x2C1B3C6D, 12, 0x297A2D39)
    assert progressions.avalanche(cheaper, 1 << 16)[0] > 0.99


def test_mix_is_a_bijection() -> None:
    """Its inverse, step by step, gives 2^20 inputs back."""
    x = torch.arange(-(2**31), 2**31, 2**12 - 1).to(torch.int32)
    y = mix(x.clone())
    for shift, factor in ((15, 0x297A2D39), (12, 0x2C1B3C6D), (15, 1)):
        y = y ^ shifted(y, shift) ^ (shifted(y, 2 * shift) if 2 * shift < 32 else 0)
        y *= (pow(factor, -1, 2**32) + 2**31) % 2**32 - 2**31
    assert torch.equal(y, x)


def test_p_values() -> None:
    """Quantiles from tables."""
    assert pvalues.chi_square(18.307, 10) == pytest.approx(0.1, rel=1e-3)  # 0.05 above
    assert pvalues.chi_square(3.940, 10) == pytest.approx(0.1, rel=1e-3)  # 0.05 below
    assert pvalues.normal(1.959964) == pytest.approx(0.05, rel=1e-5)
    assert pvalues.poisson(9, 4.0) == pytest.approx(2 * 0.021363, rel=1e-4)
    assert pvalues.poisson(0, 4.0) == pytest.approx(2 * 0.018316, rel=1e-4)
    assert pvalues.smallest([0.5, 0.01]) == pytest.approx(1 - 0.99**2)
    assert pvalues.cells(torch.tensor([10, 20, 30, 40])) == pytest.approx(2 * 0.000170, rel=1e-2)
