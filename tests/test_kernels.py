"""Every forward row of the kernel tables, on a GPU, against the direct formula in float64."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_attention import BackendError, attention, attention_varlen, explain
from cute_attention.native import rows
from cute_attention.semantics.formula import attention_reference, attention_varlen_reference
from every_row import (
    DTYPES,
    LIMIT,
    ONLY,
    fixture_of,
    run_alone,
    run_on_small_chip,
    skip_if_places_matter,
)
from kernel_calls import (
    CASES,
    CAUSAL,
    Case,
    case_inputs,
    check_forward,
    offsets,
    options_for,
    plain_pytorch,
    strided,
)
from tolerances import assert_as_accurate, assert_close

pytestmark = pytest.mark.gpu

FORWARD = [row for row in rows.table() if row.direction == "forward"]
row = fixture_of(FORWARD)


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
def test_rows_that_share_a_key_with_another(row: rows.TableRow) -> None:
    """Runs this file once more for a row that dispatch does not choose for every shape, in a
    process where it is the only row."""
    sharing = [other for other in FORWARD if other.key_name() == row.key_name()]
    if sum(not other.name.endswith("_99kb") for other in sharing) < 2:
        pytest.skip("no other row has its key")
    run_alone([__file__], row.name, {ONLY: f"^{row.name}$"})


@pytest.mark.skipif(LIMIT in os.environ, reason="runs the others in a process of their own")
def test_rows_for_chips_of_99_kb() -> None:
    run_on_small_chip(FORWARD, [__file__])


@pytest.mark.skipif(ONLY in os.environ, reason="rows are chosen from outside")
def test_the_row_is_chosen(row: rows.TableRow) -> None:
    """Every row is chosen for some length: of rows with the same key, one is for short sequences
    and one for long ones, and at head dim 64 one for many sequences of some hundred tokens."""
    chosen = []
    for batch, seqlen, heads in ((2, 256, 4), (64, 197, 12), (4, 8192, 16)):
        q = k = torch.empty(
            batch, seqlen, heads, row.head_dim, device="cuda", dtype=DTYPES[row.dtype]
        )
        v = q[..., : row.head_dim_v]
        answer = explain(q, k, v, backend=row.arch, **options_for(row, {}, heads))
        report = next(r for r in answer.forward if r.backend == row.arch)
        chosen.append([candidate.name for candidate in report.rows if candidate.chosen])
    assert [row.name] in chosen and all(len(names) == 1 for names in chosen)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_accuracy(row: rows.TableRow, case: Case) -> None:
    options = options_for(row, case.options, case.heads)
    check_forward(case_inputs(row, case), row.arch, **options)


@pytest.mark.parametrize(
    "options", [{}, CAUSAL, {"window": (700, 0)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("step", [-3.0, 3.0, 15.0, 200.0])
def test_scores_that_rise_from_tile_to_tile(
    row: rows.TableRow, step: float, options: dict[str, Any]
) -> None:
    """Scores grow by `step` every 150 keys towards the first key, where kernels end their walk.
    Relative to the maximum so far, exponentials stay small, grow large, or overflow."""
    dtype, options = DTYPES[row.dtype], options_for(row, options, 4)
    level = torch.arange(900, device="cuda").flip(0).div(150, rounding_mode="floor") * step
    q = torch.randn(1, 900, 4, row.head_dim, device="cuda")
    k = torch.randn(1, 900, 2, row.head_dim, device="cuda")
    q[..., 0] = row.head_dim**0.5
    k[..., 0] = level[None, :, None]
    q, k = q.to(dtype), k.to(dtype)
    v = torch.randn(1, 900, 2, row.head_dim_v, device="cuda").to(dtype)
    check_forward((q, k, v), row.arch, **options)


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize(
    "options", [{}, CAUSAL, {"window": (30, 0)}], ids=["full", "causal", "window"]
)
def test_packed_sequences_see_nothing_but_themselves(
    row: rows.TableRow, options: dict[str, Any], heads: int
) -> None:
    """Zero-length sequences, and NaN in every row that belongs to another sequence or to none."""
    skip_if_places_matter(row)
    dtype, options = DTYPES[row.dtype], options_for(row, options, heads)
    lengths_q, lengths_k = [0, 5, 130, 0, 257, 64, 1], [3, 0, 200, 0, 129, 64, 77]
    ends = [offsets(lengths_q), offsets(lengths_k)]
    clean = [
        torch.randn(int(cu[-1]) + 300, heads, dim, device="cuda").to(dtype)
        for cu, heads, dim in (
            (ends[0], heads, row.head_dim),
            (ends[1], 2, row.head_dim),
            (ends[1], 2, row.head_dim_v),
        )
    ]
    longest = max(lengths_q), max(lengths_k)
    for sequence in range(len(lengths_q)):
        first = [int(cu[sequence]) for cu in (ends[0], ends[1], ends[1])]
        last = [int(cu[sequence + 1]) for cu in (ends[0], ends[1], ends[1])]
        q, k, v = (torch.full_like(t, math.nan) for t in clean)
        for poisoned, source, begin, end in zip((q, k, v), clean, first, last, strict=True):
            poisoned[begin:end] = source[begin:end]
        out, lse = attention_varlen(
            q, k, v, *ends, *longest, backend=row.arch, return_lse=True, **options
        )
        mine = [
            source[begin:end][None] for source, begin, end in zip(clean, first, last, strict=True)
        ]
        exact, exact_lse = attention_reference(
            *(t.double() for t in mine), return_lse=True, **options
        )
        rows_of_it = slice(first[0], last[0])
        no_sequence = out[ends[0][-1] :]
        assert no_sequence.eq(0).all() and lse[:, ends[0][-1] :].isneginf().all()
        assert_as_accurate(out[rows_of_it][None], exact, plain_pytorch(*mine, options)[0], "out")
        assert_close(lse[None, :, rows_of_it], exact_lse.float(), "rounding", name="lse")


def test_packed_agrees_with_the_packed_reference(row: rows.TableRow) -> None:
    dtype, options = DTYPES[row.dtype], options_for(row, CAUSAL, 4)
    cu = torch.tensor([0, 100, 100, 357], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(357, 4, dim, device="cuda").to(dtype)
        for dim in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    out, lse = attention_varlen(
        q, k, v, cu, cu, 257, 257, backend=row.arch, return_lse=True, **options
    )
    expected, expected_lse = attention_varlen_reference(
        q.float(), k.float(), v.float(), cu, cu, return_lse=True, **options
    )
    assert_close(out.float(), expected, "rounding", dtype, name="out")
    assert_close(lse, expected_lse, "rounding", name="lse")


def test_smaller_head_dims_run_on_the_row(row: rows.TableRow) -> None:
    """A multiple of 8 below the row's head dim is filled up with zeros on the chip."""
    dtype, options = DTYPES[row.dtype], options_for(row, CAUSAL, 4)
    q, k, v = (
        strided(2, 150, 4, dim - 8, dtype=dtype)
        for dim in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    out = attention(q, k, v, backend=row.arch, **options)
    exact = attention_reference(q.double(), k.double(), v.double(), **options)
    assert_as_accurate(out, exact, plain_pytorch(q, k, v, options)[0], "out")


@pytest.mark.parametrize("softcap", [0.02, 50.0, 1e5, 1e28])
def test_caps_of_any_size(row: rows.TableRow, softcap: float) -> None:
    """A cap that all scores reach, an ordinary one, and two far above all scores."""
    if "softcap" not in row.score_mods:
        pytest.skip("no softcap")
    q, k, v = (
        strided(2, 150, 4, dim, dtype=DTYPES[row.dtype])
        for dim in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    options = options_for(row, {"causal": True, "softcap": softcap}, 4)
    out, lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
    exact, exact_lse = attention_reference(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    assert_as_accurate(out, exact, plain_pytorch(q, k, v, options)[0], "out")
    assert_close(lse, exact_lse.float(), "rounding", name="lse")


def test_scores_below_a_cap_that_overflow(row: rows.TableRow) -> None:
    """Query 0 sees no key of the KV tile that its neighbours need first, and its products with all
    others are -infinity in fp32: each is the negative cap."""
    if "softcap" not in row.score_mods or row.dtype == "fp16":  # whose products are finite
        pytest.skip("no score overflows")
    q, k, v = (
        strided(1, length, 2, dim, dtype=torch.bfloat16)
        for length, dim in ((64, row.head_dim), (319, row.head_dim), (319, row.head_dim_v))
    )
    k.copy_(-1e30 * (1 + k.abs()))
    q.copy_(1e-30 * (1 + q.abs()))
    q[:, 0] = 1e30
    options = options_for(row, {"causal": True, "softcap": 500.0}, 2)
    out, lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
    exact, exact_lse = attention_reference(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    assert_close(out, exact.to(out.dtype), "rounding", name="out")
    assert_close(lse, exact_lse.float(), "rounding", name="lse")


@pytest.mark.parametrize("seqlen", [1, 100, 517])
def test_one_score_near_the_cap(row: rows.TableRow, seqlen: int) -> None:
    """Scores far below the cap take a short way, unless one of their warp is nearer. Both ways give
    the other rows the same bits, and the row of the large score is right."""
    if "softcap" not in row.score_mods:
        pytest.skip("no softcap")
    q, k, v = (
        torch.randn(1, seqlen, 2, dim, device="cuda").to(DTYPES[row.dtype])
        for dim in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    options = options_for(row, {"softcap": 30.0}, 2)
    far, others = seqlen // 2, [i for i in range(seqlen) if i != seqlen // 2]
    with_far = q.clone()
    with_far[:, far] *= 40
    expected = attention(q, k, v, backend=row.arch, **options)
    found = attention(with_far, k, v, backend=row.arch, **options)
    assert torch.equal(found[:, others], expected[:, others])
    exact = attention_reference(with_far.double(), k.double(), v.double(), **options)
    plain = plain_pytorch(with_far, k, v, options)[0]
    assert_as_accurate(found, exact, plain, "out")


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-38, 1e-60])
def test_a_scale_that_is_not_positive_is_refused(row: rows.TableRow, scale: float) -> None:
    """No kernel serves a scale that is not positive: it takes the maximum before it multiplies. One
    below 2^-126 is 0 to it, and the product with a hidden score, -inf, would be NaN."""
    q = k = torch.randn(1, 40, 2, row.head_dim, device="cuda").to(DTYPES[row.dtype])
    v = torch.randn(1, 40, 2, row.head_dim_v, device="cuda").to(DTYPES[row.dtype])
    options = options_for(row, {}, 2)
    capped = scale > 0 and options.get("softcap") is not None  # whose quotient is refused before
    error, words = (ValueError, "softcap") if capped else (BackendError, "a scale that is not pos")
    with pytest.raises(error, match=words):
        attention(q, k, v, scale=scale, backend=row.arch, **options)


def test_repeats_bitwise(row: rows.TableRow) -> None:
    q, k, v = (
        torch.randn(2, 1000, 4, dim, device="cuda").to(DTYPES[row.dtype])
        for dim in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    options = options_for(row, CAUSAL, 4)
    first, first_lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
    for _ in range(100):
        again, lse = attention(q, k, v, backend=row.arch, return_lse=True, **options)
        assert torch.equal(again, first) and torch.equal(lse, first_lse)


def test_packed_sequences_on_two_streams_and_in_a_graph(row: rows.TableRow) -> None:
    """Calls that run at the same time share no workspace, so all get the same bits. So does a
    replayed call."""
    calls = []
    options = options_for(row, CAUSAL, 8)  # not while a graph is captured: slopes are tensors
    for seed in (0, 1):
        torch.manual_seed(seed)
        lengths = torch.randint(1, 600, (40,), device="cuda")
        cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        total, longest = int(cu[-1]), int(lengths.max())
        q, k, v = (
            torch.randn(total, heads, dim, device="cuda").to(DTYPES[row.dtype])
            for heads, dim in ((8, row.head_dim), (2, row.head_dim), (2, row.head_dim_v))
        )
        calls.append((q, k, v, cu, cu, longest, longest))

    def run(call: tuple[Any, ...]) -> Tensor:
        return attention_varlen(*call, backend=row.arch, **options)

    alone = [run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    together: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for call, stream, outs in zip(calls, streams, together, strict=True):
            with torch.cuda.stream(stream):
                outs.append(run(call))
    torch.cuda.synchronize()
    for expected, outs in zip(alone, together, strict=True):
        assert all(torch.equal(out, expected) for out in outs)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(calls[0])
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, alone[0])


def test_more_than_2_to_the_31_elements(row: rows.TableRow) -> None:
    """Offsets need not fit 32 bits: checks the last batch entry of a tensor with over 2^31
    elements."""
    skip_if_places_matter(row)
    dtype, dim, heads, seqlen = DTYPES[row.dtype], row.head_dim, 64, 1024
    batch = 2**31 // (seqlen * heads * dim) + 2
    if torch.cuda.mem_get_info()[0] < 5 * 2 * batch * seqlen * heads * dim:
        pytest.skip("needs five tensors of over 4 GiB on the GPU")
    q, k = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(batch, seqlen, heads, row.head_dim_v, device="cuda", dtype=dtype)
    options = options_for(row, {}, heads)
    out = attention(q, k, v, backend=row.arch, **options)
    for entry in (0, batch - 1):
        last = [t[entry : entry + 1] for t in (q, k, v)]
        expected = attention(*last, backend=row.arch, **options)
        assert torch.equal(out[entry : entry + 1], expected)
