"""The sums of dQ on sm90: where there are many, of at most 8 blocks of keys each, they begin with
a store, else at zeros. Memory that nobody has set is NaN here, so that a sum without a beginning
shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.semantics.formula import attention_reference
from every_row import DTYPES, fixture_of
from kernel_calls import CAUSAL, Case, offsets, plain_pytorch
from test_backward_kernels import BACKWARD, NAMES, gradients, make
from tolerances import assert_as_accurate

pytestmark = pytest.mark.gpu

LIMIT = 8 * 128  # keys
row = fixture_of(
    row
    for row in BACKWARD
    if row.arch == "sm90" and row.head_dim in (64, 128) and row.head_dim_v == row.head_dim
    if not row.score_mods
)

CASES = {
    "full": Case(1, 200, LIMIT, 2, 2, {}),
    "causal": Case(1, LIMIT, LIMIT, 2, 2, CAUSAL),
    "gqa": Case(2, 140, LIMIT, 6, 2, CAUSAL),
    # Nobody sees the first 824 keys.
    "keys_without_queries": Case(1, 150, LIMIT, 2, 1, {"window": (50, 0)}),
    # The first 300 queries see no key, or 299.
    "queries_without_keys": Case(1, LIMIT + 300, LIMIT, 2, 1, CAUSAL),
    "narrow_window": Case(1, LIMIT, LIMIT, 2, 2, {"window": (70, 0)}),
}


def batch_of(row: Any, rows: int, many: bool) -> int:
    """How often sums of `rows` queries of all heads are needed, so that there are more than 2^15
    numbers for each SM, or once."""
    device = torch.cuda.get_device_properties(0)
    return (device.multi_processor_count << 15) // (rows * row.head_dim) + 1 if many else 1


def poison_free_memory() -> None:
    """What PyTorch's allocator gives next is likely to be NaN."""
    for megabytes in (1, 8, 64):
        torch.full((megabytes << 18,), math.nan, device="cuda")


def assert_gradients(
    found: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    grad_out: Tensor,
    options: dict[str, Any],
) -> None:
    """Compares dq, dk and dv with the formula in float64. All tensors have a batch."""

    def exact(*leaves: Tensor) -> Any:
        return attention_reference(*leaves, return_lse=True, **options)

    def plain(*leaves: Tensor) -> Any:
        return plain_pytorch(*leaves, options)

    expected = gradients(exact, tuple(t.double() for t in inputs), grad_out, None)
    pytorch = gradients(plain, inputs, grad_out, None)
    for name, a, b, c in zip(NAMES, found, expected, pytorch, strict=True):
        assert_as_accurate(a, b, c.nan_to_num(), name)


@pytest.mark.parametrize("more", [0, 1], ids=["at_the_limit", "a_key_more"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize("many", [False, True], ids=["few_sums", "many_sums"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_edges_of_the_store(
    row: Any, case: Case, many: bool, deterministic: bool, more: int
) -> None:
    batch = case.batch * batch_of(row, case.batch * case.seqlen_q * case.heads, many)
    inputs, grad_out = make(row, replace(case, batch=batch, seqlen_k=LIMIT + more))

    def ours(*leaves: Tensor) -> Any:
        return attention(
            *leaves, backend=row.arch, return_lse=True, deterministic=deterministic, **case.options
        )

    poison_free_memory()
    assert_gradients(gradients(ours, inputs, grad_out, None), inputs, grad_out, case.options)


@pytest.mark.parametrize("more", [0, 1], ids=["at_the_limit", "a_key_more"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize("many", [False, True], ids=["few_sums", "many_sums"])
def test_packed_edges_of_the_store(row: Any, many: bool, deterministic: bool, more: int) -> None:
    """Sequences of the greatest length, shorter ones, one without keys and one without queries."""
    times = batch_of(row, 4 * 500, many)
    lengths_q, lengths_k = [130, 70, 0, 40, 260] * times, [LIMIT + more, 0, 129, LIMIT, 300] * times
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    options = {"backend": row.arch, "return_lse": True, "deterministic": deterministic}
    *inputs, grad_out = (
        torch.randn(int(cu[-1]), heads, row.head_dim, device="cuda").to(DTYPES[row.dtype])
        for cu, heads in ((cu_q, 4), (cu_k, 2), (cu_k, 2), (cu_q, 4))
    )

    def ours(*leaves: Tensor) -> Any:
        return attention_varlen(
            *leaves, cu_q, cu_k, max(lengths_q), max(lengths_k), **CAUSAL, **options
        )

    poison_free_memory()
    found = gradients(ours, tuple(inputs), grad_out, None)
    for sequence in range(len(lengths_q)):
        of_q, of_k = (slice(int(cu[sequence]), int(cu[sequence + 1])) for cu in (cu_q, cu_k))
        spans = of_q, of_k, of_k
        mine = tuple(t[span][None] for t, span in zip(inputs, spans, strict=True))
        got = tuple(t[span][None] for t, span in zip(found, spans, strict=True))
        assert_gradients(got, mine, grad_out[of_q][None], CAUSAL)
