"""The gradient of a bias where many tiles of scores add to one of its tiles: their visits are
divided into parts, whose sums a later kernel adds up. And tiles that go through shared memory."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import rows
from cute_attention.native.core import UNBOUNDED, core
from cute_attention.semantics.formula import attention_varlen_reference
from every_row import (
    ALL,
    DTYPES,
    LIMIT,
    backend_of,
    fixture_of,
    run_on_small_chip,
    skip_unless_one_feature_chooses_it,
)
from kernel_calls import capture, inputs_of, offsets, shape_of_bias
from test_bias import MASKS, NAMES, assert_exact, results
from test_key_parts import codes, workspace_of
from test_sizes import BackwardParams, BiasTensor, garbage, set_tensor
from tolerances import assert_near, assert_same_bits

pytestmark = pytest.mark.gpu

BACKWARD = [row for row in ALL if row.direction == "backward" and "bias" in row.score_mods]
row = fixture_of(BACKWARD, skip_unless_one_feature_chooses_it)
# On sm90 no row is for smaller head dims, so those of 64 have kernels for the gradient of small
# heads too.
row_of_64 = fixture_of(
    [row for row in BACKWARD if (row.arch, row.head_dim) == ("sm90", 64)],
    skip_unless_one_feature_chooses_it,
)

MOST_NUMBERS = 2**23  # of the workspace of the parts, 32 MB


class Shared(NamedTuple):
    """A bias of `[batch, heads, queries, keys]`, 1 where it is the same, for many scores."""

    bias: tuple[int, int, int, int]
    batch: int
    queries: int
    keys: int
    heads: int = 4
    heads_kv: int = 4


CASES = {
    "window of 7 x 7": Shared((1, 4, 49, 49), 96, 49, 49),
    "window of 8 x 8": Shared((1, 8, 64, 64), 1024, 64, 64, 8, 8),
    "window of 16 x 16": Shared((1, 4, 256, 256), 40, 256, 256),
    "one for all heads": Shared((1, 1, 200, 136), 9, 200, 136, 6, 2),
    "of each key": Shared((1, 4, 1, 203), 5, 300, 203),
    "of each query": Shared((1, 4, 300, 1), 5, 300, 203),
    "of each head": Shared((1, 4, 1, 1), 3, 500, 500, 4, 2),
    "one number": Shared((1, 1, 1, 1), 3, 500, 500),
}


def made(row: rows.TableRow, case: Shared, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output; and the bias."""
    seqlens, heads = (case.queries, case.keys), (case.heads, case.heads_kv)
    bias = torch.randn(case.bias, device="cuda").to(dtype)
    return inputs_of(row, case.batch, seqlens, heads), bias


def described(bias: Tensor) -> BiasTensor:
    strides = (0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True))
    return BiasTensor(bias.data_ptr(), *strides, bias.dtype == torch.float32)


def params_of(row: rows.TableRow, case: Shared, bias: Tensor, grad: Tensor) -> BackwardParams:
    """Sizes, and the bias with its gradient; no other tensors."""
    params = BackwardParams()
    params.batch, params.seqlen_q, params.seqlen_k = case.batch, case.queries, case.keys
    params.heads, params.heads_kv = case.heads, case.heads_kv
    params.head_dim, params.head_dim_v = row.head_dim, row.head_dim_v
    params.scale = row.head_dim**-0.5
    params.window_left = params.window_right = UNBOUNDED
    params.bias, params.grad_bias = described(bias), described(grad)
    return params


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_accuracy(row: rows.TableRow, case: Shared, options: dict[str, Any]) -> None:
    tensors, bias = made(row, case, DTYPES[row.dtype])
    numbers = workspace_of(row, params_of(row, case, bias, bias)).grad_bias_parts
    assert 0 < numbers <= MOST_NUMBERS
    assert_exact(row, tensors, bias, options)


@pytest.mark.parametrize("kept", ["bhqk", "hqk", "k"])
@pytest.mark.parametrize("dims", [(32, 32), (24, 8), (8, 32), (32, 64), (40, 32)])
def test_small_heads(row_of_64: rows.TableRow, dims: tuple[int, int], kept: str) -> None:
    """Up to head dim 32 in kernels of their own, which the larger of the two decides."""
    narrow = dataclasses.replace(row_of_64, head_dim=dims[0], head_dim_v=dims[1])
    tensors = inputs_of(narrow, 5, (150, 203), (4, 2))
    shape = shape_of_bias(kept, 5, 4, 150, 203)
    bias = torch.randn(shape, device="cuda").to(DTYPES[narrow.dtype])
    for options in MASKS.values():
        assert_exact(narrow, tensors, bias, options)


@pytest.mark.parametrize("dtype", ["its own", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_repeats_bitwise(row: rows.TableRow, case: Shared, dtype: str) -> None:
    wanted = torch.float32 if dtype == "float32" else DTYPES[row.dtype]
    tensors, bias = made(row, case, wanted)
    first = results(attention, tensors, bias, backend=backend_of(row))["dbias"]
    for _ in range(20):
        again = results(attention, tensors, bias, backend=backend_of(row))["dbias"]
        assert_same_bits(again, first, "dbias")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_workspace_full_of_nan(row: rows.TableRow, case: Shared) -> None:
    """What the workspace contains does not matter, and nothing is written behind it. Without it,
    tiles have one part, and the sum is the same but for the order of its terms."""
    (q, k, v, grad_out), bias = made(row, case, torch.float32)
    with torch.no_grad():
        out, lse = attention(q, k, v, bias=bias, backend=row.arch, return_lse=True)
    grad = torch.empty_like(bias)
    params = params_of(row, case, bias, grad)
    sizes = workspace_of(row, params)
    assert sizes.grad_bias_parts > 0
    others = [torch.empty_like(t) for t in (q, k, v)]
    tensors = {"q": q, "k": k, "v": v, "o": out, "grad_o": grad_out}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), others, strict=True))
    for field, tensor in tensors.items():
        set_tensor(params, field, tensor)
    spaces = [garbage(n, dtype=torch.float32) for n in (sizes.delta, max(sizes.grad_q_sum, 4))]
    params.lse, params.delta, params.grad_q_sum = (t.data_ptr() for t in (lse, *spaces))

    def run(parts: Tensor | None) -> Tensor:
        grad.fill_(math.nan)
        params.grad_bias_parts = None if parts is None else parts.data_ptr()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = core().cute_attention_backward(ctypes.byref(params), *codes(row), stream)
        assert error == 0, core().cute_attention_last_error().decode()
        torch.cuda.synchronize()
        return grad.clone()

    beyond = 4096  # floats behind the workspace
    workspace = garbage(sizes.grad_bias_parts + beyond, dtype=torch.float32)
    found, whole = run(workspace), run(None)
    assert workspace[-beyond:].isnan().all()
    # Sums of many numbers that may cancel each other, and grow with the columns of dO and V.
    terms = case.batch * case.heads * case.queries * case.keys / bias.numel()
    size = max(1.0, row.head_dim / 32) ** 0.5
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6 * size * terms**0.5)


def test_without_a_gradient_there_is_no_workspace(row: rows.TableRow) -> None:
    case = CASES["window of 16 x 16"]
    bias = torch.empty(case.bias, device="cuda")
    params = params_of(row, case, bias, bias)
    params.grad_bias = BiasTensor()
    assert workspace_of(row, params).grad_bias_parts == 0


def test_packed_windows(row: rows.TableRow) -> None:
    """Sequences of other lengths, some empty, that share a bias."""
    lengths = [49, 0, 17, 64, 1, 33] * 12
    cu = offsets(lengths)
    tensors = [t[0] for t in inputs_of(row, 1, (sum(lengths),) * 2, (4, 2))]
    bias = torch.randn(1, 4, 64, 64, device="cuda").to(DTYPES[row.dtype])
    found = results(
        lambda *args, **more: attention_varlen(*args, cu, cu, 64, 64, **more),
        tensors, bias, backend=backend_of(row),
    )  # fmt: skip
    exact = results(
        lambda *args, **more: attention_varlen_reference(*args, cu, cu, **more),
        [t.double() for t in tensors], bias.double(),
    )  # fmt: skip
    for name in ("out", "dq", "dk", "dv", "dbias"):
        assert_near(found[name], exact[name], name)


def test_graph(row: rows.TableRow) -> None:
    case = CASES["window of 16 x 16"]
    tensors, bias = made(row, case, DTYPES[row.dtype])
    leaves = [t.requires_grad_() for t in (*tensors[:3], bias)]

    def run() -> list[Tensor]:
        out = attention(*leaves[:3], bias=bias, backend=backend_of(row), deterministic=True)
        return [out, *torch.autograd.grad(out, leaves, tensors[3])]

    graph, captured = capture(run)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), captured, run(), strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kept", ["bhqk", "hqk", "bk", "k"])
@pytest.mark.parametrize("keys", [200, 203, 72])
def test_tiles_and_single_numbers_give_the_same_bits(
    row: rows.TableRow, keys: int, kept: str, options: dict[str, Any]
) -> None:
    """Rows that begin at multiples of 16 bytes are read in tiles, and in the gradient written in
    vectors; others number by number. At head dim 64 the forward of sm90 then has tiles of other
    sizes, and adds in another order."""
    batch, queries, heads = 3, 150, 6
    tensors = inputs_of(row, batch, (queries, keys), (heads, 2))
    shape = shape_of_bias(kept, batch, heads, queries, keys)
    wide = torch.full([*shape[:3], keys + 24 - keys % 8], torch.nan, device="cuda")
    wide = wide.to(DTYPES[row.dtype])
    numbers = torch.randn(shape, device="cuda").to(wide.dtype)
    numbers[torch.rand(shape, device="cuda") < 0.1] = -torch.inf
    found = []
    for first in (8, 3):  # columns before the first, which are NaN like those behind the last
        wide.fill_(torch.nan)
        bias = wide[..., first : first + keys]
        bias.copy_(numbers)
        found.append(
            results(
                attention, tensors, bias, backend=backend_of(row), deterministic=True, **options
            )
        )
    if (row.arch, row.head_dim) != ("sm90", 64):
        for name in NAMES:
            assert_same_bits(found[0][name], found[1][name], name)
    assert_exact(row, tensors, numbers, options)


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(BACKWARD, [__file__])
