"""Dropout on every row that computes it, on a GPU: what the tests of all rows leave out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import attention, attention_varlen
from cute_attention.native import rows
from cute_attention.semantics.dropout import as_seed, keep_mask, keep_scale
from cute_attention.semantics.formula import attention_reference
from every_row import (
    ALL,
    LIMIT,
    backend_of,
    fixture_of,
    run_on_small_chip,
    skip_unless_one_feature_chooses_it,
)
from kernel_calls import inputs_of, offsets, results
from test_alibi import assert_exact
from tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

ROWS = [row for row in ALL if "dropout" in row.score_mods]
row = fixture_of(ROWS, skip_unless_one_feature_chooses_it)
SEED = 987654321
CAUSAL = {"causal": True}


@pytest.mark.parametrize("p", [0.001, 1 / 256, 0.1, 0.5, 0.9, 255 / 256, 1.0])
def test_each_probability_is_kept_or_dropped_as_the_bits_say(row: rows.TableRow, p: float) -> None:
    """With equal scores and the rows of a unit matrix as values, the output is the probabilities
    themselves, a part of the keys at a time."""
    batch, heads, seqlen_q, seqlen_k = 2, 3, 333, 555
    q = torch.zeros(batch, seqlen_q, heads, row.head_dim, device="cuda")
    k = torch.zeros(batch, seqlen_k, heads, row.head_dim, device="cuda")
    options = {"dropout_p": p, "dropout_seed": SEED, "backend": row.arch}
    ranges = (0, batch * heads), (0, seqlen_q), (0, seqlen_k)
    seed = as_seed(SEED, "cuda")
    kept = torch.ones(batch * heads, seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    if p >= 1 / 512:
        kept = keep_mask(seed, p, *ranges)
    kept = kept.view(batch, heads, seqlen_q, seqlen_k).transpose(1, 2)
    for first in range(0, seqlen_k, row.head_dim_v):
        columns = range(first, min(first + row.head_dim_v, seqlen_k))
        v = torch.zeros(batch, seqlen_k, heads, row.head_dim_v, device="cuda")
        for place, key in enumerate(columns):
            v[:, key, :, place] = 1
        tensors = (tensor.to(torch_dtype(row)) for tensor in (q, k, v))
        out = attention(*tensors, **options)[..., : len(columns)]
        expected = kept[..., columns.start : columns.stop].float() * keep_scale(p) / seqlen_k
        assert torch.equal(out != 0, expected != 0)
        assert_close(out.float(), expected, "stored", name="out", dtype=out.dtype)


def torch_dtype(row: rows.TableRow) -> torch.dtype:
    return torch.float16 if row.dtype == "fp16" else torch.bfloat16


@pytest.mark.parametrize("p", [0.001, 0.1, 0.75, 1.0])
@pytest.mark.parametrize(
    "options", [{}, CAUSAL, {"window": (70, 20)}], ids=["full", "causal", "window"]
)
def test_gradients(row: rows.TableRow, p: float, options: dict[str, Any]) -> None:
    tensors = inputs_of(row, 2, (300, 417), (6, 2))
    assert_exact(row, tensors, {**options, "dropout_p": p, "dropout_seed": SEED})


def test_gradients_of_the_lse_and_of_sinks(row: rows.TableRow) -> None:
    tensors = inputs_of(row, 2, (200, 333), (4, 4))
    grad_lse = torch.randn(2, 4, 200, device="cuda")
    sink = torch.randn(4, device="cuda")

    def gradients(function: Any, wide: bool, **extra: Any) -> tuple[Tensor, ...]:
        leaves = [t.double() if wide else t for t in tensors[:3]]
        leaves = [t.detach().requires_grad_() for t in leaves]
        own_sink = sink.clone().requires_grad_()
        out, lse = function(*leaves, sink=own_sink, return_lse=True, dropout_p=0.3,
                            dropout_seed=SEED, **extra)  # fmt: skip
        total = (out * tensors[3].to(out.dtype)).sum() + (lse * grad_lse.to(lse.dtype)).sum()
        return torch.autograd.grad(total, [*leaves, own_sink])

    found = gradients(attention, False, backend=backend_of(row))
    expected = gradients(attention_reference, True)
    for name, a, b in zip(("dq", "dk", "dv", "dsink"), found, expected, strict=True):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < 8 * torch.finfo(tensors[0].dtype).eps, f"{name}: {error}"


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_packed_sequences_draw_what_dense_ones_do(
    row: rows.TableRow, options: dict[str, Any]
) -> None:
    """The bits of sequence `b` are those of batch entry `b`, wherever its rows lie. NaN is in every
    row of other sequences and of no sequence."""
    lengths = [100, 0, 257, 64]
    cu = offsets(lengths)
    clean = [t[0] for t in inputs_of(row, 1, (sum(lengths) + 50, sum(lengths) + 50), (4, 2))]
    options = {**options, "dropout_p": 0.4, "dropout_seed": SEED, "backend": backend_of(row)}
    for b, length in enumerate(lengths):
        piece = slice(int(cu[b]), int(cu[b + 1]))
        poisoned = [torch.full_like(t, torch.nan) for t in clean]
        dense = [torch.zeros(b + 1, length, *t.shape[1:]).to(t) for t in clean]
        for poison, entry, whole in zip(poisoned, dense, clean, strict=True):
            poison[piece] = entry[b] = whole[piece]
        packed = [t.requires_grad_() for t in poisoned[:3]]
        out = attention_varlen(*packed, cu, cu, max(lengths), max(lengths), **options)
        grads = torch.autograd.grad(out, packed, poisoned[3])
        own = [t.requires_grad_() for t in dense[:3]]
        expected = attention(*own, **options)
        pairs = zip(grads, torch.autograd.grad(expected, own, dense[3]), strict=True)
        assert_close(out[piece].detach(), expected[b].detach(), "stored", name="out")
        for a, e in pairs:
            assert_close(a[piece], e[b], "stored", name="gradient")


def test_a_seed_decides_and_nothing_else(row: rows.TableRow) -> None:
    tensors = inputs_of(row, 2, (257, 300), (4, 2))
    options: dict[str, Any] = {"backend": backend_of(row), "dropout_p": 0.2, "deterministic": True}
    first = results(attention, tensors, dropout_seed=SEED, **options)
    for seed in (SEED, torch.full((1,), SEED, device="cuda")):
        again = results(attention, tensors, dropout_seed=seed, **options)
        for name in first:
            assert_same_bits(again[name], first[name], name)
    other = results(attention, tensors, dropout_seed=SEED + 1, **options)
    assert not torch.equal(other["out"], first["out"])


def test_dropout_without_a_seed_follows_the_generator(row: rows.TableRow) -> None:
    tensors = inputs_of(row, 1, (130, 130), (2, 2))[:3]
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(attention(*tensors, dropout_p=0.5, backend=row.arch))
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], attention(*tensors, dropout_p=0.5, backend=row.arch))


def test_a_captured_step_draws_the_bits_of_the_eager_one(row: rows.TableRow) -> None:
    tensors = inputs_of(row, 1, (200, 200), (2, 2))
    seed = torch.full((1,), SEED, device="cuda")
    options = {"dropout_p": 0.3, "dropout_seed": seed, "backend": backend_of(row)}
    eager = results(attention, tensors, **options)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(attention, tensors, **options)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = results(attention, tensors, **options)
    graph.replay()
    assert_same_bits(captured["out"], eager["out"], "out")
    seed.fill_(SEED + 1)
    graph.replay()
    assert not torch.equal(captured["out"], eager["out"])


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(ROWS, [__file__])
