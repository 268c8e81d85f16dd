"""The backward where one block of keys holds all that a query sees, so that a kernel may write dQ
without sums in memory: every backward row, on a GPU, on both sides of that limit, and on both sides
of 64 keys, up to which sm90 rows of head dim 64 have kernels of their own (sm90/few_keys.h)."""

from __future__ import annotations

import pytest
import torch

from cute_attention import attention
from cute_attention.native import rows
from every_row import DTYPES, fixture_of, skip_unless_it_is_chosen
from kernel_calls import CAUSAL, Case, options_for
from test_backward_kernels import BACKWARD, check, make

pytestmark = pytest.mark.gpu

row = fixture_of(BACKWARD, skip_unless_it_is_chosen)

CASES = {
    "cross": Case(2, 600, 77, 4, 4, {}),
    "a_whole_block": Case(2, 300, 128, 4, 4, {}),
    "one_key_more": Case(2, 300, 129, 4, 4, {}),
    "short": Case(3, 49, 49, 4, 4, {}),
    "half_a_block": Case(2, 300, 64, 4, 4, {}),
    "half_a_block_causal": Case(2, 64, 64, 4, 4, CAUSAL),
    "a_key_more_than_half": Case(2, 70, 65, 4, 4, {}),
    "one_key": Case(2, 130, 1, 4, 4, {}),
    "a_tile_and_a_query": Case(2, 65, 40, 4, 4, {}),
    "short_causal": Case(2, 128, 128, 4, 4, CAUSAL),
    "more_keys_than_queries": Case(2, 33, 120, 4, 4, CAUSAL),
    "gqa": Case(2, 200, 100, 6, 2, {}),
    "gqa_of_half_a_block": Case(2, 70, 50, 6, 2, {}),
    "mqa_in_parts": Case(1, 2000, 77, 8, 1, {}),
    "mqa_of_half_a_block_in_parts": Case(1, 2000, 60, 8, 1, {}),
    # Tiles of queries that see no key are no steps of the block: their dQ must be 0 all the same.
    "tiles_without_keys": Case(2, 700, 60, 4, 4, CAUSAL),
    "window_without_keys": Case(1, 700, 100, 4, 4, {"window": (20, 30)}),
    "window": Case(2, 128, 120, 4, 4, {"window": (20, 30)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_gradients(row: rows.TableRow, case: Case, deterministic: bool) -> None:
    inputs, grad_out = make(row, case)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        check(row, inputs, grad_out, case.options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seqlen", [49, 64])
def test_more_heads_than_run_at_once(row: rows.TableRow, seqlen: int) -> None:
    """A CTA has one head after the other, and the load warp has those of the next ready."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    case = Case(5 * multiprocessors, seqlen, seqlen, 3, 1, CAUSAL)
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options)


def test_gradient_of_the_lse(row: rows.TableRow) -> None:
    case = Case(3, 90, 49, 4, 2, {})
    inputs, grad_out = make(row, case)
    grad_lse = torch.randn(case.batch, case.heads, case.seqlen_q, device="cuda")
    check(row, inputs, grad_out, case.options, grad_lse)


def test_a_sink_whose_gradient_nobody_asks_for(row: rows.TableRow) -> None:
    """With its gradient the call has the kernels for many keys: test_sinks.py."""
    case = Case(3, 90, 49, 4, 2, {"sink": torch.randn(4, device="cuda")})
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options)


def test_narrow_heads_leave_their_neighbours_alone(row: rows.TableRow) -> None:
    """dQ of 8 columns less than the row has, and of each second head of a wider tensor."""
    heads, dim, dtype = 3, row.head_dim - 8, DTYPES[row.dtype]
    q, grad = (torch.randn(2, 150, heads, d, device="cuda").to(dtype)
               for d in (dim, row.head_dim_v - 8))  # fmt: skip
    k = torch.randn(2, 100, heads, dim, device="cuda").to(dtype)
    v = torch.randn(2, 100, heads, row.head_dim_v - 8, device="cuda").to(dtype)
    check(row, (q, k, v), grad, CAUSAL)


def test_a_few_keys_give_the_same_bits_in_every_run(row: rows.TableRow) -> None:
    inputs, grad_out = make(row, CASES["mqa_in_parts"])
    leaves = [t.detach().requires_grad_() for t in inputs]
    options = options_for(row, {"deterministic": True}, leaves[0].shape[2])
    out = attention(*leaves, backend=row.arch, **options)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
