"""ALiBi on every row that computes it, on a GPU: what the tests of all rows leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import BackendError, attention, attention_varlen
from cute_attention.native import rows
from every_row import (
    ALL,
    backend_of,
    fixture_of,
    options_of,
    skip_unless_it_is_chosen,
)
from kernel_calls import (
    assert_all_as_accurate,
    check_forward,
    in_float64,
    in_pytorch,
    inputs_of,
    results,
)
from tolerances import ACCURACY_FACTOR, assert_same_bits

pytestmark = pytest.mark.gpu

row = fixture_of([row for row in ALL if "alibi" in row.score_mods], skip_unless_it_is_chosen)
NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_exact(
    row: rows.TableRow,
    tensors: list[Tensor],
    options: dict[str, Any],
    factor: float = ACCURACY_FACTOR,
) -> None:
    found = results(attention, tensors, backend=backend_of(row), **options)
    exact, pytorch = in_float64(tensors, **options), in_pytorch(tensors, **options)
    assert_all_as_accurate(found, exact, pytorch, factor=factor)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_slopes_of_each_sequence(row: rows.TableRow, options: dict[str, Any]) -> None:
    """Slopes [batch, heads], of strides that no contiguous tensor has, dense and packed."""
    tensors = inputs_of(row, 3, (150, 203), (6, 2))
    slopes = (torch.rand(6, 2, 3, device="cuda")[:, 1].t() / 4).bfloat16().float()
    options = {**options_of(row, options, 6), "alibi_slopes": slopes}
    assert_exact(row, tensors, options)
    dense = results(attention, tensors, backend=backend_of(row), deterministic=True, **options)
    cu = [torch.arange(0, 3 * n + 1, n, device="cuda").int() for n in (150, 203)]

    def packed(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return attention_varlen(q, k, v, *cu, 150, 203, **more)

    flat = [tensor.flatten(0, 1) for tensor in tensors]
    found = results(packed, flat, backend=backend_of(row), deterministic=True, **options)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bits(found[name].view_as(dense[name]), dense[name], name)


def test_one_slope_for_all_heads(row: rows.TableRow) -> None:
    """A slope that is expanded over the heads has a stride of 0."""
    tensors = inputs_of(row, 2, (70, 130), (4, 4))
    slope = torch.full((1,), 0.125, device="cuda")
    options = options_of(row, {"backend": backend_of(row), "deterministic": True}, 4)
    expected = results(attention, tensors, **{**options, "alibi_slopes": slope.repeat(4)})
    found = results(attention, tensors, **{**options, "alibi_slopes": slope.expand(4)})
    for name in NAMES:
        assert_same_bits(found[name], expected[name], name)


@pytest.mark.parametrize("magnitude", [2.0**-14, 2.0**-7, 0.5, 16.0])
def test_distances_in_long_sequences(row: rows.TableRow, magnitude: float) -> None:
    """The last queries of a long sequence: slope times position is far larger than any score, and
    its rounding must not reach the scores. With a slope of 16 a query sees next to nothing but its
    own key, and dS is what two nearly equal terms leave, one of them from the output rounded to 16
    bits: there the gradients have twice the room."""
    tensors = inputs_of(row, 1, (100, 70_000), (2, 1))
    slopes = torch.tensor([magnitude, magnitude / 2], device="cuda")
    options = options_of(row, {"causal": True}, 2)
    factor = ACCURACY_FACTOR * (2 if magnitude > 1 else 1)
    assert_exact(row, tensors, {**options, "alibi_slopes": slopes}, factor)


@pytest.mark.parametrize("magnitude", [2.0**15, 2.0**119], ids=["2^15", "2^119"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_slopes_beyond_16_bits(
    row: rows.TableRow, options: dict[str, Any], magnitude: float
) -> None:
    """Slopes that no number of 16 bits holds once they are in the unit of scores, which is `scale`,
    or whose products with a distance fp32 does not: a query sees its own key alone. Usual slopes of
    other heads, which may share a tile with them, keep their terms."""
    q, k, v, _ = inputs_of(row, 2, (150, 203), (4, 2))
    slopes = torch.tensor([0.25, magnitude, 1.5 * magnitude, 0.5], device="cuda")
    options = options_of(row, {**options, "alibi_slopes": slopes}, 4)
    check_forward((q, k, v), backend_of(row), **options)


def test_slopes_that_require_a_gradient_are_refused(row: rows.TableRow) -> None:
    q, k, v, _ = inputs_of(row, 1, (20, 20), (2, 2))
    options = options_of(row, {"backend": row.arch}, 2)
    options["alibi_slopes"] = options["alibi_slopes"].requires_grad_()
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        attention(q, k, v, **options)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_what_no_row_serves_is_refused(arch: str) -> None:
    """No row computes ALiBi with a scale that is not positive, and the error says so of each."""
    if not any(row.arch == arch for row in ALL):
        pytest.skip(f"no row of {arch}")
    q = torch.randn(1, 20, 2, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.rand(2, device="cuda")
    with pytest.raises(BackendError, match=r"it does not serve a scale that is not positive"):
        attention(q, q, q, alibi_slopes=slopes, scale=-0.5, backend=arch)
