"""Calls with few queries on sm80 rows, whose tiles the heads of a group share, on a GPU: against
the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attention import attention_varlen, attention_varlen_reference
from cute_attention.inference import attention_with_cache
from cute_attention.native import rows
from every_row import DTYPES, fixture_of
from kernel_calls import (
    CAUSAL,
    Case,
    case_inputs,
    check_forward,
    offsets,
    packed_inputs,
    poison_free_memory,
)
from test_kernels import FORWARD
from test_key_splits import SPLITS
from test_sinks import sinks
from tolerances import assert_close, assert_near, assert_same_bits

pytestmark = pytest.mark.gpu

FEW = 64  # kFewQueriesTileM of core/few_queries.h
ROWS = [row for row in FORWARD if row.arch == "sm80" and not row.score_mods and row.tile_m == 128]
row = fixture_of(ROWS)

GROUPS = [1, 3, 4, 8, 71]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window": (40, 5)},
    "ahead": {"window": (None, 9)},
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [1, 3, 16, 17, FEW, FEW + 1])
@pytest.mark.parametrize("group", GROUPS)
def test_accuracy(
    row: rows.TableRow,
    group: int,
    queries: int,
    mask: str,
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two KV heads and two sequences; outputs and LSE; with 5 keys some queries see none."""
    monkeypatch.setenv(SPLITS, str(splits))
    for keys in (5, 203):
        case = Case(2, queries, keys, 2 * group, 2, MASKS[mask])
        inputs = case_inputs(row, case)
        poison_free_memory()
        check_forward(inputs, row.arch, **case.options)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_sinks_are_those_of_the_rows(
    row: rows.TableRow, group: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head has a sink of its own. 9 of the 17 queries see no key."""
    monkeypatch.setenv(SPLITS, str(splits))
    for queries, keys in ((1, 130), (17, 8)):
        inputs = case_inputs(row, Case(1, queries, keys, 2 * group, 2, CAUSAL))
        check_forward(inputs, row.arch, sink=sinks(2 * group), **CAUSAL)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("group", GROUPS)
def test_packed(
    row: rows.TableRow, group: int, causal: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences, sequences without keys, and NaN in the rows of no sequence."""
    monkeypatch.setenv(SPLITS, str(splits))
    heads = 2 * group
    lengths_q, lengths_k = [0, 5, FEW, 0, 17, 1, 9], [3, 0, 400, 0, 129, 300, 0]
    ends, totals = (offsets(lengths_q), offsets(lengths_k)), (sum(lengths_q), sum(lengths_k))
    inputs = packed_inputs(row, totals, (heads, 2), padding=50)
    poison_free_memory()
    out, lse = attention_varlen(
        *inputs, *ends, max(lengths_q), max(lengths_k), backend=row.arch, return_lse=True,
        causal=causal,
    )  # fmt: skip
    assert bool(out[totals[0] :].eq(0).all()) and bool(lse[:, totals[0] :].isneginf().all())
    mine = [t[:total] for t, total in zip(inputs, (*totals, totals[1]), strict=True)]
    exact, exact_lse = attention_varlen_reference(
        *(t.double() for t in mine), *ends, return_lse=True, causal=causal
    )
    assert_close(lse[:, : totals[0]], exact_lse.float(), "rounding", name="lse")
    assert_near(out[: totals[0]], exact, "out", 2**-6)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_short_max_seqlen_leaves_no_row_unwritten(
    row: rows.TableRow, group: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that is longer than max_seqlen_q all rows of all heads are right or NaN."""
    monkeypatch.setenv(SPLITS, str(splits))
    heads, lengths_q, lengths_k = 2 * group, [70, 3], [130, 60]
    ends, totals = (offsets(lengths_q), offsets(lengths_k)), (sum(lengths_q), sum(lengths_k))
    inputs = packed_inputs(row, totals, (heads, 2), padding=0)
    poison_free_memory()
    out, lse = attention_varlen(*inputs, *ends, 5, 130, backend=row.arch, return_lse=True)
    exact, exact_lse = attention_varlen_reference(
        *(t.double() for t in inputs), *ends, return_lse=True
    )
    nan = out.isnan().all(-1)
    assert torch.equal(nan, out.isnan().any(-1)) and torch.equal(nan, lse.isnan().t())
    assert bool(nan.any()) and not bool(nan[:5].any()) and not bool(nan[70:].any())
    assert torch.equal(nan, nan[:, :1].expand_as(nan))
    assert_near(out[~nan], exact[~nan], "out", 2**-6)
    assert_close(lse.t()[~nan], exact_lse.t()[~nan].float(), "rounding", name="lse")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_pages(
    row: rows.TableRow, group: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in pages, in any order: the bits of the same keys in rows. Pages of no sequence are
    NaN, and so are keys behind the last."""
    monkeypatch.setenv(SPLITS, str(splits))
    page, batch, room = 16, 2, 256
    q, k, v = case_inputs(row, Case(batch, 17, room, 2 * group, 2, {}))
    used = torch.tensor([room - 3, 40], device="cuda").int()
    for tensor in (k, v):
        tensor[torch.arange(room, device="cuda") >= used[:, None]] = torch.nan
    table = torch.randperm(batch * room // page + 3, device="cuda")[: batch * room // page]
    pages = []
    for tensor in (k, v):
        paged = torch.full(
            (len(table) + 3, page, *tensor.shape[2:]), torch.nan, device="cuda",
            dtype=DTYPES[row.dtype],
        )  # fmt: skip
        paged[table] = tensor.reshape(len(table), page, *tensor.shape[2:])
        pages.append(paged)
    for options in (CAUSAL, {"window": (40, 5)}):
        plain = attention_with_cache(q, k, v, used, backend=row.arch, return_lse=True, **options)
        found = attention_with_cache(
            q, *pages, used, block_table=table.int().view(batch, -1), backend=row.arch,
            return_lse=True, **options,
        )  # fmt: skip
        for one, other in zip(found, plain, strict=True):
            assert bool(one.isfinite().all())
            assert_same_bits(one, other, "pages")
