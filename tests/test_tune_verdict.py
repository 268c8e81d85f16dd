"""What figures of candidates mean: which one replaces the row, and the lines for the table."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

import torch

from cute_attention.bench.machine import describe
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row as Figures
from cute_attention.bench.tables import make_console
from cute_attention.native import rows
from cute_attention.tune.folder import Folder
from cute_attention.tune.measure import TO_PRESENT, merged, with_ratios
from cute_attention.tune.plan import candidates_for
from cute_attention.tune.show import plot_verdict, print_search, print_verdict
from cute_attention.tune.subjects import problem_of, subjects_of
from cute_attention.tune.verdict import lines_for_the_table, verdict_of
from tuning import LONG, PRESENT, SHORT, entry, figure, search

ROOT = Path(__file__).resolve().parents[1]
MACHINE = describe(torch.device("cpu"))
ROOM = 163 * 1024


def figures(name: str, *ratios: float) -> list[Figures]:
    """Of a kernel at the two points, as speeds over that of the present row, which does 100."""
    points = (SHORT, LONG)[: len(ratios)]
    return [figure(name, p, 100 * r, r) for p, r in zip(points, ratios, strict=True)]


@pytest.mark.parametrize(
    ("ratios", "replaces"),
    [
        ((1.10, 1.05), True),
        ((1.10, 0.995), True),  # within the noise at one point
        ((1.30, 0.98), False),  # behind at one point
        ((1.008, 1.008), False),  # ahead by no more than the noise
        ((1.011, 1.011), True),
        ((0.90, 0.90), False),
    ],
)
def test_a_candidate_replaces_the_row_where_it_is_ahead(
    ratios: tuple[float, float], replaces: bool
) -> None:
    wide = entry("wide", tile_n=96)
    verdict = verdict_of(search(wide), figures("present", 1.0, 1.0) + figures("wide", *ratios))
    assert (verdict.winner is not None) == replaces
    if replaces:
        assert "sm80_fwd_bf16_d64_m128n96s1w4_o1 replaces sm80_fwd_bf16_d64" in verdict.text()
        assert verdict.ahead_somewhere() == []
    else:
        assert "the table's row sm80_fwd_bf16_d64 is the best of 2" in verdict.text()
        assert lines_for_the_table(verdict, MACHINE) == ""
        assert len(verdict.ahead_somewhere()) == (max(ratios) > 1.01)


def test_the_fastest_that_replaces_wins() -> None:
    names = {"a": (1.20, 0.90), "b": (1.05, 1.05), "c": (1.03, 1.02)}
    entries = [entry(name, tile_n=n) for name, n in zip(names, (32, 96, 112), strict=True)]
    rows_ = [row for name, ratios in names.items() for row in figures(name, *ratios)]
    verdict = verdict_of(search(*entries), figures("present", 1.0, 1.0) + rows_)
    assert [each.entry.name for each in verdict.standings] == ["b", "a", "c"]
    assert verdict.winner is verdict.standings[0]
    assert [each.entry.name for each in verdict.ahead_somewhere()] == ["a", "c"]


def test_what_is_wrong_or_not_measured_everywhere_does_not_rank() -> None:
    entries = [entry("half", tile_n=32), entry("wrong", tile_n=96), entry("", tile_n=112)]
    rows_ = figures("present", 1.0, 1.0) + figures("half", 2.0) + figures("wrong", 3.0, 3.0)
    verdict = verdict_of(search(*entries), rows_, {"wrong": "out is wrong"})
    assert verdict.standings == () and verdict.incomplete == 1
    assert verdict.winner is None
    assert "no candidate was measured beside sm80_fwd_bf16_d64 at every point" in verdict.text()
    assert "1 candidates are not measured at every point" in verdict.text()
    # Rows of the other direction and of other points do not count.
    other = dataclasses.replace(figures("half", 1.5)[0], what="bwd", point=LONG)
    elsewhere = dataclasses.replace(figures("half", 1.5)[0], point=Point(9, 4, 100, 64))
    assert (
        verdict_of(search(*entries), [*rows_, other, elsewhere]).standings[0].entry.name == "wrong"
    )


def test_the_lines_are_those_of_the_table_with_their_evidence() -> None:
    wide = entry("wide", tile_n=96, ptxas="O3")
    verdict = verdict_of(search(wide), figures("present", 1.0, 1.0) + figures("wide", 1.1, 1.05))
    *comment, first, second = lines_for_the_table(verdict, MACHINE).splitlines()
    assert all(line.startswith("// ") and len(line) <= 125 for line in comment)
    evidence = " ".join(line.removeprefix("// ") for line in comment)
    assert f"On an {MACHINE.device}, TFLOP/s, against 128 x 64, 1 stages, 4 warps, O1" in evidence
    assert "full 2x100 h4 d64 110 against 100; causal 1x300 h4 d64 105 against 100" in evidence
    assert "1.07 of the speed on the mean of 2 points, 1.05 at worst." in evidence
    parsed = rows.parse("\n".join((first, second)))
    assert [row.name for row in parsed] == ["sm80_fwd_fp16_d64", "sm80_fwd_bf16_d64"]
    for row in parsed:
        assert (row.tile_m, row.tile_n, row.ptxas) == (128, 96, "O3")
        assert (row.stages, row.warps) == (PRESENT.stages, PRESENT.warps)


def test_ratios_are_taken_in_each_round() -> None:
    slow_rounds = (1.0, 2.0, 4.0)  # the clock fell
    usual = Figures(SHORT, "present", "ours", "fwd", metrics={"tflops": 1.0}, samples=slow_rounds)
    own = dataclasses.replace(usual, contender="new", samples=(0.5, 1.0, 3.0))
    failed = dataclasses.replace(usual, contender="bad", metrics={}, samples=(), reason="it broke")
    found = {row.contender: row for row in with_ratios([own, usual, failed], "present")}
    assert found["new"].metrics[TO_PRESENT] == 2.0
    assert found["present"].metrics[TO_PRESENT] == 1.0
    assert found["bad"] == failed
    assert with_ratios([own, failed], "present") == [own, failed], (
        "there is nothing to compare with"
    )


def test_results_of_several_runs_are_one() -> None:
    old = figures("present", 1.0, 1.0)
    newer = figure("present", SHORT, 90.0, 1.0)
    late = dataclasses.replace(
        figure("new", LONG, 1.0, 1.0), metrics={}, samples=(), reason="not reached within the limit"
    )
    found = merged(old, [newer, late])
    assert found == [newer, old[1]]


def test_subjects_are_the_rows_that_serve_the_points() -> None:
    capped = dataclasses.replace(SHORT, softcap=20.0)
    found = subjects_of([SHORT, LONG, capped], ["fwd", "bwd"], "sm80", ROOM)
    assert [(each.present.name, len(each.points)) for each in found] == [
        ("sm80_fwd_bf16_d64", 2),
        ("sm80_fwd_bf16_d64_softcap", 1),
        ("sm80_bwd_bf16_d64", 2),
        ("sm80_bwd_bf16_d64_softcap", 1),
    ]
    assert [each.direction for each in found] == ["fwd", "fwd", "bwd", "bwd"]
    for refused, message in (
        (dataclasses.replace(SHORT, dtype="fp32"), "of sm80 computes the forward of fp32 full"),
        (dataclasses.replace(SHORT, head_dim=512, head_dim_v=512), "no row of the tables"),
    ):
        with pytest.raises(ValueError, match=message):
            subjects_of([refused], ["fwd"], "sm80", ROOM)


def test_a_small_chip_has_other_rows() -> None:
    point = Point(1, 4, 256, 128)
    (large,) = subjects_of([point], ["bwd"], "sm80", ROOM)
    (small,) = subjects_of([point], ["bwd"], "sm80", 99 * 1024)
    assert large.present.name == "sm80_bwd_bf16_d128"
    assert small.present.name == "sm80_bwd_bf16_d128_99kb"


def test_the_problem_of_a_point() -> None:
    packed = Point(1, 8, 12, 60, 2, lengths=(5, 7), alibi=True, dropout=0.1, softcap=3.0)
    problem = problem_of(packed, "bwd")
    assert (problem.direction, problem.batch, problem.seqlen_q, problem.seqlen_k) == (
        "backward",
        2,
        7,
        7,
    )
    assert (problem.heads, problem.heads_kv, problem.head_dim) == (8, 2, 64)
    assert (problem.window_left, problem.window_right, problem.softcap) == (-1, -1, 3.0)
    assert problem.features == 2 | 8, "kAlibi and kDropout of config.h"
    assert problem_of(LONG, "fwd").window_right == 0


def test_how_many_candidates_fit_the_time() -> None:
    assert candidates_for(minutes=20, jobs=8, subjects=1) == 143
    assert candidates_for(minutes=20, jobs=2, subjects=2) == 17
    assert candidates_for(minutes=0.1, jobs=1, subjects=9) == 1


def test_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = entry("wide", tile_n=96)
    lost = dataclasses.replace(
        entry("", tile_n=80), file="", error="nvcc ended with exit code 2\nmore"
    )
    found = dataclasses.replace(search(wide, lost), refused=(("narrow", "banks: 2-way"),))
    peer = Figures(SHORT, "cudnn", "peer", "fwd", metrics={"tflops": 150.0, TO_PRESENT: 1.5})
    verdict = verdict_of(found, figures("present", 1.0, 1.0) + figures("wide", 1.1, 0.9) + [peer])
    console = make_console()
    print_search(console, found)
    print_verdict(console, verdict, {"odd": "out is wrong"})
    said = capsys.readouterr().out
    for words in ("128 x 96", "nvcc ended with exit code 2", "narrow: banks: 2-way", "1.10x"):
        assert words in said
    assert "cuDNN" in said and "150" in said and "not measured: odd: out is wrong" in said
    plot_verdict(tmp_path / "plot.png", verdict, "a machine")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_verdicts_fill_the_page(tmp_path: Path) -> None:
    """The tool reads folders of searches: what was measured, what is wrong, what spills."""
    wide, wrong = entry("wide", tile_n=96), entry("wrong", tile_n=112)
    spills = dataclasses.replace(entry("", tile_n=128), error="it spills: 8 bytes\nmore words")
    environment = dataclasses.replace(MACHINE, device="Some GPU")
    kept, taken = tmp_path / "kept", tmp_path / "taken"
    for path, ratios in ((kept, (0.9, 0.8)), (taken, (1.1, 1.0))):
        path.mkdir()
        asked = search(wide, wrong, spills)
        found = Folder(path, ["tune"], "sm80", (80,), 3, "sources", [asked])
        found.save()
        found.save_trial("Some GPU", "wrong", "out is wrong")
        rows_ = figures("present", 1.0, 1.0) + figures("wide", *ratios)
        found.save_results(environment, rows_ + figures("wrong", 3.0, 3.0))

    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("wheels"))
    page = tmp_path / "docs" / "tuning.md"
    page.parent.mkdir()
    columns = ("row of the tables", "points", "rows within the ranges", "candidates", "the fastest")
    line = "| `{}` | {} | 9 | of another time | z |"
    other = [line.format("sm80_fwd_bf16_d64", 12), line.format("sm80_bwd_bf16_d64", 2)]
    same = line.format("sm80_fwd_bf16_d64", 2)
    head = f"On Some GPU:\n\n| {' | '.join(columns)} |\n|---|---|---|---|---|\n"
    table = head + "\n".join([*other, same])
    page.write_text(f"<!-- verdicts: x -->\n{table}\n<!-- end -->\n")
    tool = [sys.executable, str(tmp_path / "tools" / "tuned_table.py"), str(kept), str(taken)]
    subprocess.run(tool, check=True)
    written = page.read_text()
    backward, first, second, longer = [x for x in written.splitlines() if x.startswith("| `")]
    assert [longer, backward] == other and written.startswith(f"<!-- verdicts: x -->\n{head}")
    tried = "128 x 96, 1 stage, 4 warps, O1: {}; 128 x 112, 1 stage, 4 warps, O1: out is wrong; "
    tried += "128 x 128, 1 stage, 4 warps, O1: it spills: 8 bytes |"
    start = "| `sm80_fwd_bf16_d64` | 2 | 0 | "
    assert first.startswith(start + tried.format("0.849, 0.800 at worst"))
    assert first.endswith("| the row itself, of 2 |")
    assert second.startswith(start + tried.format("1.049, 1.000 at worst"))
    assert second.endswith("| 128 x 96, 1 stage, 4 warps, O1 is ahead |")
    subprocess.run(tool, check=True)
    assert page.read_text() == written

    page.write_text(written.replace("On Some GPU", "On Another"))
    refused = subprocess.run(tool, capture_output=True, text=True)
    assert refused.returncode == 1 and "a table of another GPU: On Another:" in refused.stderr
    kept.joinpath("results_Some_GPU.json").unlink()
    refused = subprocess.run(tool, capture_output=True, text=True)
    assert refused.returncode == 1 and "has results of 0 GPUs, expected 1" in refused.stderr
