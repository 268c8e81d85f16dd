"""The backward where a warp writes dQ of heads whose sums are complete, while blocks of keys of
other heads are computed (sm90/complete_heads.h): calls with three blocks of keys for each
multiprocessor and more. Whichever part of dQ that warp does not come to, the kernel after writes;
both have to give the same dQ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attention import attention
from cute_attention.native import rows
from every_row import DTYPES, fixture_of, skip_unless_it_is_chosen
from kernel_calls import CAUSAL, Case, options_for
from test_backward_kernels import BACKWARD, check, make

pytestmark = pytest.mark.gpu

COUNTING = [row for row in BACKWARD if row.arch == "sm90" and not row.has_two_kernels()]
row = fixture_of(COUNTING, skip_unless_it_is_chosen)


def case_of(name: str) -> Case:
    blocks = 3 * torch.cuda.get_device_properties(0).multi_processor_count
    heads = -(-blocks // 6)  # of two sequences with three blocks each
    return {
        "full": Case(2, 300, 300, heads, heads, {}),
        "causal": Case(2, 384, 384, heads, heads, CAUSAL),
        "last_tiles_with_few_queries": Case(2, 129, 300, heads, heads, {}),
        "gqa": Case(2, 200, 300, 3 * heads, heads, CAUSAL),
        # The first tiles of queries see no key: nothing is added to their sums.
        "queries_without_keys": Case(2, 500, 300, heads, heads, CAUSAL),
        # No query sees the last blocks of keys: they have no steps.
        "keys_without_queries": Case(2, 100, 300, heads, heads, {"window": (200, 20)}),
        "window": Case(2, 400, 400, heads, heads, {"window": (60, 30)}),
        # Two blocks of the last round are divided into parts, if its steps are enough.
        "a_last_round_in_parts": Case(1, 1100, 256, blocks // 2 + 1, blocks // 2 + 1, {}),
    }[name]


NAMES = [
    "full",
    "causal",
    "last_tiles_with_few_queries",
    "gqa",
    "queries_without_keys",
    "keys_without_queries",
    "window",
    "a_last_round_in_parts",
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients(row: rows.TableRow, name: str, deterministic: bool) -> None:
    case = case_of(name)
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options, deterministic=deterministic)


def test_gradient_of_a_sink(row: rows.TableRow) -> None:
    """The kernel after computes it, whoever has written dQ."""
    case = case_of("causal")
    inputs, grad_out = make(row, case)
    sink = torch.randn(case.heads, device="cuda", requires_grad=True)
    check(row, inputs, grad_out, case.options | {"sink": sink})


def test_narrow_heads_leave_their_neighbours_alone(row: rows.TableRow) -> None:
    """dQ of 8 columns less than the row has."""
    case, dtype = case_of("causal"), DTYPES[row.dtype]
    shape = (case.batch, case.seqlen_q, case.heads)
    q, k, v, grad_out = (
        torch.randn(*shape, dim - 8, device="cuda").to(dtype)
        for dim in (row.head_dim, row.head_dim, row.head_dim_v, row.head_dim_v)
    )
    check(row, (q, k, v), grad_out, case.options)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_whoever_writes_the_bits_are_the_same(row: rows.TableRow, options: dict[str, Any]) -> None:
    """In a fixed order the sums have the same bits in every run, and so have both ways to write
    them. A single sequence has too few blocks of keys for heads to be counted."""
    case = case_of("full")
    inputs, grad_out = make(row, case)
    options = options_for(row, options | {"deterministic": True}, case.heads)

    def gradients(first: int, last: int) -> tuple[torch.Tensor, ...]:
        leaves = [t[first:last].detach().requires_grad_() for t in inputs]
        out = attention(*leaves, backend=row.arch, **options)
        return torch.autograd.grad(out, leaves, grad_out[first:last])

    together = gradients(0, 2)
    for sequence in range(2):
        alone = gradients(sequence, sequence + 1)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[sequence : sequence + 1], b)
