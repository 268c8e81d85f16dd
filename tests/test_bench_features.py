"""`bench features`, and points with ALiBi, dropout, a bias or a sink: who computes what, who is
refused, and how the verdict comes about. All on a CPU."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention import attention_reference
from cute_attention.bench import speed
from cute_attention.bench.commands import CPU as DEFAULTS
from cute_attention.bench.contenders import BASELINE, CONTENDERS, OURS, PEER
from cute_attention.bench.contenders.base import CannotRun
from cute_attention.bench.features import (
    DEFAULT,
    PLAIN,
    Values,
    check_names,
    with_features,
    with_ratios,
)
from cute_attention.bench.features_verdict import lines, markdown, summaries, target
from cute_attention.bench.inputs import Inputs, make_inputs
from cute_attention.bench.options import build_points
from cute_attention.bench.points import FEATURES, Point
from cute_attention.bench.results import Row, read_json
from cute_attention.cli.bench import main, make_parser

CPU = torch.device("cpu")
ALL = "+".join(FEATURES)
POINT = Point(batch=2, heads=4, seqlen_q=24, head_dim=8, dtype="fp32", causal=True)
CASES = {
    "alibi": replace(POINT, alibi=True),
    "alibi-full": replace(POINT, alibi=True, causal=False),
    "alibi-ragged": replace(POINT, alibi=True, seqlen_q=9),
    "sink": replace(POINT, sink=True, heads_kv=2),
    "bias": replace(POINT, bias=True),
    "all": replace(POINT, alibi=True, bias=True, sink=True, softcap=2.0),
}


def formula(point: Point, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Output and gradients in float64."""
    learned = [x.detach().double().requires_grad_() for x in inputs.learned]
    q, k, v, *rest = learned
    bias = rest.pop(0) if point.bias else None
    sink = rest.pop(0) if point.sink else None
    slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.double()
    out = attention_reference(
        q, k, v, causal=point.causal, softcap=point.softcap or None, alibi_slopes=slopes,
        bias=bias, sink=sink,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out, *torch.autograd.grad(out, learned, inputs.grad_out.double())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference", "math", "flex"])
def test_contenders_compute_the_features_they_claim(
    monkeypatch: pytest.MonkeyPatch, name: str, case: str
) -> None:
    """Output and gradients, those of bias and sink too. FlexAttention has no backward on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    point, contender = CASES[case], CONTENDERS[name]
    if contender.lacks(point):
        assert name == "math"
        assert contender.lacks(point) == "scaled_dot_product_attention has " + ", ".join(
            f"no {feature}" for feature in point.features if feature != "bias"
        )
        return
    inputs = make_inputs(point, CPU)
    expected = formula(point, inputs)
    results: tuple[Any, ...]
    with contender.scope():
        call = contender.build(point, inputs)
        results = (call(*inputs.detached),)
        assert not results[0].requires_grad  # a forward alone records nothing for bias and sink
        if name != "flex":
            out = call(*inputs.leaves)
            results = (out, *torch.autograd.grad(out, inputs.learned, inputs.grad_out))
    for result, value in zip(results, expected, strict=name != "flex"):
        torch.testing.assert_close(result.detach().double(), value, atol=2e-5, rtol=2e-5)


def test_dropout_is_compared_by_size() -> None:
    """Results with other bits agree; one without dropout, or not scaled up, is refused."""
    point = replace(POINT, batch=8, seqlen_q=64, seqlen_k=64, dropout=0.5)
    inputs = make_inputs(point, CPU)
    with CONTENDERS["math"].scope():
        out = CONTENDERS["math"].build(point, inputs)(*inputs.detached)
    ours = CONTENDERS["reference"].build(point, inputs)(*inputs.detached)
    assert speed.relative_difference(ours, out) > speed.DISAGREEMENT
    assert speed.size_excess(ours, out) < speed.SIZE_DISAGREEMENT
    whole = CONTENDERS["reference"].build(replace(point, dropout=0.0), inputs)(*inputs.detached)
    assert speed.size_excess(whole, out) > speed.SIZE_DISAGREEMENT
    assert speed.size_excess(0.5 * ours, out) > speed.SIZE_DISAGREEMENT
    with pytest.raises(CannotRun, match="shape"):
        speed.size_excess(ours, out[:1])


def test_points_with_features_are_read_from_their_own_arguments() -> None:
    point = replace(POINT, alibi=True, sink=True, bias=True, dropout=0.1, softcap=30.0)
    args = make_parser().parse_args(["speed", *point.arguments()])
    assert build_points(args, DEFAULTS) == [point]
    assert point.text().endswith("softcap 30 alibi bias sink dropout 0.1")
    assert point.plain() == POINT
    row = Row(point, "reference", OURS, "fwd")
    assert Row.from_dict(row.to_dict()) == row


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("features --features alibi+rope", "--features has 'alibi+rope', expected some of softcap"),
        ("features --features sink+sink", "--features has 'sink+sink'"),
        ("features --dropout 1", "--dropout is 1.0, expected 0 < P < 1"),
        ("features --softcap 0", "--softcap is 0.0, expected a number above 0"),
        ("features --device cpu --contenders math", "--contenders has none of ours"),
        ("speed --device cpu --seqlens 8 --dropout 1.5", "dropout is 1.5, expected 0 <= dropout"),
        ("speed --set cpu --alibi --device cpu", "--alibi cannot change the shapes of a named set"),
        ("speed --lengths 3,4 --bias --device cpu", "a bias is measured on dense calls"),
        ("accuracy --alibi", "unrecognized arguments: --alibi"),
    ],
)
def test_mistakes_are_explained(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(shlex.split(text))
    except SystemExit as exit_:  # argparse refuses it
        code = exit_.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err


def test_names() -> None:
    assert check_names(list(DEFAULT)) == list(DEFAULT)
    assert check_names(["dropout+alibi", "alibi+dropout"]) == ["alibi+dropout"]
    assert check_names(["every", "sink"]) == [ALL, "sink"]
    assert with_features(POINT, ALL, Values()).features == FEATURES
    point = with_features(POINT, "softcap+dropout", Values(softcap=5.0))
    assert point == replace(POINT, softcap=5.0, dropout=0.1)


def test_speed_refuses_by_name(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    shape = "--device cpu --batch 1 --heads 2 --head-dims 8 --seqlens 16 --dtypes fp32"
    options = "--masks causal --direction fwd,bwd --rounds 1 --time-ms 1 --quiet"
    names = "reference,math,plain"
    code = main(shlex.split(f"speed {shape} {options} --alibi --contenders {names} --json {out}"))
    assert code == 0
    for row in read_json(out).rows:
        assert row.point.alibi and "--alibi" in row.command
        reasons = {
            "reference": "",
            "math": "scaled_dot_product_attention has no alibi",
            "plain": "PyTorch, written out has no alibi",
        }
        assert row.reason == reasons[row.contender]


def test_features_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "f.json", tmp_path / "f.md"
    shape = "--device cpu --batch 2 --heads 2 --head-dims 8 --seqlens 32 --dtypes fp32"
    options = "--masks causal --rounds 2 --time-ms 1 --features dropout,sink+alibi"
    names = "reference,math,cudnn"
    command = f"features {shape} {options} --contenders {names} --json {out} --markdown {table}"
    assert main(shlex.split(command)) == 0
    rows = read_json(out).rows
    # Directions; plain, two features of three, and what is left out: a bias, and every feature.
    assert len(rows) == 2 * (1 + 2 * 3 + 2)
    by_key = {(row.what, row.contender, row.case): row for row in rows}
    for what in ("fwd", "bwd"):
        plain = by_key[what, "reference", PLAIN]
        assert not plain.point.features and "to_plain" not in plain.metrics
        for name in ("dropout", "alibi+sink"):
            row = by_key[what, "reference", name]
            ratios = [a / b for a, b in zip(plain.samples, row.samples, strict=True)]
            assert row.metrics["to_plain"] == pytest.approx(sum(ratios) / 2)
        assert by_key[what, "math", "dropout"].metrics["tflops"] > 0
        assert by_key[what, "math", "alibi+sink"].reason.endswith("has no alibi, no sink")
        assert by_key[what, "reference", "bias"].reason.startswith("bias is left out")
        assert by_key[what, "reference", ALL].reason.startswith(f"{ALL} is left out")
    text = capsys.readouterr().out
    assert "not measured: cudnn: needs an NVIDIA GPU" in text
    assert "ours, reference, forward, fp32" in text
    assert table.read_text().count("| alibi+sink |") == 2
    words = shlex.split(by_key["bwd", "math", "dropout"].command)
    assert words[:5] == ["python", "-m", "cute_attention", "bench", "features"]
    args = make_parser().parse_args(words[4:])
    assert args.features == ["dropout"] and args.contenders == "reference,math"


# --- the verdict --------------------------------------------------------------------------------

GPU_POINT = Point(batch=4, heads=16, seqlen_q=4096, head_dim=128)


def row(name: str, contender: str, role: str, *samples: float, what: str = "fwd") -> Row:
    point = GPU_POINT if name == PLAIN else with_features(GPU_POINT, name, Values())
    metrics = {"time_ms": samples[0], "tflops": 100 / samples[0]}
    return Row(point, contender, role, what, name, metrics, samples)


def test_ratios_are_taken_round_by_round() -> None:
    """A clock that halves after the first round changes no ratio."""
    rows = with_ratios(
        [
            row(PLAIN, "sm90", OURS, 1.0, 2.0, 2.0),
            row("alibi", "sm90", OURS, 1.25, 2.5, 2.5),
            row("alibi", "flex", PEER, 2.0, 4.0, 4.0),
        ]
    )
    assert [r.metrics.get("to_plain") for r in rows] == [None, pytest.approx(0.8), None]


@pytest.mark.parametrize(
    ("name", "what", "expected"),
    [
        ("alibi", "fwd", 0.92),
        ("alibi", "bwd", 0.95),
        ("dropout", "fwd", 0.80),
        ("softcap", "bwd", 0.85),
        ("alibi+sink", "fwd", 0.92),  # a sink has no price of its own
        ("sink", "fwd", None),
        ("alibi+dropout", "fwd", 0.55),
        ("softcap+alibi+bias+sink+dropout", "bwd", None),  # this bias is larger than the L2 cache
        ("alibi", "fwdbwd", None),
    ],
)
def test_targets(name: str, what: str, expected: float | None) -> None:
    point = with_features(GPU_POINT, name, Values())
    assert target(point, "sm90", what) == expected
    assert target(point, "reference", what) is None
    small = replace(point, seqlen_q=512, seqlen_k=512)
    if point.bias:
        assert target(small, "sm90", what) == 0.60
        assert target(with_features(small.plain(), "bias", Values()), "sm90", what) == 0.80


def test_verdict() -> None:
    rows = with_ratios(
        [
            row(PLAIN, "sm90", OURS, 1.0),
            row("alibi", "sm90", OURS, 1.05),
            row("alibi", "flex", PEER, 1.5),
            row("dropout", "sm90", OURS, 1.5),
            row("dropout", "flash", PEER, 1.2),
            row("dropout", "efficient", PEER, 2.0),
            row("dropout", "math", BASELINE, 0.1),  # a baseline is shown but not compared with
            row("sink", "sm90", OURS, 1.0),
        ]
    )
    found = {line.ours.case: line for line in lines(rows)}
    assert {name: line.verdict for name, line in found.items()} == {
        "plain": "",
        "alibi": "PASS",
        "dropout": "SHORT",
        "sink": "",
    }
    assert found["alibi"].ahead == pytest.approx(1.5 / 1.05)
    assert found["dropout"].ahead == pytest.approx(1.2 / 1.5)
    said = [(passes, text.split(" (")[0]) for passes, text in summaries(rows)]
    who = "ours, sm90, forward"
    reach, ahead = "points reach their target; worst", "ahead of every peer at"
    assert said == [
        (True, f"PASS: {who}, alibi: 1 of 1 {reach} 0.95 for 0.92"),
        (True, f"PASS: {who}, alibi: {ahead} 1 of 1 points; worst 1.43x FlexAttention"),
        (False, f"SHORT: {who}, dropout: 0 of 1 {reach} 0.67 for 0.80"),
        (False, f"SHORT: {who}, dropout: {ahead} 0 of 1 points; worst 0.80x FLASH"),
    ]
    table = markdown(rows).splitlines()
    cells = next(line for line in table if "| dropout |" in line).strip("| ").split(" | ")
    assert cells[4:9] == ["dropout", "66.7", "0.67", "0.80", "SHORT"]
    assert cells[-1] == "0.80x"
    assert table[-1].startswith("- SHORT: ours, sm90, forward, dropout: ahead of every peer at 0")
