"""The benchmark's contenders compute attention, and are judged by the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import accuracy, accuracy_verdict
from cute_attention.bench.contenders import BASELINE, CONTENDERS, OURS, PEER, select
from cute_attention.bench.contenders.base import CannotRun, reason_for
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.points import (
    Bounds,
    Point,
    lengths_point,
)
from cute_attention.bench.results import Row
from cute_attention.bench.speed import relative_difference
from cute_attention.bench.steps import Deadline, attempt

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=4, seqlen_q=32, head_dim=8, dtype="fp32")

CASES = {
    "full": POINT,
    "causal": replace(POINT, causal=True),
    "ragged": replace(POINT, causal=True, seqlen_q=24),
    "window": replace(POINT, window=Bounds(5, 2)),
    "gqa": replace(POINT, heads_kv=2, causal=True),
    "dims": replace(POINT, head_dim=16, head_dim_v=8),
    "softcap": replace(POINT, softcap=2.0),
    "packed": lengths_point((7, 1, 24), heads=4, head_dim=8, causal=True, dtype="fp32"),
    "packed-window": lengths_point(
        (7, 24), heads=4, heads_kv=2, head_dim=8, window=Bounds(3, 1), dtype="fp32"
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["plain", "math", "flash", "reference", "by_fa2", "by_fa3"])
def test_contenders_compute_attention(name: str, case: str) -> None:
    """Compares output and gradients with float64, so that no contender is timed for something
    else."""
    point, contender = CASES[case], CONTENDERS[name]
    if contender.lacks(point) or contender.refuses(point, "fwd"):
        assert name in ("math", "flash")
        assert point.softcap or point.window
        return
    if name == "flash" and case == "dims":  # what PyTorch's kernel does not take
        inputs = make_inputs(point, CPU)
        with contender.scope():
            value, reason = attempt(contender.build(point, inputs), *inputs.detached)
        assert value is None
        assert "Flash attention requires" in reason
        return
    inputs = make_inputs(point, CPU)
    expected = accuracy.truth(point, inputs)
    with contender.scope():
        if name == "flash" and point.varlen:
            with pytest.raises(CannotRun, match="GPU"):
                contender.build(point, inputs)
            return
        out = contender.build(point, inputs)(*inputs.leaves)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.grad_out)
    for result, key in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
        assert result.shape == expected[key].shape
        assert accuracy.errors(result, expected[key])["rms_error"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_flex_computes_attention(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Without compilation FlexAttention has the same mask, layouts and LSE."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    point = CASES[case]
    inputs = make_inputs(point, CPU)
    expected = accuracy.truth(point, inputs)
    out = CONTENDERS["flex"].build(point, inputs)(*inputs.detached)
    assert accuracy.errors(out, expected["out"])["rms_error"] < 1e-5
    out, lse = CONTENDERS["flex"].build_with_lse(point, inputs)(*inputs.detached)
    assert accuracy.errors(out, expected["out"])["rms_error"] < 1e-5
    assert accuracy.errors(lse, expected["lse"])["max_error"] < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["plain", "reference"])
def test_lse_of_contenders(name: str, case: str) -> None:
    point = CASES[case]
    inputs = make_inputs(point, CPU)
    _, lse = CONTENDERS[name].build_with_lse(point, inputs)(*inputs.detached)
    expected = accuracy.truth(point, inputs)["lse"]
    assert accuracy.errors(lse, expected)["max_error"] < 1e-6


@pytest.mark.parametrize("name", ["math", "flash"])
def test_native_calls_take_their_own_layout(name: str) -> None:
    point = CASES["gqa"]
    inputs = make_inputs(point, CPU)
    with CONTENDERS[name].scope():
        native, turned = CONTENDERS[name].native(point, inputs)
        expected = CONTENDERS[name].build(point, inputs)(*inputs.detached)
        assert torch.equal(native(*turned.leaves).transpose(1, 2), expected)
    assert turned.q.shape == (2, 4, 32, 8)
    assert turned.q.is_leaf and turned.q.requires_grad


def test_who_is_absent_says_why() -> None:
    for name in ("sm90", "sm80", "fa2", "fa3", "fa4", "xformers", "cudnn", "efficient"):
        assert CONTENDERS[name].missing(CPU) == "needs an NVIDIA GPU"
    for name in ("reference", "plain", "math", "flash"):
        assert CONTENDERS[name].missing(CPU) is None


def test_selection() -> None:
    assert [c.name for c in select("plain, reference,plain", CPU)] == ["plain", "reference"]
    assert [c.name for c in select("all", CPU)] == list(CONTENDERS)
    assert "flex" not in [c.name for c in select(None, CPU)]
    assert "reference" not in [c.name for c in select(None, torch.device("cuda"))]
    with pytest.raises(ValueError, match="'fa9'"):
        select("plain,fa9", CPU)


def test_reasons_are_one_line() -> None:
    assert reason_for(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"
    assert reason_for(ValueError("first\nsecond")) == "ValueError: first"
    assert reason_for(CannotRun("takes no window")) == "takes no window"
    assert len(reason_for(RuntimeError("x" * 1000))) == 240


def test_disagreement_is_measured() -> None:
    a = torch.ones(10)
    assert relative_difference(a, a) == 0.0
    assert relative_difference((a, 1.1 * a), (a, a)) == pytest.approx(0.1, rel=1e-5)
    with pytest.raises(CannotRun, match="shape"):
        relative_difference(a, a[:5])


def errors_row(
    contender: str,
    role: str,
    rms: float,
    largest: float,
    what: str = "out",
    samples: tuple[float, ...] = (),
) -> Row:
    metrics = {"rms_error": rms, "max_error": largest}
    largest_of_each = tuple(largest for _ in samples)
    return Row(POINT, contender, role, what, "normal", metrics, samples, largest_of_each)


@pytest.mark.parametrize(
    ("rms", "largest", "broken"),
    [
        (1.0, 1.0, ""),
        (1.05, 1.09, ""),
        (1.2, 1.0, "rms error 1.20x FLASH (SDPA)'s"),
        (0.9, 1.2, "largest error 1.20x FLASH (SDPA)'s"),
        (8.4, 1.0, "rms error 2.10x plain PyTorch's; rms error 8.40x FLASH (SDPA)'s"),
        (
            1.0,
            9.0,
            "largest error 2.25x plain PyTorch's; largest error 9.00x FLASH (SDPA)'s",
        ),
    ],
)
def test_verdict(rms: float, largest: float, broken: str) -> None:
    rows = [
        errors_row("reference", OURS, rms, largest),
        errors_row("plain", BASELINE, 4.0, 4.0),
        errors_row("flash", PEER, 1.0, 1.0),
        errors_row("cudnn", PEER, 3.0, 3.0),
        errors_row("efficient", PEER, 0.1, 0.1),  # only FLASH and cuDNN count
        errors_row("math", BASELINE, 0.1, 0.1),  # computes in a wider dtype, and is no peer
    ]
    (verdict,) = accuracy_verdict.verdicts(rows)
    assert verdict.broken == broken
    assert verdict.to_peer["rms"].peer == "flash"
    assert verdict.to_plain == pytest.approx(rms / 4)


@pytest.mark.parametrize(
    ("ours", "peer", "mean", "error", "passes"),
    [
        # Draws that agree have a standard error of 0.
        ((1.2, 1.2, 1.2, 1.2), (1.0, 1.0, 1.0, 1.0), 1.2, 0.0, False),
        # The ratio is computed for each draw, so errors that both have in common do not matter.
        ((1.2, 2.4, 4.8, 9.6), (1.0, 2.0, 4.0, 8.0), 1.2, 0.0, False),
        # Four draws, 0.2 apart, have a standard error of 0.058. Twice that reaches from 1.10 to
        # 1.20.
        ((1.1, 1.3, 1.1, 1.3), (1.0, 1.0, 1.0, 1.0), 1.2, 0.0577, True),
        # With 16 such draws the standard error is small enough for a verdict.
        ((1.1, 1.3) * 8, (1.0,) * 16, 1.2, 0.0258, False),
        # One draw has no standard error.
        ((1.2,), (1.0,), 1.2, 0.0, False),
    ],
)
def test_the_slack_is_what_the_draws_leave_open(
    ours: tuple[float, ...], peer: tuple[float, ...], mean: float, error: float, passes: bool
) -> None:
    rows = [
        errors_row("sm90", OURS, sum(ours) / len(ours), 1.0, samples=ours),
        errors_row("cudnn", PEER, sum(peer) / len(peer), 1.0, samples=peer),
    ]
    (verdict,) = accuracy_verdict.verdicts(rows)
    assert verdict.to_peer["rms"].mean == pytest.approx(mean)
    assert verdict.to_peer["rms"].error == pytest.approx(error, abs=1e-4)
    assert (verdict.broken == "") == passes


def test_draws_differ_and_errors_are_shares_of_rounding() -> None:
    """The reference computes in fp32 and rounds once, so its output has only the error of
    rounding."""
    point = replace(POINT, dtype="bf16")
    found: list[Row] = []
    accuracy.measure(
        [point], [CONTENDERS["reference"]], ["q-x3"], CPU, Deadline(None), found.extend, draws=3
    )
    by_tensor = {row.what: row for row in found}
    out = by_tensor["out"]
    assert len(set(out.samples)) == 3 and len(set(out.max_samples)) > 1
    assert out.metrics["rms_error"] == pytest.approx(sum(out.samples) / 3)
    assert out.metrics["rms_share"] == pytest.approx(1, rel=0.01)
    assert out.metrics["max_share"] == pytest.approx(1, rel=0.01)
    assert "rms_share" not in by_tensor["lse"].metrics


def test_errors_are_relative_and_refuse_nan() -> None:
    truth = torch.tensor([3.0, -4.0, float("-inf")], dtype=torch.float64)
    result = torch.tensor([3.3, -4.4, float("-inf")])
    found = accuracy.errors(result, truth)
    assert found["rms_error"] == pytest.approx(0.1, rel=1e-5)
    assert found["max_error"] == pytest.approx(0.1, rel=1e-5)
    with pytest.raises(ValueError, match="not a number"):
        accuracy.errors(torch.tensor([float("nan"), -4.0, float("-inf")]), truth)


@pytest.mark.parametrize(
    ("distribution", "low", "high"),
    [
        ("normal", 3, 6),
        ("q-x3", 9, 18),
        ("q-x10", 30, 60),
        ("large-logit", 14, 24),
        ("outlier", 10, 60),
    ],
)
def test_inputs_have_the_stated_distribution(distribution: str, low: float, high: float) -> None:
    point = replace(POINT, seqlen_q=256, seqlen_k=256)
    q = make_inputs(point, CPU, distribution).q.detach()
    assert low < float(q.abs().max()) < high
    assert torch.equal(q, make_inputs(point, CPU, distribution).q)
