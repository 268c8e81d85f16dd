"""The backward where there are few blocks of keys: the steps of a block are divided into parts,
whose sums of dK and dV a later kernel adds up."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import rows
from cute_attention.native.core import UNBOUNDED, core
from cute_attention.semantics import dropout
from cute_attention.semantics.formula import attention_reference
from every_row import (
    DTYPES,
    LIMIT,
    fixture_of,
    run_on_small_chip,
    skip_if_places_matter,
    skip_unless_it_is_chosen,
)
from kernel_calls import CAUSAL, Case, offsets, options_for, plain_pytorch
from test_backward_kernels import BACKWARD, NAMES, check, gradients, make
from test_sizes import (
    AlibiSlopes,
    BackwardParams,
    BiasTensor,
    DropoutOptions,
    Workspace,
    garbage,
    set_tensor,
)
from tolerances import assert_as_accurate, assert_close

pytestmark = pytest.mark.gpu

row = fixture_of(BACKWARD, skip_unless_it_is_chosen)

# Few blocks of keys, and many steps for each.
CASES = {
    "mqa": Case(1, 600, 500, 71, 1, {}),
    "mqa_causal": Case(2, 520, 700, 24, 1, CAUSAL),
    "seven_heads_causal": Case(1, 700, 640, 7, 1, CAUSAL),  # bundles of 2 heads, or pieces of all
    "two_heads_causal": Case(1, 700, 640, 2, 1, CAUSAL),  # pieces of each, or of both
    "gqa_window": Case(1, 900, 900, 16, 2, {"window": (300, 20)}),
    "77_keys": Case(2, 2100, 77, 5, 5, {}),
    "one_key": Case(2, 2100, 1, 4, 2, {}),
    "keys_that_no_query_sees": Case(1, 130, 1000, 40, 1, {"window": (50, 0)}),
    "queries_that_see_no_key": Case(1, 2000, 130, 24, 2, CAUSAL),
}


def params_of(row: rows.TableRow, case: Case) -> BackwardParams:
    """Sizes and options, no tensors."""
    left, right = case.options.get("window", (None, None))
    right = 0 if case.options.get("causal") else right
    params = BackwardParams()
    params.batch, params.seqlen_q, params.seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
    params.heads, params.heads_kv = case.heads, case.heads_kv
    params.head_dim, params.head_dim_v = row.head_dim, row.head_dim_v
    params.scale = row.head_dim**-0.5
    options = options_for(row, {}, case.heads)
    params.softcap = options.get("softcap", 0.0)
    if (slopes := options.get("alibi_slopes")) is not None:
        params.alibi_slopes = AlibiSlopes(slopes.data_ptr(), 0, 1)
        params.slopes = slopes  # so that it is not freed
    if (bias := options.get("bias")) is not None:
        params.bias = BiasTensor(bias.data_ptr(), 0, 1, 0, 0, 1)
        params.kept_bias = bias  # likewise
    if p := options.get("dropout_p"):
        params.seed = dropout.as_seed(options["dropout_seed"], "cuda")  # likewise
        params.dropout = DropoutOptions(params.seed.data_ptr(), dropout.drop_count(p))
    params.window_left = UNBOUNDED if left is None else left
    params.window_right = UNBOUNDED if right is None else right
    return params


def codes(row: rows.TableRow) -> tuple[int, int, int]:
    """dtype, arch and device as the C API takes them."""
    return ("fp16", "bf16").index(row.dtype), int(row.arch.removeprefix("sm")), 0


def workspace_of(row: rows.TableRow, params: BackwardParams) -> Workspace:
    sizes = Workspace()
    error = core().cute_attention_backward_workspace(
        ctypes.byref(params), *codes(row), ctypes.byref(sizes)
    )
    assert error == 0, core().cute_attention_last_error().decode()
    return sizes


def parts_of(row: rows.TableRow, params: BackwardParams, total_k: int | None = None) -> int:
    """Into how many parts the steps of a block are divided."""
    blocks = params.batch * -(-params.seqlen_k // row.tile_n)
    if total_k is not None:
        blocks = (total_k + params.batch * row.tile_n) // row.tile_n
    floats = blocks * params.heads_kv * row.tile_n * (row.head_dim + row.head_dim_v)
    parts, rest = divmod(workspace_of(row, params).grad_kv_parts, floats)
    assert rest == 0
    return parts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_accuracy(row: rows.TableRow, case: Case) -> None:
    assert parts_of(row, params_of(row, case)) > 1
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_accuracy_in_a_fixed_order(row: rows.TableRow, case: Case) -> None:
    """There, under a mask, no part is a piece of several heads, and CTAs wait for each other."""
    inputs, grad_out = make(row, case)
    check(row, inputs, grad_out, case.options, deterministic=True)


def test_blocks_that_fill_the_gpu_are_whole(row: rows.TableRow) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    case = Case(4, 4096, 4096, multiprocessors, multiprocessors, {})
    assert workspace_of(row, params_of(row, case)).grad_kv_parts == 0


@pytest.mark.parametrize("name", ["mqa_causal", "gqa_window", "77_keys"])
def test_deterministic_repeats_bitwise(row: rows.TableRow, name: str) -> None:
    case = CASES[name]
    inputs, grad_out = make(row, case)
    options = options_for(row, case.options, case.heads)

    def ours(*leaves: Tensor) -> Any:
        return attention(*leaves, backend=row.arch, return_lse=True, deterministic=True, **options)

    first = gradients(ours, inputs, grad_out, None)
    for _ in range(300):
        assert all(map(torch.equal, gradients(ours, inputs, grad_out, None), first))


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_packed_sequences(row: rows.TableRow, options: dict[str, Any]) -> None:
    """Sequences with many steps, with few, with none, and without keys or queries. Rows of no
    sequence are NaN."""
    skip_if_places_matter(row)
    dtype, options = DTYPES[row.dtype], options_for(row, options, 24)
    lengths_q, lengths_k = [700, 1, 0, 130, 64, 300], [400, 1, 77, 0, 300, 129]
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    case = Case(len(lengths_q), max(lengths_q), max(lengths_k), 24, 1, options)
    tensors = [
        torch.randn(int(cu[-1]) + 100, heads, dim, device="cuda").to(dtype)
        for cu, heads, dim in (
            (cu_q, case.heads, row.head_dim),
            (cu_k, case.heads_kv, row.head_dim),
            (cu_k, case.heads_kv, row.head_dim_v),
            (cu_q, case.heads, row.head_dim_v),
        )
    ]
    for tensor, cu in zip(tensors, (cu_q, cu_k, cu_k, cu_q), strict=True):
        tensor[int(cu[-1]) :] = math.nan
    params = params_of(row, case)
    params.cu_seqlens_q, params.cu_seqlens_k = cu_q.data_ptr(), cu_k.data_ptr()
    params.total_q, params.total_k = len(tensors[0]), len(tensors[1])
    assert parts_of(row, params, params.total_k) > 1

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        longest = max(lengths_q), max(lengths_k)
        return attention_varlen(
            q, k, v, cu_q, cu_k, *longest, backend=row.arch, return_lse=True, **options
        )

    got = gradients(packed, tuple(tensors[:3]), tensors[3], None)
    for name, gradient in zip(NAMES, got, strict=True):
        beyond = gradient[int((cu_q if name == "dq" else cu_k)[-1]) :]
        assert beyond.eq(0).all(), f"{name} of rows of no sequence"
    for sequence in range(len(lengths_q)):
        spans = [slice(int(cu[sequence]), int(cu[sequence + 1])) for cu in (cu_q, cu_k, cu_k, cu_q)]
        mine = tuple(tensor[span][None] for tensor, span in zip(tensors, spans, strict=True))
        dense = lambda *t: attention_reference(*t, return_lse=True, **options)  # noqa: E731
        exact = gradients(dense, tuple(t.double() for t in mine[:3]), mine[3], None)
        plain = gradients(lambda *t: plain_pytorch(*t, options), mine[:3], mine[3], None)
        for name, a, b, c, span in zip(NAMES, got, exact, plain, spans, strict=False):
            assert_as_accurate(a[span][None], b, c.nan_to_num(), name)


@pytest.mark.parametrize("name", ["mqa_causal", "keys_that_no_query_sees", "77_keys"])
def test_workspaces_full_of_nan(row: rows.TableRow, name: str) -> None:
    """What the workspaces contain does not matter. Without that of the parts, blocks are whole."""
    case = dataclasses.replace(
        CASES[name], options=options_for(row, CASES[name].options, CASES[name].heads)
    )
    (q, k, v), grad_out = make(row, case)
    with torch.no_grad():
        out, lse = attention(q, k, v, backend=row.arch, return_lse=True, **case.options)
    params = params_of(row, case)
    sizes = workspace_of(row, params)
    assert sizes.grad_kv_parts > 0

    def run(parts: Tensor | None) -> list[Tensor]:
        found = [torch.full_like(t, math.nan) for t in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "o": out, "grad_o": grad_out}
        tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), found, strict=True))
        for field, tensor in tensors.items():
            set_tensor(params, field, tensor)
        spaces = [garbage(n, dtype=torch.float32) for n in (sizes.delta, sizes.grad_q_sum)]
        params.lse, params.delta, params.grad_q_sum = (t.data_ptr() for t in (lse, *spaces))
        params.grad_kv_parts = None if parts is None else parts.data_ptr()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = core().cute_attention_backward(ctypes.byref(params), *codes(row), stream)
        assert error == 0, core().cute_attention_last_error().decode()
        torch.cuda.synchronize()
        return found

    whole = run(None)
    beyond = 4096  # floats behind the workspace, which nobody may write
    workspace = garbage(sizes.grad_kv_parts + beyond, dtype=torch.float32)
    for name, a, b in zip(NAMES, run(workspace), whole, strict=True):
        assert_close(a, b, "stored", name=name)
    assert workspace[-beyond:].isnan().all()


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(BACKWARD, [__file__])
