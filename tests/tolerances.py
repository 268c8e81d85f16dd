"""How much two results may differ, and why. Every comparison of numbers in the tests uses a limit
of this table, or of the table in `cute_attention.bench.roundings`.

The main rule is `assert_as_accurate`: compared with float64, the error is at most twice that of
plain PyTorch in the same dtype. The other rules say how much two computations of the same thing may
differ by rounding alone. An error is the largest absolute difference divided by the largest finite
magnitude that is expected. For an LSE, which is a logarithm, the divisor is at least 1. Infinities
and NaN are compared by position and sign, never by a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_attention.bench.roundings import LIMITS


@dataclass(frozen=True)
class Rule:
    """`ulps`: allowed error in units of `torch.finfo(dtype).eps`."""

    ulps: float
    reason: str


RULES = {
    "exact": Rule(0, "the same operations on the same values: bits agree"),
    "rounding": Rule(64, "the same sums in another order, and exp2 for exp: some ulps a term"),
    "gradient": Rule(256, "a chain of such sums, with P recomputed from the LSE: s - lse cancels"),
    "large_scores": Rule(
        4096, "scores of 1e2 to 1e3: an ulp of one is that many of its exponential"
    ),
    "stored": Rule(1, "what rounding to the dtype of the result alone can cost"),
}

# The largest ratio of our error to that of PyTorch in the same dtype. The rule "stored" is added to
# the limit, because PyTorch may be exact by luck.
ACCURACY_FACTOR = 2.0


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference of the finite values, divided by the largest magnitude expected.

    If `floor` is larger, it is the divisor. If all expected values are 0, the divisor is 1.

    Infinities and NaN must be in the same places.
    """
    assert actual.shape == expected.shape, f"{list(actual.shape)} != {list(expected.shape)}"
    assert_same_specials(actual, expected)
    finite = expected.isfinite()
    actual64, expected64 = actual[finite].double(), expected[finite].double()
    if not actual64.numel():
        return 0.0
    difference = (actual64 - expected64).abs().max().item()
    return difference / (max(expected64.abs().max().item(), floor) or 1.0)


def assert_same_specials(actual: Tensor, expected: Tensor) -> None:
    """Asserts that NaN, +inf and -inf are in the same places."""
    for name, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(actual) != test(expected)).sum().item()
        assert not wrong, f"{name}: {wrong} places differ"


def assert_close(
    actual: Tensor, expected: Tensor, rule: str, dtype: torch.dtype | None = None, name: str = ""
) -> None:
    """Asserts that two computations of the same thing agree as well as `RULES[rule]` says. The ulps
    are those of `dtype`, or of the dtype of `actual` if that is None."""
    assert expected.dtype == actual.dtype or dtype is not None, "say whose ulps count"
    limit = RULES[rule].ulps * torch.finfo(dtype or actual.dtype).eps
    found = error(actual, expected, floor=1.0 if name == "lse" else 0.0)
    assert found <= limit, f"{name}: error {found:.3g}, allowed {limit:.3g} ({RULES[rule].reason})"


def assert_as_accurate(
    actual: Tensor,
    exact: Tensor,
    pytorch: Tensor,
    name: str = "",
    factor: float = ACCURACY_FACTOR,
    slack: Tensor | None = None,
) -> None:
    """Asserts the main rule. `exact` is the result in float64, and `pytorch` that of plain PyTorch
    in the dtype of `actual`. Each value may be off by `slack` besides. A test that passes another
    `factor` or a slack says why."""
    assert exact.dtype == torch.float64 and actual.dtype == pytorch.dtype
    stored = RULES["stored"].ulps * torch.finfo(actual.dtype).eps
    limit = factor * error(pytorch, exact) + stored
    if slack is not None:
        exact = actual.double().clamp(exact - slack, exact + slack)
    found = error(actual, exact)
    assert found <= limit, f"{name}: error {found:.3g}, allowed {limit:.3g}: {factor:g} x PyTorch's"


def assert_near(found: Tensor, exact: Tensor, name: str, share: float = 0.02) -> None:
    """Asserts that an error is at most `share` of the largest magnitude. `exact` is in float64.

    This is for calls that plain PyTorch has no like of, such as packed ones. Results of another
    sequence, head or tile are far beyond it.
    """
    found_error = error(found.double(), exact)
    assert found_error <= share, f"{name}: error {found_error:.3g}, allowed {share:g}"


def assert_within_roundings(found: dict[str, list[float]], entries: list[str]) -> None:
    """Asserts that errors, counted in roundings, are within the limits of `bench.roundings`.

    This is for inputs with which plain PyTorch is too inaccurate to compare with: its 16-bit scores
    of 1000 are wrong by up to 4. `found` has the errors of each result, one for each entry.
    """
    wrong = [
        f"{entry}, {name}: {value:.3g} roundings, allowed {LIMITS[name]:g}"
        for name, values in found.items()
        for entry, value in zip(entries, values, strict=True)
        if not value <= LIMITS[name]
    ]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """Asserts that all bits are the same. So a NaN equals only the same NaN, and 0 is not -0."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differ = actual.contiguous().view(size) != expected.contiguous().view(size)
    count = int(differ.sum())
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    assert not count, f"{name}: {count} values differ, by up to {float(difference.max()):.3g}"
