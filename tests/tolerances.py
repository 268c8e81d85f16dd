"""How far two results may be apart, and why. Every comparison of numbers in the tests goes through
this table, or through that of `cute_attention.bench.roundings` (below).

The main rule is `assert_as_accurate`: against float64, an error at most twice that of plain PyTorch
in the same dtype. The other rules say how far two computations of the same thing may differ by
rounding alone. Errors are the largest absolute difference over the largest finite magnitude
expected (at least 1 for an LSE, which is a logarithm). Infinities and NaN are compared by position
and sign, never through a difference.
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

# Error against float64 over that of same-dtype PyTorch; "stored" is added, for where PyTorch is
# exact by luck.
ACCURACY_FACTOR = 2.0


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference of the finite values over the largest expected (at least `floor`).

    Specials must agree. Where all that is expected is 0, the difference itself.
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
    """NaN, +inf and -inf in the same places."""
    for name, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(actual) != test(expected)).sum().item()
        assert not wrong, f"{name}: {wrong} places differ"


def assert_close(
    actual: Tensor, expected: Tensor, rule: str, dtype: torch.dtype | None = None, name: str = ""
) -> None:
    """Two computations of one thing agree as `RULES[rule]` says, in ulps of `dtype` (actual's)."""
    assert expected.dtype == actual.dtype or dtype is not None, "say whose ulps count"
    limit = RULES[rule].ulps * torch.finfo(dtype or actual.dtype).eps
    found = error(actual, expected, floor=1.0 if name == "lse" else 0.0)
    assert found <= limit, f"{name}: error {found:.3g}, allowed {limit:.3g} ({RULES[rule].reason})"


def assert_as_accurate(actual: Tensor, exact: Tensor, pytorch: Tensor, name: str = "") -> None:
    """The main rule; `exact` is the float64 result, `pytorch` that of plain PyTorch in actual's
    dtype."""
    assert exact.dtype == torch.float64 and actual.dtype == pytorch.dtype
    stored = RULES["stored"].ulps * torch.finfo(actual.dtype).eps
    limit = ACCURACY_FACTOR * error(pytorch, exact) + stored
    found = error(actual, exact)
    assert found <= limit, f"{name}: error {found:.3g}, allowed {limit:.3g}: twice PyTorch's"


def assert_within_roundings(found: dict[str, list[float]], entries: list[str]) -> None:
    """For inputs on which plain PyTorch is no measure, as its 16-bit scores of 1000 are off by 4:
    errors in roundings of the terms each element is made of, by result, one for each entry."""
    wrong = [
        f"{entry}, {name}: {value:.3g} roundings, allowed {LIMITS[name]:g}"
        for name, values in found.items()
        for entry, value in zip(entries, values, strict=True)
        if not value <= LIMITS[name]
    ]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """The same bytes: NaN equals the same NaN, and 0 is not -0."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differ = actual.contiguous().view(size) != expected.contiguous().view(size)
    count = int(differ.sum())
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    assert not count, f"{name}: {count} values differ, by up to {float(difference.max()):.3g}"
