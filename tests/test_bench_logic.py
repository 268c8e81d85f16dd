"""The benchmark's own logic: FLOPs, points, medians, ratios, files, verdicts; never a timing."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import accuracy, compare, growth, memory_curve, ratios, results
from cute_attention.bench.against import SUFFIX, joining, read_recorded
from cute_attention.bench.contenders import BASELINE, CONTENDERS, OURS, PEER, select
from cute_attention.bench.contenders.base import CannotRun, reason_for
from cute_attention.bench.contenders.plain import visible
from cute_attention.bench.flops import counted_pairs, flops, visible_pairs
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.machine import describe, flops_per_sm_and_clock
from cute_attention.bench.memory import peak_bytes
from cute_attention.bench.points import (
    SETS,
    Bounds,
    Grid,
    Point,
    lengths_point,
    named_set,
    pack_documents,
    packed_point,
)
from cute_attention.bench.results import Results, Row
from cute_attention.bench.speed import relative_difference
from cute_attention.bench.steps import attempt
from cute_attention.bench.tables import number
from cute_attention.bench.timing import median, repeats_for, spread, turns

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=4, seqlen_q=32, head_dim=8, dtype="fp32")


def row(contender: str, tflops: float, role: str, point: Point = POINT, what: str = "fwd") -> Row:
    time_ms = flops(point, what) / tflops / 1e9
    return Row(point, contender, role, what, metrics={"tflops": tflops, "time_ms": time_ms})


# --- FLOPs --------------------------------------------------------------------------------------

BOUNDS = [Bounds(left, right) for left in (None, 0, 1, 3, 50) for right in (None, 0, 2, 50)]


@pytest.mark.parametrize("seqlens", [(1, 1), (7, 7), (5, 9), (9, 5), (1, 12), (12, 1)])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_visible_pairs_equals_the_mask_counted(seqlens: tuple[int, int], bounds: Bounds) -> None:
    mask = visible(*seqlens, bounds, CPU)
    expected = seqlens[0] * seqlens[1] if mask is None else int(mask.sum())
    assert visible_pairs(*seqlens, bounds) == expected


def test_mask_is_bottom_right_aligned() -> None:
    mask = visible(2, 3, Bounds(None, 0), CPU)
    assert mask is not None
    assert mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("contender", ["plain", "math", "reference"])
def test_forward_flops_equal_those_torch_counts(contender: str) -> None:
    point = replace(POINT, head_dim_v=16)
    inputs = make_inputs(point, CPU)
    call = CONTENDERS[contender].build(point, inputs)
    with CONTENDERS[contender].scope(), FlopCounterMode(display=False) as counter:
        call(*inputs.detached)
    assert counter.get_total_flops() == flops(point, "fwd")


def test_backward_flops_equal_torchs_formula() -> None:
    point = replace(POINT, head_dim_v=16)
    q, k, v = ((2, 4, 32, dim) for dim in (8, 8, 16))
    assert flops(point, "bwd") == sdpa_backward_flop_count(v, q, k, v)


def test_flops_follow_the_papers_conventions() -> None:
    point = Point(batch=4, heads=16, seqlen_q=4096, head_dim=128)
    assert flops(point, "fwd") == 4 * 4 * 16 * 4096**2 * 128
    assert flops(point, "bwd") == 2.5 * flops(point, "fwd")
    assert flops(point, "fwdbwd") == 3.5 * flops(point, "fwd")
    assert flops(replace(point, causal=True), "bwd") == 0.5 * flops(point, "bwd")


def test_documents_count_by_themselves() -> None:
    packed = lengths_point((3, 5, 8), heads=2, head_dim=4, causal=True)
    assert counted_pairs(packed) == (9 + 25 + 64) / 2
    window = replace(packed, window=Bounds(1, None))
    assert counted_pairs(window) == (2 * 3 - 1) + (2 * 5 - 1) + (2 * 8 - 1)


# --- points -------------------------------------------------------------------------------------


def test_paper_grid() -> None:
    points = named_set("paper")
    assert len(points) == len(set(points)) == 36
    assert {p.batch * p.seqlen_q for p in points} == {16384}
    assert {p.heads * p.head_dim for p in points} == {2048}
    assert {(p.head_dim, p.mask) for p in points} == {
        (d, mask) for d in (64, 128, 256) for mask in ("full", "causal")
    }


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_distinct_points(name: str) -> None:
    points = [point.key() for point in named_set(name)]
    assert len(points) == len(set(points)) > 0


def test_gqa_set_has_the_models_head_dims() -> None:
    deepseek = [p for p in named_set("gqa") if p.label == "DeepSeek-V3"]
    assert {(p.heads, p.heads_kv, p.head_dim, p.head_dim_v) for p in deepseek} == {
        (128, 128, 192, 128)
    }
    llama = next(p for p in named_set("gqa") if p.label == "Llama 3 8B")
    assert (llama.heads, llama.heads_kv) == (32, 8)


@pytest.mark.parametrize("mean", [64, 512, 2048])
def test_packed_documents_are_reproducible_and_exponential(mean: int) -> None:
    lengths = pack_documents(200 * mean, mean, seed=1)
    assert lengths == pack_documents(200 * mean, mean, seed=1)
    assert lengths != pack_documents(200 * mean, mean, seed=2)
    assert sum(lengths) == 200 * mean
    assert min(lengths[:-1]) >= 16
    assert 0.7 * mean < sum(lengths) / len(lengths) < 1.5 * mean
    shorter = sum(n < mean for n in lengths) / len(lengths)
    assert 0.5 < shorter < 0.75  # 1 - 1/e = 0.63 of an exponential lies below its mean


def test_packed_documents_stay_the_same_between_versions() -> None:
    assert pack_documents(1000, 200, seed=0) == (372, 284, 109, 60, 143, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 3, "heads_kv": 2},
        {"dtype": "fp8"},
        {"batch": 0},
        {"lengths": (3, 4)},
    ],
    ids=str,
)
def test_impossible_points_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(POINT, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "mask"),
    [
        ({}, "full"),
        ({"causal": True}, "causal"),
        ({"window": Bounds(None, 0)}, "causal"),
        ({"window": Bounds(4, None)}, "window 4,inf"),
        ({"window": Bounds(4, 7), "causal": True}, "window 4,0"),
    ],
    ids=str,
)
def test_mask_folds_causal_into_the_window(kwargs: dict[str, object], mask: str) -> None:
    assert replace(POINT, **kwargs).mask == mask  # type: ignore[arg-type]


def test_grid_fits_tokens_and_hidden() -> None:
    points = Grid((32, 64), ("full",), (64, 4096), tokens=1024, hidden=128).points()
    assert [(p.batch, p.heads) for p in points] == [(16, 4), (1, 4), (16, 2), (1, 2)]


# --- arithmetic ---------------------------------------------------------------------------------


def test_medians_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([5.0]) == 0.0


@pytest.mark.parametrize(
    ("one_ms", "time_ms", "repeats"), [(1, 100, 100), (300, 100, 1), (1e-9, 100, 1000)]
)
def test_repeats_fit_the_time(one_ms: float, time_ms: float, repeats: int) -> None:
    assert repeats_for(one_ms, time_ms) == repeats


def test_every_contender_takes_every_turn() -> None:
    orders = [turns(3, i) for i in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_ratios_are_against_the_best_peer_of_each_point() -> None:
    other = replace(POINT, seqlen_q=64, seqlen_k=64)
    rows = [
        row("sm90", 300, OURS),
        row("flash", 100, PEER),
        row("cudnn", 200, PEER),
        row("math", 900, BASELINE),
        row("sm90", 50, OURS, other),
        row("flash", 100, PEER, other),
        row("sm80", 10, OURS, replace(POINT, batch=1)),  # no peer there: no ratio
    ]
    (summary,) = ratios.summaries(rows)
    assert summary.contender == "sm90"
    assert summary.geomean == pytest.approx((1.5 * 0.5) ** 0.5)
    assert summary.worst.point == other
    assert summary.worst.ratio == pytest.approx(0.5)
    assert summary.worst.peer.contender == "flash"
    assert (summary.ahead, summary.count) == (1, 2)


def test_ratios_leave_out_what_was_not_measured() -> None:
    rows = [row("sm90", 300, OURS), Row(POINT, "cudnn", PEER, "fwd", reason="out of memory")]
    assert ratios.summaries(rows) == []


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_growth_exponent(power: float) -> None:
    values = [(n, 3.0 * n**power) for n in (128, 256, 512)]
    assert growth.exponent(values) == pytest.approx(power)
    assert growth.exponent(values[:1]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (9.996, "10.0"), (612.4, "612"), (12345.0, "12,300")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_quadratic_memory_of_ours_is_found() -> None:
    def curve(contender: str, role: str, power: float) -> list[Row]:
        return [
            Row(
                replace(POINT, seqlen_q=n, seqlen_k=n),
                contender,
                role,
                "fwd",
                metrics={"memory_mib": float(n) ** power},
            )
            for n in (256, 512)
        ]

    rows = curve("reference", OURS, 2.0) + curve("plain", BASELINE, 2.0) + curve("sm80", OURS, 1.0)
    assert memory_curve.nonlinear(rows) == {("reference", "fwd"): pytest.approx(2.0)}


def test_peak_memory_counts_what_is_alive_together() -> None:
    def step() -> torch.Tensor:
        a = torch.ones(1 << 18)  # 1 MiB
        b = a + 1
        del a
        return b + 1

    assert peak_bytes(step, CPU) == pytest.approx(2 << 20, abs=256)  # and scalars


@pytest.mark.parametrize(
    ("capability", "name", "rate"),
    [
        ((9, 0), "NVIDIA H200", 4096),
        ((8, 0), "NVIDIA A100", 2048),
        ((8, 9), "NVIDIA GeForce RTX 4090", 512),
        ((7, 5), "Tesla T4", None),
    ],
)
def test_rate_of_tensor_cores(capability: tuple[int, int], name: str, rate: int | None) -> None:
    assert flops_per_sm_and_clock(capability, name) == rate


# --- contenders ---------------------------------------------------------------------------------

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
@pytest.mark.parametrize("name", ["plain", "math", "flash", "reference"])
def test_contenders_compute_attention(name: str, case: str) -> None:
    """Output and gradients against float64: no one is timed doing something else."""
    point, contender = CASES[case], CONTENDERS[name]
    if contender.refuses(point, "fwd"):
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


# --- accuracy -----------------------------------------------------------------------------------


def errors_row(contender: str, role: str, rms: float, largest: float, what: str = "out") -> Row:
    metrics = {"rms_error": rms, "max_error": largest}
    return Row(POINT, contender, role, what, "normal", metrics)


@pytest.mark.parametrize(
    ("rms", "largest", "broken"),
    [
        (1.0, 1.0, ""),
        (1.05, 2.0, ""),
        (1.2, 1.0, "rms error 1.20x the best peer's"),
        (1.0, 9.0, "largest error 2.25x plain PyTorch's"),
        (8.4, 1.0, "rms error 2.10x plain PyTorch's; rms error 8.40x the best peer's"),
    ],
)
def test_verdict(rms: float, largest: float, broken: str) -> None:
    rows = [
        errors_row("reference", OURS, rms, largest),
        errors_row("plain", BASELINE, 4.0, 4.0),
        errors_row("flash", PEER, 1.0, 1.0),
        errors_row("cudnn", PEER, 3.0, 3.0),
        errors_row("math", BASELINE, 0.1, 0.1),  # upcasts: no peer
    ]
    (verdict,) = accuracy.verdicts(rows)
    assert verdict.broken == broken
    assert verdict.peer == "flash"
    assert verdict.to_plain == pytest.approx(rms / 4)


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
    [("normal", 3, 6), ("large-logit", 14, 24), ("outlier", 10, 60)],
)
def test_inputs_have_the_stated_distribution(distribution: str, low: float, high: float) -> None:
    point = replace(POINT, seqlen_q=256, seqlen_k=256)
    q = make_inputs(point, CPU, distribution).q.detach()
    assert low < float(q.abs().max()) < high
    assert torch.equal(q, make_inputs(point, CPU, distribution).q)


# --- files --------------------------------------------------------------------------------------


def some_rows() -> list[Row]:
    packed = packed_point("100:30:7", heads=2, head_dim=8, causal=True, label="docs")
    window = replace(POINT, window=Bounds(3, None), softcap=2.5, deterministic=True)
    return [
        replace(row("reference", 2.0, OURS, packed), samples=(1.0, 2.0), command="python -m x"),
        replace(row("flash", 3.0, PEER, window), case="normal"),
        Row(POINT, "cudnn", PEER, "bwd", reason="needs an NVIDIA GPU, of course"),
    ]


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    environment = describe(CPU)
    results.write_json(path, "speed", environment, some_rows())
    read = results.read_json(path)
    assert read.rows == some_rows()
    assert read.kind == "speed"
    assert read.environment == json.loads(json.dumps(environment.to_dict()))
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


def test_json_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="no result file"):
        results.read_json(path)


def test_csv_has_one_line_per_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    results.write_csv(path, describe(CPU), some_rows())
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == ["reference", "flash", "cudnn"]
    assert float(lines[0]["tflops"]) == 2.0
    assert lines[0]["samples"] == "1.0 2.0"
    assert sum(map(int, lines[0]["lengths"].split())) == 100
    assert lines[1]["window"] == "3 None"
    assert (lines[2]["tflops"], lines[2]["reason"]) == ("", "needs an NVIDIA GPU, of course")
    assert lines[2]["torch"] == torch.__version__


PAPER = Point(batch=4, heads=16, seqlen_q=4096, head_dim=128, causal=True)


@pytest.mark.parametrize(
    "record",
    [
        {
            "head_dim": 128,
            "mask": "causal",
            "seqlen": 4096,
            "direction": "fwd",
            "contender": "fa3",
            "tflops": 688.0,
        },
        {"d": 128, "causal": True, "s": 4096, "fa3:fwd": 688.0},
        {"head_dim": 128, "mask": "causal", "seqlen_q": 4096, "batch": 4, "fa3:fwd": 688},
    ],
    ids=["long", "wide", "with-batch"],
)
def test_recorded_figures_join_their_point(tmp_path: Path, record: dict[str, object]) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps([record]))
    recorded = read_recorded(path)
    assert recorded == [row("fa3" + SUFFIX, 688.0, PEER, PAPER)]
    measured = [row("sm90", 700.0, OURS, replace(PAPER, label="named"))]
    (joined,) = joining(recorded, measured)
    assert joined.point.label == "named"
    (summary,) = ratios.summaries([*measured, joined])
    assert summary.geomean == pytest.approx(700 / 688)
    assert joining(recorded, [row("sm90", 1.0, OURS, PAPER, "bwd")]) == []


def test_result_files_serve_as_recorded_figures(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    results.write_json(path, "speed", describe(CPU), some_rows())
    assert [(r.contender, r.role) for r in read_recorded(path)] == [
        ("reference" + SUFFIX, PEER),
        ("flash" + SUFFIX, PEER),
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"seqlen": 4096},
        {"d": 128, "s": 4096, "causal": True},
        {"d": 128, "s": 4096, "mask": "windowed", "fa3:fwd": 1.0},
        {"d": 128, "s": 4096, "mask": "full", "fa3:sideways": 1.0},
        "text",
    ],
    ids=str,
)
def test_unreadable_records_are_named(tmp_path: Path, record: object) -> None:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(ValueError, match=r"record 0 cannot be read|no figure"):
        read_recorded(path)


# --- compare ------------------------------------------------------------------------------------


def timed(time_ms: float, spread_: float = 0.0, contender: str = "sm80", role: str = OURS) -> Row:
    return Row(POINT, contender, role, "fwd", metrics={"time_ms": time_ms, "spread": spread_})


def both(old: Row, new: Row, threshold: float = 0.05) -> compare.Comparison:
    environment = {"device": "GPU", "driver": "1", "torch": "2"}
    return compare.compare(
        Results("speed", environment, [old]), Results("speed", environment, [new]), threshold
    )


@pytest.mark.parametrize(
    ("old", "new", "moved", "worse"),
    [
        (timed(1.0), timed(1.04), False, False),
        (timed(1.0), timed(1.2), True, True),
        (timed(1.0), timed(0.8), True, False),
        (timed(1.0, 0.3), timed(1.2), False, False),  # inside the spread
        (timed(1.0), timed(1.2, 0.1), True, True),
        (timed(1.0), Row(POINT, "sm80", OURS, "fwd", reason="out of memory"), True, True),
        (Row(POINT, "sm80", OURS, "fwd", reason="no kernel"), timed(1.0), False, False),
    ],
    ids=["within", "slower", "faster", "noisy", "beyond-noise", "lost", "gained"],
)
def test_what_moved(old: Row, new: Row, moved: bool, worse: bool) -> None:
    comparison = both(old, new)
    (change,) = comparison.changes
    assert (change.moved, change.worse) == (moved, worse)
    assert len(comparison.regressions()) == worse


def test_peers_do_not_fail_a_comparison_unless_asked() -> None:
    comparison = both(timed(1.0, contender="cudnn", role=PEER), timed(2.0, contender="cudnn"))
    assert comparison.regressions() == []
    assert len(comparison.regressions(everybody=True)) == 1


def test_rows_in_one_file_and_other_machines_are_told() -> None:
    old = Results("speed", {"device": "A"}, [timed(1.0)])
    new = Results("speed", {"device": "B"}, [timed(1.0, contender="sm90")])
    comparison = compare.compare(old, new, 0.05)
    assert comparison.changes == []
    assert (len(comparison.only_old), len(comparison.only_new)) == (1, 1)
    assert comparison.different_machines == ["device: A -> B"]
    with pytest.raises(ValueError, match="speed with one of memory"):
        compare.compare(old, replace(new, kind="memory"), 0.05)
