"""The benchmark's arithmetic and files: medians, ratios, JSON, comparisons; never a timing."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention import timing
from cute_attention.bench import compare, growth, memory_curve, ratios, results
from cute_attention.bench.against import SUFFIX, joining, read_recorded
from cute_attention.bench.contenders import BASELINE, OURS, PEER
from cute_attention.bench.flops import flops
from cute_attention.bench.machine import describe, driver_and_clock, flops_per_sm_and_clock
from cute_attention.bench.memory import peak_bytes
from cute_attention.bench.points import (
    Bounds,
    Point,
    packed_point,
)
from cute_attention.bench.results import Results, Row
from cute_attention.bench.tables import number
from cute_attention.timing import CudaTimer, median, repeats_for, spread, turns

CPU = torch.device("cpu")
POINT = Point(batch=2, heads=4, seqlen_q=32, head_dim=8, dtype="fp32")


def row(contender: str, tflops: float, role: str, point: Point = POINT, what: str = "fwd") -> Row:
    time_ms = flops(point, what) / tflops / 1e9
    return Row(point, contender, role, what, metrics={"tflops": tflops, "time_ms": time_ms})


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
    assert growth.exponent([(64, 1.0), *values]) == pytest.approx(power)  # the last two decide


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


class FakeGpu:
    """Clocks of the GPU and the host that the steps of a test advance, and a record of what was
    launched."""

    now_ms = 0.0
    host_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.launched.append("event")
                self.at = gpu.now_ms

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        def idle(cycles: int) -> None:
            gpu.launched.append("idle")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", idle, raising=False)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host_s)
        monkeypatch.setattr(CudaTimer, "FLUSH_BYTES", 64)

    def step(self, host_ms: float, device_ms: float) -> Callable[[], None]:
        def run() -> None:
            self.launched.append("step")
            self.now_ms += device_ms
            self.host_s += host_ms / 1e3

        return run


@pytest.mark.parametrize(("host_ms", "idles"), [(0.0, False), (10.0, True)])
def test_gpu_timer_surrounds_the_step_alone(
    monkeypatch: pytest.MonkeyPatch, host_ms: float, idles: bool
) -> None:
    gpu = FakeGpu(monkeypatch)
    timer = CudaTimer(CPU, time_ms=20)
    step = gpu.step(host_ms, device_ms=8.0)
    plan = timer.plan(step)
    assert plan.repeats == 2
    assert (plan.head_start_cycles > 0) == idles
    gpu.launched.clear()
    timer.flush.fill_(1)
    assert timer.sample(step, plan) == [8.0, 8.0]
    one = ["idle", "event", "step", "event"] if idles else ["event", "step", "event"]
    assert gpu.launched == 2 * one
    assert int(timer.flush.abs().sum()) == 0  # the cache was overwritten


def test_gpu_timer_measures_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded on a stream of the current device, which may be another."""
    gpu = FakeGpu(monkeypatch)
    entered: list[torch.Tensor] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        gpu.launched.append("device")
        yield
        gpu.launched.append("back")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    timer = CudaTimer(CPU, time_ms=8)
    step = gpu.step(0.0, device_ms=8.0)
    plan = timer.plan(step)
    timer.sample(step, plan)
    assert all(tensor is timer.flush for tensor in entered) and len(entered) == 2
    assert gpu.launched[0] == "device" and gpu.launched[-1] == "back"
    assert gpu.launched[-5:] == ["device", "event", "step", "event", "back"]


def some_rows() -> list[Row]:
    packed = packed_point("100:30:7", heads=2, head_dim=8, causal=True, label="docs")
    window = replace(POINT, window=Bounds(3, None), softcap=2.5, deterministic=True)
    return [
        replace(row("reference", 2.0, OURS, packed), samples=(1.0, 2.0), command="python -m x"),
        replace(row("flash", 3.0, PEER, window), case="normal"),
        Row(POINT, "cudnn", PEER, "bwd", reason="needs an NVIDIA GPU, of course"),
    ]


def test_driver_and_clock_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    running = []

    def clock(gpu: str, kind: int) -> int:
        assert running and (gpu, kind) == ("handle of GPU-1", pynvml.NVML_CLOCK_SM)
        return 1980

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: running.append(True))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: running.pop())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: f"handle of {uuid}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", clock)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    assert driver_and_clock("GPU-1") == ("580.1", 1980)
    assert running == []

    def unknown(uuid: str) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", unknown)
    assert driver_and_clock("GPU-1") == ("", 0)
    assert running == []


@pytest.mark.gpu
def test_driver_and_clock_of_this_gpu() -> None:
    environment = describe(torch.device("cuda", 0))
    assert environment.driver.split(".")[0].isdigit()
    assert 500 < environment.max_clock_mhz < 5000


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
