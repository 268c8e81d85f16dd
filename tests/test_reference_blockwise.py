"""The blockwise backend against the direct formula, and against PyTorch in every dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_attention.semantics import tiles
from cute_attention.semantics.blockwise import blockwise_backward, blockwise_forward
from reference_cases import (
    CASES,
    HUGE_LOGITS,
    Case,
    make_call,
    make_grads,
    make_inputs,
    run_blockwise,
    run_direct,
    strided,
)
from tolerances import assert_as_accurate, assert_close


@pytest.fixture(params=["tiles_default", "tiles_small"])
def tile_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small tiles divide even the short cases. Their sizes are no multiples of the patches of
    dropout."""
    if request.param == "tiles_small":
        monkeypatch.setattr(tiles, "_TILE_SCORES_CPU", 1000)
        monkeypatch.setattr(tiles, "_MIN_ROWS", 9)
        monkeypatch.setattr(tiles, "_MIN_COLS", 13)
    return request.param


@pytest.mark.parametrize("case", [*CASES, HUGE_LOGITS], ids=str)
def test_blockwise_equals_direct(case: Case, tile_size: str) -> None:
    inputs = make_inputs(case)
    expected, actual = run_direct(case, inputs), run_blockwise(case, inputs)
    assert expected.keys() == actual.keys()
    for name, value in actual.items():
        assert not value.isnan().any(), name
        rule = "rounding" if name in ("out", "lse") else "gradient"
        if case.offset or case.magnitude > 1:
            rule = "large_scores"
        assert_close(value, expected[name], rule, name=name)


def test_small_tiles_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_TILE_SCORES_CPU", 1000)
    monkeypatch.setattr(tiles, "_MIN_ROWS", 9)
    monkeypatch.setattr(tiles, "_MIN_COLS", 13)
    plan = tiles.Tiles.of(make_call(CASES[0], make_inputs(CASES[0])), 37, 51, 4)
    assert len(list(plan.row_blocks())) > 2
    assert len(list(plan.col_blocks(0, 9))) > 2


@pytest.mark.parametrize("seqlen_q", [1, 5, 16])
@pytest.mark.parametrize("seqlen_k", [1, 6, 16])
def test_tiles_cover_exactly_what_is_seen(seqlen_q: int, seqlen_k: int) -> None:
    """By brute force over windows and tile shapes: each visible pair lies in one tile, and masks
    hide all others."""
    device = torch.device("cpu")
    for left in (0, 1, 7, 99):
        for right in (0, 1, 7, 99):
            for rows, cols in ((1, 1), (3, 4), (16, 16)):
                plan = tiles.Tiles(seqlen_q, seqlen_k, left, right, rows, cols)
                seen = torch.zeros(seqlen_q, seqlen_k)
                for i0, i1 in plan.row_blocks():
                    for j0, j1 in plan.col_blocks(i0, i1):
                        hidden = plan.hidden(i0, i1, j0, j1, device)
                        visible = torch.ones(i1 - i0, j1 - j0)
                        if hidden is not None:
                            visible.masked_fill_(hidden, 0.0)
                        assert visible.any(), "a tile that the mask hides was not skipped"
                        seen[i0:i1, j0:j1] += visible
                shift = seqlen_k - seqlen_q
                expected = [
                    [float(i + shift - left <= j <= i + shift + right) for j in range(seqlen_k)]
                    for i in range(seqlen_q)
                ]
                assert torch.equal(seen, torch.tensor(expected))


def plain_pytorch(case: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's unfused attention in the dtype of its inputs."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=case.heads != case.heads_kv
        )
    return out.transpose(1, 2)


ACCURACY_CASES = [
    Case("long", seqlen_q=300, seqlen_k=700, head_dim=64, head_dim_v=64),
    Case("gqa", seqlen_q=200, seqlen_k=200, heads=6, heads_kv=2),
    Case("causal", seqlen_q=257, seqlen_k=257, causal=True, head_dim=64, head_dim_v=64),
    Case("bias", seqlen_q=100, seqlen_k=333, bias="b h q k"),
    Case("sharp", seqlen_q=128, seqlen_k=128, magnitude=3.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ACCURACY_CASES, ids=str)
def test_at_most_twice_the_error_of_pytorch(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case).to(dtype)
    actual = run_blockwise(case, inputs)
    exact = run_direct(case, inputs.to(torch.float64))
    leaves = [inputs.q, inputs.k, inputs.v] + ([] if inputs.bias is None else [inputs.bias])
    mask = inputs.bias
    if case.causal:
        mask = torch.full((case.seqlen_q, case.seqlen_k), -torch.inf, dtype=dtype).triu_(1)
    out = plain_pytorch(case, inputs.q, inputs.k, inputs.v, mask)
    # The gradient of the LSE, which PyTorch does not return, is left out of the comparison.
    grad_out = make_grads(actual["out"], actual["lse"])[0]
    plain = dict(
        zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out, leaves, grad_out), strict=False)
    )
    results = (actual["out"], actual["lse"])
    needs = (inputs.bias is not None, False)
    grads = blockwise_backward(grad_out, None, *results, make_call(case, inputs), needs)
    wide = inputs.to(torch.float64)
    out64 = plain_pytorch(
        case, wide.q, wide.k, wide.v, wide.bias if mask is inputs.bias else mask.double()
    )
    exact_grads = torch.autograd.grad(out64, wide.differentiable, grad_out.double())
    assert_as_accurate(actual["out"], exact["out"], out.detach(), "out")
    for name, grad, exact_grad in zip(plain, grads, exact_grads, strict=False):
        assert grad is not None and grad.dtype == dtype
        assert_as_accurate(grad, exact_grad, plain[name], name)
    assert actual["lse"].dtype == torch.float32
    assert_close(actual["lse"], exact["lse"], "rounding", torch.float32, name="lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    inputs = make_inputs(HUGE_LOGITS).to(dtype)
    for name, value in run_blockwise(HUGE_LOGITS, inputs).items():
        assert value.isfinite().all(), name


LENGTHS = {
    "ragged": ([3, 17, 40, 1], [5, 17, 22, 60]),
    "zero_lengths": ([0, 4, 0, 9, 7, 0], [3, 0, 0, 11, 7, 0]),
    "no_sequences": ([], []),
    "all_empty": ([0, 0], [0, 0]),
}
VARLEN_CASES = [
    Case("plain", heads=4, heads_kv=2),
    Case("causal", causal=True),
    Case("window_sink", window=(5, 3), sink=True),
    Case("bias", bias="b h q k", causal=True),
    Case("bias_shared", bias="h 1 k"),
    Case("dropout_alibi", dropout_p=0.4, alibi="batch, heads", heads=4, heads_kv=2),
]


def make_varlen(case: Case, lengths: tuple[list[int], list[int]], gap: int) -> tuple:
    """Packed inputs with `gap` rows before the first and after the last sequence, all of them
    NaN."""
    lengths_q, lengths_k = lengths
    case = dataclasses.replace(
        case,
        batch=len(lengths_q),
        seqlen_q=max(lengths_q, default=0),
        seqlen_k=max(lengths_k, default=0),
    )
    inputs = make_inputs(case)
    packed = []
    cu_seqlens = []
    for lens in lengths:
        starts = torch.tensor([0, *lens]).cumsum(0).to(torch.int32) + gap
        cu_seqlens.append(starts)
    for lens, heads, dim in (
        (lengths_q, case.heads, case.head_dim),
        (lengths_k, case.heads_kv, case.head_dim),
        (lengths_k, case.heads_kv, case.head_dim_v),
    ):
        rows = strided(sum(lens) + 2 * gap, heads, dim)
        rows[:gap], rows[rows.shape[0] - gap :] = torch.nan, torch.nan
        packed.append(rows.requires_grad_())
    return (
        case,
        dataclasses.replace(inputs, q=packed[0], k=packed[1], v=packed[2]),
        tuple(cu_seqlens),
    )


@pytest.mark.parametrize("gap", [0, 3], ids=["tight", "poisoned_gaps"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_varlen_blockwise_equals_direct(
    case: Case, lengths: tuple, gap: int, tile_size: str
) -> None:
    case, inputs, cu_seqlens = make_varlen(case, lengths, gap)
    expected, actual = run_direct(case, inputs, cu_seqlens), run_blockwise(case, inputs, cu_seqlens)
    for name, value in actual.items():
        assert not value.isnan().any(), name
        rule = "rounding" if name in ("out", "lse") else "gradient"
        assert_close(value, expected[name], rule, name=name)
    if gap:
        for name in ("out", "dq", "dk", "dv"):
            assert not actual[name][:gap].any() and not actual[name][-gap:].any(), name
        assert torch.equal(
            actual["lse"][:, :gap], torch.full_like(actual["lse"][:, :gap], -torch.inf)
        )


def test_varlen_equals_dense_of_each_sequence() -> None:
    case = Case("each", heads=4, heads_kv=2, causal=True, dropout_p=0.25, sink=True)
    case, inputs, cu_seqlens = make_varlen(case, LENGTHS["ragged"], 0)
    packed = run_blockwise(case, inputs, cu_seqlens)
    for b in range(case.batch):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in cu_seqlens)
        # The bits of dropout depend on the number of the sequence, so the dense call has the
        # sequence at the same place in its batch.
        q, k, v = (
            t[None].expand(b + 1, *t.shape).contiguous()
            for t in (inputs.q[rows], inputs.k[keys], inputs.v[keys])
        )
        call = make_call(case, inputs)._replace(q=q, k=k, v=v)
        out, lse = blockwise_forward(call)
        assert_close(packed["out"][rows], out[b], "rounding", name="out")
        assert_close(packed["lse"][:, rows], lse[b], "rounding", name="lse")


@pytest.mark.parametrize("run", [run_direct, run_blockwise], ids=["direct", "blockwise"])
def test_what_no_mask_shows_is_not_read(run) -> None:
    """NaN in keys that no query sees, and in queries that see no key, changes nothing."""
    for case in (
        Case("keys", window=(2, 0), seqlen_q=5, seqlen_k=90, sink=True),
        Case("queries", causal=True, seqlen_q=90, seqlen_k=33),
        Case("both", window=(1, 2), seqlen_q=40, seqlen_k=9),
    ):
        inputs = make_inputs(case)
        clean = run(case, inputs)
        shift = case.seqlen_k - case.seqlen_q
        left, right = case.window or (10**6, 0)
        right = 0 if case.causal else right
        sees = torch.tensor([
            [i + shift - left <= j <= i + shift + right for j in range(case.seqlen_k)]
            for i in range(case.seqlen_q)
        ])  # fmt: skip
        blind, unseen = ~sees.any(1), ~sees.any(0)
        assert blind.any() or unseen.any()
        with torch.no_grad():
            inputs.q[:, blind] = torch.nan
            inputs.k[:, unseen] = torch.nan
            inputs.v[:, unseen] = torch.nan
        for name, value in run(case, inputs).items():
            assert_close(value, clean[name], "exact", name=name)
        assert not clean["dq"][:, blind].any()
        assert not clean["dk"][:, unseen].any() and not clean["dv"][:, unseen].any()


@pytest.mark.parametrize("run", [run_direct, run_blockwise], ids=["direct", "blockwise"])
@pytest.mark.parametrize("anything", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bias_that_the_mask_hides_may_be_anything(run, anything, softcap, tile_size) -> None:
    """Also where its key is seen by another query, so that the tile is computed."""
    for case in (
        Case("causal", causal=True, seqlen_q=40, seqlen_k=47, bias="b h q k"),
        Case("window", window=(5, 3), seqlen_q=47, seqlen_k=40, bias="b h q k"),
    ):
        case = dataclasses.replace(case, softcap=softcap)
        inputs = make_inputs(case)
        assert inputs.bias is not None
        i = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
        j = torch.arange(case.seqlen_k)
        left, right = case.window or (10**6, 0)
        hidden = (j > i + right) | (j < i - left)
        clean = run(case, inputs)
        with torch.no_grad():
            inputs.bias.masked_fill_(hidden, anything)
        for name, value in run(case, inputs).items():
            assert_close(value, clean[name], "exact", name=name)
        assert not clean["dbias"].masked_select(hidden).any()


def test_varlen_bias_is_read_only_where_sequences_are() -> None:
    case, inputs, cu_seqlens = make_varlen(Case("bias", bias="b h q k"), LENGTHS["ragged"], 0)
    clean = run_blockwise(case, inputs, cu_seqlens)
    assert inputs.bias is not None
    with torch.no_grad():
        for b, (rows, keys) in enumerate(zip(*LENGTHS["ragged"], strict=True)):
            inputs.bias[b, :, rows:] = torch.nan
            inputs.bias[b, :, :, keys:] = torch.nan
    for name, value in run_blockwise(case, inputs, cu_seqlens).items():
        assert_close(value, clean[name], "exact", name=name)


def test_bitwise_repeatable() -> None:
    case = dataclasses.replace(CASES[-1], seqlen_q=300, seqlen_k=300, batch=3)
    inputs = make_inputs(case).to(torch.float32)
    first, second = run_blockwise(case, inputs), run_blockwise(case, inputs)
    for name, value in second.items():
        assert_close(value, first[name], "exact", name=name)


def test_missing_lse_gradient_is_zeros() -> None:
    case = next(case for case in CASES if case.name == "sink_gqa_causal")
    inputs = make_inputs(case)
    call = make_call(case, inputs)
    out, lse = blockwise_forward(call)
    grad_out = make_grads(out, lse)[0]
    pair = [
        blockwise_backward(grad_out, grad_lse, out, lse, call, (False, True))
        for grad_lse in (None, torch.zeros_like(lse))
    ]
    for name, without, zeros in zip(("dq", "dk", "dv", "dbias", "dsink"), *pair, strict=True):
        if name == "dbias":
            assert without is None and zeros is None
        else:
            assert_close(without, zeros, "exact", name=name)


def test_dtypes_and_shapes_of_results() -> None:
    for dtype, wide in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        case = dataclasses.replace(CASES[-1], dropout_p=0.0)
        inputs = make_inputs(case).to(dtype)
        actual = run_blockwise(case, inputs)
        assert actual["lse"].dtype == wide and actual["dsink"].dtype == wide
        for name, like in (
            ("dq", inputs.q),
            ("dk", inputs.k),
            ("dv", inputs.v),
            ("dbias", inputs.bias),
        ):
            assert actual[name].dtype == dtype and actual[name].shape == like.shape, name
        assert actual["out"].dtype == dtype and actual["out"].is_contiguous()


def test_autocast_does_not_lower_precision() -> None:
    case = CASES[0]
    inputs = make_inputs(case).to(torch.float32)
    plain = (run_direct(case, inputs), run_blockwise(case, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        inside = (run_direct(case, inputs), run_blockwise(case, inputs))
    for a, b in zip(plain, inside, strict=True):
        assert_close(b["out"], a["out"], "exact", name="out")
