"""The gradient of a bias where tiles end: ragged sizes, head dims that a row pads, packed sequences
beside others, long sums, and rows and columns that no sequence has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_varlen_reference
from every_row import ALL, DTYPES, backend_of, fixture_of, skip_unless_one_feature_chooses_it
from kernel_calls import poison_free_memory
from other_tiles import assert_differ_by_roundings, has_either_step, variances
from test_alibi import inputs_of
from test_bias import MASKS, assert_exact, results
from tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

BACKWARD = [row for row in ALL if row.direction == "backward" and "bias" in row.score_mods]
row = fixture_of(BACKWARD, skip_unless_one_feature_chooses_it)

# Below, at and above multiples of the tiles of 64 and 128.
SIZES = [(1, 300), (63, 129), (129, 63), (128, 257), (300, 127)]
KEPT = ["bhqk", "hqk", "bqk", "bhk", "hq", "bk", "h", ""]


def bias_of(row: rows.TableRow, kept: str, sizes: dict[str, int]) -> Tensor:
    """`[batch, heads, queries, keys]` with 1 for what is broadcast."""
    shape = [sizes[name] if name in kept else 1 for name in "bhqk"]
    return torch.randn(shape, device="cuda").to(DTYPES[row.dtype])


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("queries, keys", SIZES)
def test_ragged_sizes(
    row: rows.TableRow, queries: int, keys: int, kept: str, options: dict[str, Any]
) -> None:
    tensors = inputs_of(row, 2, (queries, keys), (4, 2))
    bias = bias_of(row, kept, {"b": 2, "h": 4, "q": queries, "k": keys})
    assert_exact(row, tensors, bias, options)


@pytest.mark.parametrize("kept", ["bhqk", "qk", "k"])
@pytest.mark.parametrize("fewer, fewer_v", [(24, 8), (8, 24), (16, 16)])
def test_head_dims_of_less_than_the_row(
    row: rows.TableRow, fewer: int, fewer_v: int, kept: str
) -> None:
    narrow = dataclasses.replace(
        row, head_dim=row.head_dim - fewer, head_dim_v=row.head_dim_v - fewer_v
    )
    if max(narrow.head_dim, narrow.head_dim_v) <= 32 < row.head_dim:
        pytest.skip("test_small_heads has it")
    tensors = inputs_of(narrow, 2, (150, 300), (4, 2))
    bias = bias_of(row, kept, {"b": 2, "h": 4, "q": 150, "k": 300})
    assert_exact(narrow, tensors, bias, {"causal": True})


LENGTHS_Q, LENGTHS_K = (40, 129, 0, 300, 1), (60, 129, 70, 257, 300)
LONGEST = 300


def packed(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda", dtype=torch.int32)


def packed_results(row: rows.TableRow, tensors: list[Tensor], bias: Tensor, **options: Any) -> Any:
    cu = packed(LENGTHS_Q), packed(LENGTHS_K)
    return results(
        lambda *args, **more: attention_varlen(*args, *cu, LONGEST, LONGEST, **more),
        tensors, bias, backend=backend_of(row), **options,
    )  # fmt: skip


def packed_inputs(row: rows.TableRow) -> list[Tensor]:
    return [t[0] for t in inputs_of(row, 1, (sum(LENGTHS_Q), sum(LENGTHS_K)), (4, 2))]


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kept", ["bhqk", "hqk", "bk", "hq"])
def test_packed_sequences(row: rows.TableRow, kept: str, options: dict[str, Any]) -> None:
    tensors = packed_inputs(row)
    bias = bias_of(row, kept, {"b": 5, "h": 4, "q": LONGEST, "k": LONGEST})
    found = packed_results(row, tensors, bias, **options)
    exact = results(
        lambda *args, **more: attention_varlen_reference(
            *args, packed(LENGTHS_Q), packed(LENGTHS_K), **more
        ),
        [t.double() for t in tensors], bias.double(), **options,
    )  # fmt: skip
    if kept == "hq":  # dS of a query sums to 0, but for what rounding leaves
        assert found["dbias"].abs().max() <= 0.1
        return
    error = (found["dbias"].double() - exact["dbias"]).abs().max()
    assert error <= 0.02 * exact["dbias"].abs().max()


def test_no_sequence_has_what_is_behind_it(row: rows.TableRow) -> None:
    """Rows and columns past the end of a sequence have gradient 0, and a sequence of NaN leaves the
    gradients of its neighbours alone: they share tiles with it in memory. So does NaN in the bias
    where no sequence reads it."""
    tensors = packed_inputs(row)
    bias = bias_of(row, "bhqk", {"b": 5, "h": 4, "q": LONGEST, "k": LONGEST})
    clean = packed_results(row, tensors, bias)["dbias"]
    poisoned = [t.clone() for t in tensors]
    cu_q, cu_k = packed(LENGTHS_Q).tolist(), packed(LENGTHS_K).tolist()
    for tensor, cu in zip(poisoned, (cu_q, cu_k, cu_k, cu_q), strict=True):
        tensor[cu[1] : cu[2]] = torch.nan
    unread = bias.clone()
    for b, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        unread[b, :, queries:] = torch.nan
        unread[b, :, :, keys:] = torch.nan
    found = packed_results(row, poisoned, unread)["dbias"]
    for b, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        assert (found[b, :, queries:] == 0).all()
        assert (found[b, :, :, keys:] == 0).all()
        if b == 1:
            assert found[b, :, :queries, :keys].isnan().any()
        else:
            torch.testing.assert_close(found[b], clean[b], rtol=2**-6, atol=1e-4)


def test_a_sum_over_a_sequence_of_nan_is_nan_where_it_is(row: rows.TableRow) -> None:
    """One bias for all sequences: outside of the rows and columns of the one with NaN, the sum is
    that of the others."""
    tensors = packed_inputs(row)
    bias = bias_of(row, "hqk", {"b": 5, "h": 4, "q": LONGEST, "k": LONGEST})
    clean = packed_results(row, tensors, bias)["dbias"]
    begin, end = packed(LENGTHS_Q)[1:3].tolist()
    tensors[0][begin:end] = torch.nan
    found = packed_results(row, tensors, bias)["dbias"]
    queries, keys = LENGTHS_Q[1], LENGTHS_K[1]
    assert found[0, :, :queries, :keys].isnan().all()
    rest = torch.ones(LONGEST, LONGEST, device="cuda", dtype=torch.bool)
    rest[:queries, :keys] = False
    torch.testing.assert_close(found[0][:, rest], clean[0][:, rest], rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("kept", ["hqk", "q", "k", ""])
def test_many_more_visits_than_buffers(row: rows.TableRow, kept: str) -> None:
    """Each CTA goes through its buffers many times, and takes several tiles; the bits are the same
    in every run."""
    batch, heads, seqlen = (40, 4, 300) if kept == "hqk" else (6, 4, 1030)
    tensors = inputs_of(row, batch, (seqlen, seqlen), (heads, 1))
    bias = bias_of(row, kept, {"b": batch, "h": heads, "q": seqlen, "k": seqlen})
    first = results(attention, tensors, bias, backend=backend_of(row), causal=True)["dbias"]
    for _ in range(10):
        again = results(attention, tensors, bias, backend=backend_of(row), causal=True)["dbias"]
        assert_same_bits(again, first, "dbias")
    assert_exact(row, tensors, bias, {"causal": True})


def test_runs_of_many_tiles(row: rows.TableRow) -> None:
    """Nothing is summed, and CTAs take run after run: 2048 keys, 24 heads."""
    tensors = inputs_of(row, 1, (1100, 2048), (24, 8))
    bias = bias_of(row, "hqk", {"b": 1, "h": 24, "q": 1100, "k": 2048})
    for options in MASKS.values():
        assert_exact(row, tensors, bias, options)


# Batch, queries, keys, heads and KV heads: rows of the gradient begin at multiples of 16 bytes, and
# it is dS itself. Keys end where tiles of 64 and 128 do, and where they do not.
NAMES = ("dq", "dk", "dv")
UNSUMMED = {
    "whole tiles": (2, 256, 384, 4, 4),
    "ragged": (2, 150, 200, 6, 2),
    "one query": (3, 1, 136, 2, 2),
    "one head": (1, 300, 264, 1, 1),
    "few keys": (2, 200, 8, 4, 1),
    "more queries than keys": (1, 520, 72, 2, 1),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", UNSUMMED.values(), ids=UNSUMMED)
def test_nothing_is_summed(row: rows.TableRow, shape: tuple[int, ...], mask: str) -> None:
    """Where sm90 kernels store dS of each step, and where a mask leaves no step to store it. The
    other gradients do not depend on it, but for roundings where a step that stores has half the
    queries (sm90/steps_of_64.h)."""
    batch, queries, keys, *heads = shape
    tensors = inputs_of(row, batch, (queries, keys), (heads[0], heads[1]))
    bias = bias_of(row, "bhqk", {"b": batch, "h": heads[0], "q": queries, "k": keys})
    poison_free_memory()
    assert_exact(row, tensors, bias, MASKS[mask])
    options = {"backend": backend_of(row), "deterministic": True, **MASKS[mask]}
    found = results(attention, tensors, bias, **options)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = attention(*leaves, bias=bias, **options)
    alone = dict(zip(NAMES, torch.autograd.grad(out, leaves, tensors[3]), strict=True))
    if has_either_step(row):
        own = variances(tensors, bias, DTYPES[row.dtype], **MASKS[mask])
        alone["out"] = out.detach()
        assert_differ_by_roundings(found, alone, {name: own[name] for name in NAMES})
        return
    for name in NAMES:
        assert_same_bits(alone[name], found[name], name)


def test_streams(row: rows.TableRow) -> None:
    """Two calls at the same time do not take each other's work."""
    shapes = (2, (300, 300), (4, 2)), (1, (700, 520), (4, 2))
    calls = [(inputs_of(row, *shape), shape) for shape in shapes]
    biases = [bias_of(row, "hqk", {"b": b, "h": 4, "q": q, "k": k}) for _, (b, (q, k), _) in calls]
    alone = [
        results(attention, tensors, bias, backend=backend_of(row))["dbias"]
        for (tensors, _), bias in zip(calls, biases, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, (tensors, _), bias in zip(streams, calls, biases, strict=True):
            with torch.cuda.stream(stream):
                found.append(results(attention, tensors, bias, backend=backend_of(row))["dbias"])
        torch.cuda.synchronize()
        for again, first in zip(found, alone, strict=True):
            assert_same_bits(again, first, "dbias")
