"""Every backward row of the kernel tables, on a GPU, against the direct formula in float64."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen, explain
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_reference
from every_row import (
    DTYPES,
    LIMIT,
    ONLY,
    fixture_of,
    run_alone,
    run_on_small_chip,
    sharing,
    skip_if_places_matter,
)
from kernel_calls import (
    CASES,
    CAUSAL,
    Case,
    case_inputs,
    offsets,
    options_for,
    plain_pytorch,
    strided,
)
from shared_memory import has_two_kernels
from tolerances import assert_as_accurate

pytestmark = pytest.mark.gpu

BACKWARD = [row for row in rows.table() if row.direction == "backward"]
NAMES = ("dq", "dk", "dv")
# What else runs on each backward row, beside the files of tests/test_adversarial.py.
OTHERS = (
    "early_backward",
    "few_keys",
    "infinite_sinks",
    "key_parts",
    "sinks",
    "sinks_of_blind_rows",
    "what_masks_hide",
)
row = fixture_of(BACKWARD)


def gradients(
    function: Any, inputs: tuple[Tensor, ...], grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v of a function that returns out and lse."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    out, lse = function(*leaves)
    if grad_lse is None:
        return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    return torch.autograd.grad((out, lse), leaves, (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))


def make(row: rows.TableRow, case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k, v and the gradient of the output. Each has other strides."""
    shape = case.batch, case.seqlen_q, case.heads, row.head_dim_v
    return case_inputs(row, case), strided(*shape, dtype=DTYPES[row.dtype])


def check(
    row: rows.TableRow,
    inputs: tuple[Tensor, ...],
    grad_out: Tensor,
    options: dict[str, Any],
    grad_lse: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    options = options_for(row, options, inputs[0].shape[2])

    def ours(*leaves: Tensor) -> Any:
        return attention(
            *leaves, backend=row.arch, return_lse=True, deterministic=deterministic, **options
        )

    def exact(*leaves: Tensor) -> Any:
        return attention_reference(*leaves, return_lse=True, **options)

    got = gradients(ours, inputs, grad_out, grad_lse)
    expected = gradients(exact, tuple(t.double() for t in inputs), grad_out, grad_lse)
    plain = gradients(lambda *leaves: plain_pytorch(*leaves, options), inputs, grad_out, grad_lse)
    for name, a, b, c in zip(NAMES, got, expected, plain, strict=True):
        if "dropout" in row.score_mods and b.numel() and not b.any():
            # With one key, dS = P (c Z dP - rowsum(dO O)) = 0: two equal terms, one of which is
            # computed from the output as it was rounded, where plain PyTorch does not round. An
            # element of dK is a sum over all queries that see the key.
            queries = inputs[0].shape[1] * inputs[0].shape[2] // inputs[1].shape[2]
            assert a.abs().max() <= 8 * torch.finfo(a.dtype).eps * queries**0.5, name
            continue
        # In a row without keys plain PyTorch has NaN, which does not count as its error.
        assert_as_accurate(a, b, c.nan_to_num(), name)


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
def test_rows_that_share_a_key_with_another(row: rows.TableRow) -> None:
    """Runs this file once more, and others, for a row that dispatch does not choose for every
    shape, in a process where it is the only backward row."""
    if row not in sharing():
        pytest.skip("no other row has its key")
    others = [str(Path(__file__).with_name(f"test_{name}.py")) for name in OTHERS]
    run_alone([__file__, *others], row.name, {ONLY: f"^{row.name}$|_fwd_"})


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
def test_the_row_is_chosen(row: rows.TableRow) -> None:
    """Every row is chosen for some length: of rows with the same key, one is for short sequences
    and one for long ones."""
    chosen = []
    for seqlen in (256, 8192):
        (q, k, v), _ = make(row, Case(1, seqlen, seqlen, 4, 4, {}))
        answer = explain(q, k, v, backend=row.arch, **options_for(row, {}, q.shape[2]))
        report = next(report for report in answer.backward if report.backend == row.arch)
        assert answer.chosen_backward == row.arch
        chosen.append([candidate.name for candidate in report.rows if candidate.chosen])
    assert [row.name] in chosen and all(len(names) == 1 for names in chosen)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_accuracy(row: rows.TableRow, case: Case) -> None:
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_many_sums_of_dq_begin_with_a_store(row: rows.TableRow, options: dict[str, Any]) -> None:
    """Few blocks of keys, and more than 2^15 numbers of dQ for each multiprocessor
    (sm90/backward_states.h): nobody sets the sums to zero, but for rows with some features."""
    if row.arch != "sm90" or has_two_kernels(row):
        pytest.skip("sums begin with zeros, or there are none")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch = 1 + 2**15 * multiprocessors // (270 * row.head_dim)
    inputs, grad_out = make(row, Case(batch, 270, 270, 1, 1, options))
    check(row, inputs, grad_out, options)


def test_ctas_go_up_in_their_second_round(row: rows.TableRow) -> None:
    """More blocks of keys than multiprocessors, of KV heads that three query heads share
    (GradSchedule::order()): of the warps of a CTA each must go the same way."""
    if row.arch != "sm90" or has_two_kernels(row):
        pytest.skip("steps go down")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    inputs, grad_out = make(row, Case(1 + multiprocessors // 2, 400, 400, 3, 1, CAUSAL))
    check(row, inputs, grad_out, CAUSAL)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "fixed_order"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_window_is_taken_head_after_head(
    row: rows.TableRow, sequences: int, deterministic: bool
) -> None:
    """A window that hides more than half of the keys, and three query heads for a KV head
    (GradSchedule::order()); of one sequence there are few blocks, whose steps are divided."""
    if row.arch != "sm90" or has_two_kernels(row):
        pytest.skip("each tile of all heads")
    options = {"window": (150, 0)}
    inputs, grad_out = make(row, Case(sequences, 600, 600, 6, 2, options))
    check(row, inputs, grad_out, options, deterministic=deterministic)


def test_the_last_round_of_blocks(row: rows.TableRow) -> None:
    """Two rounds of blocks of keys, and two blocks more. Rows of sm90 with sums of dQ divide these
    into parts (divide_last_round() of core/grad_parts.h)."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    inputs, grad_out = make(row, Case(1 + multiprocessors, 700, 200, 2, 1, {}))
    check(row, inputs, grad_out, {})


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 200, 257, 2, 1, {}),
        Case(1, 70, 129, 3, 3, {}),
        Case(1, 1, 257, 1, 1, {"window": (256, None)}),
        Case(1, 200, 257, 1, 1, CAUSAL),
    ],
    ids=["grouped", "one_block", "window_that_hides_nothing", "causal"],
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "fixed_order"])
def test_a_key_behind_whole_blocks(row: rows.TableRow, case: Case, deterministic: bool) -> None:
    """More blocks of keys than multiprocessors, and a last block with one key, which the kernels
    before and after the backward take where all queries see it (core/leftover_key.h)."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    case = dataclasses.replace(case, batch=1 + multiprocessors // 2)
    inputs, grad_out = make(row, case)
    grad_lse = torch.randn(case.batch, case.heads, case.seqlen_q, device="cuda")
    check(row, inputs, grad_out, case.options, grad_lse, deterministic=deterministic)


@pytest.mark.parametrize("softcap", [0.02, 50.0, 1e5, 1e28])
def test_caps_of_any_size(row: rows.TableRow, softcap: float) -> None:
    """Three caps: one that all scores reach, an ordinary one, and one far above all scores."""
    if "softcap" not in row.score_mods:
        pytest.skip("no softcap")
    inputs, grad_out = make(row, CASES["square"])
    check(row, inputs, grad_out, {"causal": True, "softcap": softcap})


def test_gradient_of_the_lse(row: rows.TableRow) -> None:
    inputs, grad_out = make(row, CASES["gqa"])
    grad_lse = torch.randn(2, 6, 200, device="cuda")
    check(row, inputs, grad_out, CAUSAL, grad_lse)


def test_queries_whose_keys_are_all_hidden_by_a_huge_score(row: rows.TableRow) -> None:
    """A channel hides the first keys, so that the first causal queries see no key. Their gradients
    are 0, and all others are those of a call without these queries."""
    if row.score_mods:
        pytest.skip("the cap is the lowest score, and rows with ALiBi have the same code for this")
    (q, k, v), grad_out = make(row, CASES["gqa"])
    q, k, hidden = q.clone(), k.clone(), 200
    q[..., 0] = 4096
    k[..., 0] = 0
    k[:, :hidden, :, 0] = -1e30 if row.dtype == "bf16" else torch.finfo(torch.float16).min
    unseeing = hidden - (k.shape[1] - q.shape[1])
    assert 0 < unseeing < q.shape[1]
    grad_lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device="cuda")

    def ours(*leaves: Tensor) -> Any:
        return attention(*leaves, backend=row.arch, return_lse=True, causal=True)

    def exact(*leaves: Tensor) -> Any:
        return attention_reference(*leaves, return_lse=True, causal=True)

    def plain(*leaves: Tensor) -> Any:
        return plain_pytorch(*leaves, CAUSAL)

    found = list(gradients(ours, (q, k, v), grad_out, grad_lse))
    assert all(gradient.isfinite().all() for gradient in found)
    assert torch.equal(found[0][:, :unseeing], torch.zeros_like(found[0][:, :unseeing]))
    found[0] = found[0][:, unseeing:]
    seeing = grad_out[:, unseeing:], grad_lse[..., unseeing:]
    inputs = q[:, unseeing:], k, v
    expected = gradients(exact, tuple(t.double() for t in inputs), *seeing)
    pytorch = gradients(plain, inputs, *seeing)
    for name, a, b, c in zip(NAMES, found, expected, pytorch, strict=True):
        assert_as_accurate(a[..., 1:], b[..., 1:], c[..., 1:], name)


def test_smaller_head_dims_run_on_the_row(row: rows.TableRow) -> None:
    dtype = DTYPES[row.dtype]
    dims = (row.head_dim - 8, row.head_dim - 8, row.head_dim_v - 8)
    inputs = tuple(strided(2, 150, 4, dim, dtype=dtype) for dim in dims)
    check(row, inputs, strided(2, 150, 4, dims[2], dtype=dtype), CAUSAL)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_packed_sequences_see_nothing_but_themselves(
    row: rows.TableRow, options: dict[str, Any]
) -> None:
    """NaN is in every row of other sequences and of no sequence. Rows of no sequence have gradients
    of 0."""
    skip_if_places_matter(row)
    dtype, options = DTYPES[row.dtype], options_for(row, options, 4)
    lengths_q, lengths_k = [0, 5, 130, 0, 257, 64], [3, 0, 200, 0, 129, 64]
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    clean = [
        torch.randn(int(cu[-1]) + 100, heads, dim, device="cuda").to(dtype)
        for cu, heads, dim in (
            (cu_q, 4, row.head_dim),
            (cu_k, 2, row.head_dim),
            (cu_k, 2, row.head_dim_v),
            (cu_q, 4, row.head_dim_v),
        )
    ]
    for sequence in range(len(lengths_q)):
        spans = [slice(int(cu[sequence]), int(cu[sequence + 1])) for cu in (cu_q, cu_k, cu_k, cu_q)]
        poisoned = [torch.full_like(t, math.nan) for t in clean]
        for target, source, span in zip(poisoned, clean, spans, strict=True):
            target[span] = source[span]
        *inputs, grad_out = poisoned

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention_varlen(
                q, k, v, cu_q, cu_k, 257, 200, backend=row.arch, return_lse=True, **options
            )

        got = gradients(packed, tuple(inputs), grad_out, None)
        mine = tuple(source[span][None] for source, span in zip(clean, spans, strict=True))
        dense = lambda *t: attention_reference(*t, return_lse=True, **options)  # noqa: E731
        exact = gradients(dense, tuple(t.double() for t in mine[:3]), mine[3], None)
        plain = gradients(lambda *t: plain_pytorch(*t, options), mine[:3], mine[3], None)
        for name, a, b, c, span in zip(NAMES, got, exact, plain, spans, strict=False):
            assert_as_accurate(a[span][None], b, c.nan_to_num(), name)
            beyond = a[int((cu_q if name == "dq" else cu_k)[-1]) :]
            assert beyond.eq(0).all(), f"{name} of rows of no sequence"


@pytest.mark.parametrize("case", ["long_causal", "gqa"])
def test_deterministic_repeats_bitwise(row: rows.TableRow, case: str) -> None:
    inputs, grad_out = make(row, CASES[case])
    options = options_for(row, CAUSAL, CASES[case].heads)

    def ours(*leaves: Tensor) -> Any:
        return attention(*leaves, backend=row.arch, return_lse=True, deterministic=True, **options)

    first = gradients(ours, inputs, grad_out, None)
    for _ in range(1000):
        assert all(map(torch.equal, gradients(ours, inputs, grad_out, None), first))


def test_memory_is_linear(row: rows.TableRow) -> None:
    """The memory that a backward needs beside inputs, outputs and gradients: delta, a copy of the
    LSE, and one dQ in fp32."""
    dtype, seqlen, heads = DTYPES[row.dtype], 8192, 4
    q, k = (torch.randn(1, seqlen, heads, row.head_dim, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(1, seqlen, heads, row.head_dim_v, device="cuda").to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, backend=row.arch, **options_for(row, {}, heads))
    grad_out = torch.randn_like(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, leaves, grad_out)
    used = torch.cuda.max_memory_allocated() - before
    grads = sum(tensor.nbytes for tensor in leaves)
    accumulator = 4 * heads * (seqlen + row.tile_m) * row.head_dim
    rows_of_floats = 2 * 4 * heads * seqlen
    assert used <= grads + accumulator + rows_of_floats + (1 << 20)


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(BACKWARD, [__file__])
