"""Rows like one of the tables: which there are, in which order they are tried, what the layout lab
refuses, and several compiled side by side."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from built_rows import calls, install_fake
from cute_attention.errors import RowError
from cute_attention.native import core, rows
from cute_attention.problem import Problem
from cute_attention.rows import Row, candidates
from cute_attention.rows.builds import build_all
from cute_attention.rows.candidates import Candidate, proven, ranked, row_of
from cute_attention.rows.cost import estimate_us, relative_estimate, typical_device
from cute_attention.rows.ranges import operand_bytes, ranges_of, variants

needs_core = pytest.mark.skipif(not core.available(), reason="the core library is not installed")
PLAIN = [row for row in rows.table() if row.dtype == "bf16" and not row.score_mods]
LIMIT = {"sm80": 163 * 1024, "sm90": 227 * 1024}


def named(name: str) -> rows.TableRow:
    return next(row for row in rows.table() if row.name == name)


@pytest.mark.parametrize("row", rows.table(), ids=lambda row: row.name)
def test_a_row_of_the_tables_is_within_its_ranges(row: rows.TableRow) -> None:
    found = list(variants(row))
    assert found.count(row) == 1
    assert len(set(found)) == len(found)
    assert operand_bytes(row) <= LIMIT[row.arch]
    how = {"tile_m", "tile_n", "stages", "warps", "ptxas"}
    for other in found:
        changed = {
            field.name
            for field in dataclasses.fields(row)
            if getattr(row, field.name) != getattr(other, field.name)
        }
        assert changed <= how


def test_bytes_of_operands() -> None:
    forward = named("sm90_fwd_bf16_d192x128")
    assert operand_bytes(forward) == 2 * (128 * 192 + 2 * 128 * (192 + 128))
    backward = named("sm80_bwd_bf16_d128")
    assert operand_bytes(backward) == 2 * (128 * 256 + 2 * 64 * 256)
    latent = named("sm90_fwd_bf16_d64x512_qv")
    assert operand_bytes(latent) == 2 * (64 + 2 * 64) * (64 + 512)
    # Two kernels, whose steps are of 64 rows whatever tile_m is.
    assert operand_bytes(named("sm90_bwd_bf16_d256")) == 2 * (64 + 2 * 64) * 512


def test_warpgroups_follow_the_tile() -> None:
    forward = named("sm90_fwd_bf16_d64")
    assert {(row.tile_m, row.warps) for row in variants(forward)} == {(64, 8), (128, 12), (192, 16)}
    backward = named("sm90_bwd_bf16_d128")
    assert {(row.tile_n, row.warps) for row in variants(backward)} == {
        (64, 8),
        (128, 12),
        (192, 16),
    }
    assert ranges_of(named("sm90_bwd_bf16_d192")).tile_m == (128,)


@needs_core
@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_candidates_fit_and_are_all_but_the_present_row(row: rows.TableRow) -> None:
    problem = Problem(direction=row.direction, head_dim=row.head_dim, head_dim_v=row.head_dim_v)
    device = typical_device(row.arch)
    found, too_large = ranked(row, [problem], device)
    columns = [candidate.row.columns for candidate in found]
    assert len({*columns}) == len(columns)
    assert len(columns) + too_large + 1 == len(list(variants(row)))
    assert row_of(row).columns not in columns
    assert max((operand_bytes(each) for each in columns), default=0) <= LIMIT[row.arch]


@needs_core
def test_short_sequences_rank_tiles_without_waste_first() -> None:
    """197 queries fill 384 rows of tiles of 192, and 256 of tiles of 128 or 64."""
    row, device = named("sm90_fwd_bf16_d64"), typical_device("sm90")
    vit = Problem(batch=64, seqlen_q=197, seqlen_k=197, heads=12, heads_kv=12)
    found, _ = ranked(row, [vit], device)
    assert found[0].row.columns.tile_m < 192
    assert found[0].estimate < 0.8
    # The first of the list are tiles, and not variants of one.
    tiles = [(each.row.columns.tile_m, each.row.columns.tile_n) for each in found[:3]]
    assert len(set(tiles)) == 3
    # On long sequences the present tile is the best of its kind.
    long = Problem(batch=4, seqlen_q=8192, seqlen_k=8192, heads=16, heads_kv=16)
    narrow = dataclasses.replace(row, tile_m=64, warps=8)
    assert relative_estimate(narrow, row, [long], device) > 1.0


@needs_core
def test_no_room_on_a_small_chip() -> None:
    row = named("sm80_fwd_bf16_d256")
    small = dataclasses.replace(typical_device("sm80"), shared_memory_per_block=99 * 1024)
    found, too_large = ranked(row, [Problem(head_dim=256, head_dim_v=256)], small)
    assert too_large > 0
    assert max(operand_bytes(each.row.columns) for each in found) <= 99 * 1024


@needs_core
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (300, 20)])
def test_estimates_of_a_backward_exchange_queries_and_keys(left: int, right: int) -> None:
    """A tile of keys visits the queries that see it, so few queries and many keys are much work for
    it, in small pieces."""
    row, device = named("sm80_bwd_bf16_d64"), typical_device("sm80")
    kind = Problem(direction="backward", batch=4, window_left=left, window_right=right)
    equal = estimate_us(row, kind._replace(seqlen_q=2048, seqlen_k=2048), device)
    assert estimate_us(row, kind._replace(seqlen_q=1024, seqlen_k=1024), device) < equal
    forward = Problem(batch=4, seqlen_q=2048, seqlen_k=2048, window_left=right, window_right=left)
    asked = dataclasses.replace(
        row, direction="forward", tile_m=row.tile_n, tile_n=row.tile_m, head_dim=192, head_dim_v=128
    )
    room = operand_bytes(row)
    assert equal == core.estimate_us(forward, asked, 32 * row.warps, room, device)


@needs_core
def test_an_estimate_of_nothing_is_refused() -> None:
    device = dataclasses.replace(typical_device("sm80"), multiprocessors=0)
    with pytest.raises(RuntimeError, match="every number must be positive"):
        estimate_us(named("sm80_fwd_bf16_d64"), Problem(), device)
    with pytest.raises(ValueError, match="batch of q is -1"):
        estimate_us(named("sm80_fwd_bf16_d64"), Problem(batch=-1), typical_device("sm80"))
    nothing = Problem(batch=0)
    row = named("sm80_fwd_bf16_d64")
    assert relative_estimate(row, row, [nothing], typical_device("sm80")) == 1.0


def test_proofs_stop_when_enough_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def check(row: Row) -> list[object]:
        asked.append(row.columns.tile_n)
        if row.columns.tile_n < 64:
            raise RowError(f"{row.name}: 1 of 9 proofs do not hold\n  banks: k: 2-way")
        return []

    monkeypatch.setattr(Row, "check", check)
    order = [
        Candidate(Row.of("sm80_fwd_bf16_d64", tile_n=tile_n), 1.0)
        for tile_n in (32, 80, 48, 96, 112)
    ]
    found = proven(order, 2, jobs=1)
    assert [each.row.columns.tile_n for each in found.kept] == [80, 96]
    assert [(row.columns.tile_n, reason) for row, reason in found.refused] == [
        (32, "banks: k: 2-way"),
        (48, "banks: k: 2-way"),
    ]
    assert asked == [32, 80, 48, 96], "no more than it must"


def test_the_lab_refuses_what_cannot_be() -> None:
    pytest.importorskip("pycute")
    too_few_threads = Row.of("sm80_bwd_bf16_d64", tile_m=128, tile_n=128, warps=4)
    found = proven([Candidate(too_few_threads, 1.0)], 1, jobs=1)
    assert not found.kept
    assert "each thread copies one LSE or delta" in found.refused[0][1]
    assert candidates.row_of(too_few_threads.columns) == too_few_threads


def test_what_would_spill_is_passed_over() -> None:
    """Head dim 96 with three warpgroups of queries, 160 registers a thread each: 64 + 48 + 32 of
    them are accumulators and P at 128 keys, of which ptxas spilled 112 bytes, and 56 + 48 + 28 at
    112 keys, where it did not."""
    pytest.importorskip("pycute")
    wide, narrow = (
        Row.of("sm90_fwd_bf16_d96", tile_m=192, tile_n=tile_n, warps=16, stages=2)
        for tile_n in (128, 112)
    )
    found = proven([Candidate(wide, 0.9), Candidate(narrow, 1.0)], 1, jobs=1)
    assert [each.row for each in found.kept] == [narrow]
    assert found.refused == [
        (wide, "it would spill: accumulators and operands leave 16 registers, not 28")
    ]
    # Where the compiler takes as many as it likes, and in the tables, nothing is refused.
    for name in ("sm80_fwd_bf16_d64", "sm90_bwd_bf16_d64"):
        assert proven([Candidate(Row.of(name), 1.0)], 1, jobs=1).refused == []


@needs_core
def test_rows_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_fake(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_NVCC", "slow")
    monkeypatch.setenv("FAKE_NVCC_SECONDS", "1.5")
    some = [Row.of("sm80_fwd_bf16_d64", tile_n=tile_n) for tile_n in (32, 80)]
    done: list[Row] = []
    begun = time.monotonic()
    found = build_all(some, (80,), jobs=2, done=lambda built: done.append(built.row))
    took = time.monotonic() - begun
    assert done == some == [built.row for built in found]
    assert all(built.path and built.path.is_file() and not built.error for built in found)
    assert took < sum(built.seconds for built in found), "one after the other"
    again = build_all(some, (80,), jobs=2)
    assert [built.path for built in again] == [built.path for built in found]
    assert len(calls(tmp_path)) == 2, "what is in the cache is compiled again"


@needs_core
def test_what_fails_leaves_the_rest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_fake(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_NVCC", "fail")
    row = Row.of("sm80_fwd_bf16_d64", tile_n=32)
    (failed,) = build_all([row], (80,), jobs=1)
    assert failed.path is None and "static assertion failed: too large" in failed.error
    monkeypatch.setenv("FAKE_NVCC", "text")
    (late,) = build_all([row], (80,), jobs=1, limit_s=-1.0)
    assert late.error == "not begun within -1 s" and late.path is None
    (built,) = build_all([row], (80,), jobs=1, limit_s=60.0)
    assert built.path is not None
