"""`bench robustness`: what it measures on a CPU, and its verdicts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import robustness
from cute_attention.bench.adversarial import ADVERSARIAL, select
from cute_attention.bench.contenders import CONTENDERS, OURS, PEER
from cute_attention.bench.limits import Limits
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row, read_json
from cute_attention.bench.robustness import FAILED, Robustness, Settings
from cute_attention.bench.robustness_verdict import lines
from cute_attention.bench.steps import Deadline
from cute_attention.cli.bench import main

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=2, seqlen_q=96, head_dim=16, dtype="bf16", causal=True)
TINY = "robustness --device cpu --batch 2 --heads 2 --head-dims 16 --seqlens 96"
FAST = "--rounds 2 --time-ms 1"


def run(text: str) -> int:
    return main(shlex.split(text))


def test_rows_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    names = "reference,flash,plain,sm90"
    code = run(f"{TINY} {FAST} --inputs sink,hidden_inf_first --contenders {names} --json {out}")
    rows = read_json(out).rows
    text = capsys.readouterr().out
    assert code == 0
    assert "PASS: ours, reference, fwd: 16 lines keep the rule" in text
    assert "PASS: ours, reference, bwd: 16 lines keep the rule" in text
    ours = [row for row in rows if row.contender == "reference"]
    assert len(ours) == 2 * 2 * 4 * 7  # dtypes, masks, inputs, tensors and times
    for row in ours:
        assert row.reason == ""
        if row.what in ("fwd", "bwd"):
            assert row.metrics["time_ms"] > 0 and len(row.samples) == 2
        else:
            assert row.metrics["roundings"] < (20 if row.what == "lse" else 1)
    assert {row.what for row in rows if row.contender == "flash"} == {"out", "dq", "dk", "dv"}
    absent = [row for row in rows if row.contender == "sm90"]
    assert absent and {row.reason for row in absent} == {"needs an NVIDIA GPU"}


def test_a_printed_command_measures_the_row_again(tmp_path: Path) -> None:
    first, again = tmp_path / "1.json", tmp_path / "2.json"
    options = "--contenders reference --quiet"
    run(f"{TINY} {FAST} {options} --inputs slope_left --masks full --dtypes fp16 --json {first}")
    row = read_json(first).rows[0]
    words = [*shlex.split(row.command)[4:], *shlex.split(f"{options} {FAST} --json {again}")]
    assert main(words) == 0
    repeated = read_json(again).rows
    assert [r.what for r in repeated] == ["out", "lse", "fwd"]
    assert repeated[0] == row


def test_inputs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("robustness --list") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ADVERSARIAL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--inputs nothing", "no input is named 'nothing': choose from all, the groups random"),
        ("--dtypes fp32", "measures fp16 and bf16, not fp32"),
        ("--window 5,0", "dense calls without a window"),
    ],
)
def test_mistakes_are_explained(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{TINY} {options}") == 2
    assert message in capsys.readouterr().err


def test_a_time_limit_leaves_rows(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    assert run(f"{TINY} --contenders reference --limit-s 0 --json {out} --quiet") == 0
    rows = read_json(out).rows
    inputs = sum(len(select(["all"], dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert len(rows) == 2 * inputs * 7
    assert {row.reason for row in rows} == {"not reached within the limit of 0 s"}


def test_times_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Normal inputs and these take turns, and the ratio is that of two times of the same round."""
    calls: list[float] = []

    class Clock:
        def plan(self, step: object) -> object:
            step()  # type: ignore[operator]
            return None

        def sample(self, step: object, plan: object) -> list[float]:
            calls.append(float(step().float().mean()))  # type: ignore[operator]
            return [2.0 * len(calls)]

    monkeypatch.setattr(robustness, "make_timer", lambda device, time_ms: Clock())
    settings = Settings(CPU, [CONTENDERS["reference"]], ["sink_left"], ["fwd"], rounds=3)
    rows: list[Row] = []
    Robustness(settings, Deadline(None)).measure([POINT], rows.extend)
    (row,) = [row for row in rows if row.what == "fwd"]
    normal, sink = calls[0], calls[1]
    assert calls == [normal, sink, sink, normal, normal, sink] and normal != sink
    assert row.samples == (4 / 2, 6 / 8, 12 / 10)
    assert row.metrics["time_ratio"] == 1.2


# --- verdicts ------------------------------------------------------------------------------------


def error_row(contender: str, what: str = "out", role: str = OURS, **metrics: float) -> Row:
    usual = {"rms_error": 1e-3, "rms_roundings": 0.2, "roundings": 0.5, "stored_lse": 0.0}
    return Row(POINT, contender, role, what, "sink_left", {**usual, **metrics})


def time_row(contender: str, ratio: float, what: str = "fwd") -> Row:
    return Row(POINT, contender, OURS, what, "sink_left", {"time_ratio": ratio, "time_ms": 1.0})


FLASH, CUDNN = error_row("flash", role=PEER), error_row("cudnn", role=PEER, rms_error=2e-3)
LOST = Row(POINT, "cudnn", PEER, "out", "sink_left", {"not_finite": 5.0})


@pytest.mark.parametrize(
    ("rows", "broken"),
    [
        ([time_row("sm90", 1.14), error_row("sm90", rms_error=1.09e-3), FLASH, CUDNN], ()),
        ([time_row("sm90", 1.2)], ("1.20x the time of normal inputs, allowed 1.15x",)),
        ([time_row("sm80", 1.2)], ()),
        ([time_row("auto", 1.2, "bwd")], ("1.20x the time of normal inputs, allowed 1.15x",)),
        ([time_row("reference", 9.0)], ()),
        (
            [error_row("sm90", rms_error=1.2e-3), CUDNN, FLASH],
            ("rms error of out 1.20x FLASH (SDPA)'s",),
        ),
        ([error_row("sm90", rms_error=1.9e-3), LOST], ()),
        ([error_row("sm90", rms_error=1.9e-3), CUDNN, LOST], ()),
        ([error_row("sm90", rms_error=9.0, rms_roundings=0.009), FLASH], ()),
        (
            [
                error_row("sm90", "dv", stored_lse=2e-3),
                error_row("flash", "dv", PEER, rms_error=1e-4),
            ],
            (),
        ),
        (
            [error_row("sm90", roundings=3.5), CUDNN],
            ("out is off by 3.5 roundings, allowed 3",),
        ),
        (
            [Row(POINT, "sm90", OURS, "dq", "sink_left", {"not_finite": 16.0})],
            ("16 values of dq are not finite",),
        ),
        (
            [Row(POINT, "sm90", OURS, "dq", "sink_left", reason=FAILED + "launch")],
            ("dq failed: launch",),
        ),
    ],
)  # fmt: skip
def test_the_rule(rows: list[Row], broken: tuple[str, ...]) -> None:
    (line,) = lines(rows, Limits())
    assert line.broken == broken


def test_what_was_not_measured_is_not_judged() -> None:
    rows = [Row(POINT, "sm90", OURS, "out", "sink_left", reason="needs an NVIDIA GPU"), FLASH]
    assert lines(rows, Limits()) == []


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda out: out.index_fill(1, torch.tensor([40]), 0.0), "out is off by"),
        (lambda out: out.index_fill(1, torch.tensor([40]), float("nan")), "are not finite"),
        (lambda out: out * 1.05, "rms error of out"),
    ],
    ids=["a row erased", "a row of NaN", "5 % too large"],
)
def test_wrong_results_fail(spoil, text: str) -> None:  # type: ignore[no-untyped-def]
    reference = CONTENDERS["reference"]
    good = type(reference).build_with_lse

    class Wrong(type(reference)):  # type: ignore[misc]
        def build_with_lse(self, point, inputs):  # type: ignore[no-untyped-def]
            def call(*leaves):  # type: ignore[no-untyped-def]
                out, lse = good(self, point, inputs)(*leaves)
                return spoil(out), lse

            return call

    contenders = [Wrong(), CONTENDERS["flash"]]
    settings = Settings(CPU, contenders, ["random_x3"], ["fwd"], rounds=1, time_ms=1)
    rows: list[Row] = []
    Robustness(settings, Deadline(None)).measure([POINT], rows.extend)
    (line,) = lines(rows, Limits())
    assert text in "; ".join(line.broken)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Every contender that serves is measured; auto's forward is sm90's where there is one."""
    out = tmp_path / "r.json"
    shapes = "--batch 2 --heads 4 --head-dims 64 --seqlens 300 --dtypes bf16"
    run(f"robustness {shapes} {FAST} --inputs random_x3,slope_left --json {out} --quiet")
    rows = read_json(out).rows
    assert not [row for row in rows if row.reason.startswith(FAILED) and row.role == OURS]
    measured = {(row.contender, row.what) for row in rows if row.metrics}
    assert {("flash", "out"), ("flash", "dq"), ("cudnn", "out")} <= measured
    names = {row.contender for row in rows}
    if any(name == "sm90" and what == "fwd" for name, what in measured):
        assert ("auto", "fwd") not in measured and ("auto", "bwd") in measured
    assert {"sm90", "sm80", "auto"} <= names
