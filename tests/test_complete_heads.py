"""The backward where a warp writes dQ of heads whose sums are complete, while blocks of keys of
other heads are computed (sm90/complete_heads.h): calls with three blocks of keys for each
multiprocessor and more. Whichever part of dQ that warp does not come to, the kernel after writes;
both have to give the same dQ."""

from __future__ import annotations

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


def case_of(name: str, row: rows.TableRow) -> Case:
    """Calls of which L2 holds a third of the heads or less: so there are several groups, and the
    heads of all but the last one are complete long before the kernel ends."""
    gpu = torch.cuda.get_device_properties(0)
    blocks = 3 * gpu.multi_processor_count
    bytes_of_a_head = 1100 * 8 * row.head_dim  # Q, dO and the sums of dQ
    # Of two sequences with nine blocks of keys each.
    heads = max(-(-blocks // 18), -(-3 * gpu.L2_cache_size // (4 * bytes_of_a_head)))
    return {
        "full": Case(2, 300, 1100, heads, heads, {}),
        "causal": Case(2, 1152, 1152, heads, heads, CAUSAL),
        "few_keys_of_a_head": Case(2, 384, 384, 3 * heads, 3 * heads, CAUSAL),  # head dim 64 alone
        "last_tiles_with_few_queries": Case(2, 129, 1100, heads, heads, {}),
        "gqa": Case(2, 200, 1100, 3 * heads, heads, CAUSAL),
        # The first tiles of queries see no key: nothing is added to their sums.
        "queries_without_keys": Case(2, 1400, 1100, heads, heads, CAUSAL),
        # No query sees the last blocks of keys: they have no steps.
        "keys_without_queries": Case(2, 100, 1100, heads, heads, {"window": (1000, 20)}),
        "window": Case(2, 1100, 1100, heads, heads, {"window": (160, 30)}),
        # The last blocks are divided into parts, which do not count: some heads are never complete.
        "a_last_round_in_parts": Case(1, 1100, 1152, 2 * heads + 1, 2 * heads + 1, {}),
    }[name]


NAMES = [
    "full",
    "causal",
    "few_keys_of_a_head",
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
    case = case_of(name, row)
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options, deterministic=deterministic)


def test_gradient_of_a_sink(row: rows.TableRow) -> None:
    """The kernel after computes it, whoever has written dQ."""
    case = case_of("causal", row)
    inputs, grad_out = make(row, case)
    sink = torch.randn(case.heads, device="cuda", requires_grad=True)
    check(row, inputs, grad_out, case.options | {"sink": sink})


def test_narrow_heads_leave_their_neighbours_alone(row: rows.TableRow) -> None:
    """dQ of 8 columns less than the row has."""
    case, dtype = case_of("causal", row), DTYPES[row.dtype]
    shape = (case.batch, case.seqlen_q, case.heads)
    q, k, v, grad_out = (
        torch.randn(*shape, dim - 8, device="cuda").to(dtype)
        for dim in (row.head_dim, row.head_dim, row.head_dim_v, row.head_dim_v)
    )
    check(row, (q, k, v), grad_out, case.options)


@pytest.mark.parametrize("name", ["full", "causal"])
def test_whoever_writes_the_bits_are_the_same(row: rows.TableRow, name: str) -> None:
    """Which parts of dQ the kernel after writes is another matter in every run. In a fixed order
    their sums have the same bits, and so has what either makes of them."""
    case = case_of(name, row)
    inputs, grad_out = make(row, case)
    leaves = [t.detach().requires_grad_() for t in inputs]
    options = options_for(row, case.options | {"deterministic": True}, case.heads)
    out = attention(*leaves, backend=row.arch, **options)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(4):
        again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
