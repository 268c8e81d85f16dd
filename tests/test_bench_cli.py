"""Every subcommand of the benchmark from its command line, on a CPU at tiny points."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench import speed
from cute_attention.bench.commands import CPU, GPU
from cute_attention.bench.contenders import CONTENDERS, OURS
from cute_attention.bench.options import build_points
from cute_attention.bench.points import Bounds, Point
from cute_attention.bench.results import Row, read_json
from cute_attention.bench.sets import named_set
from cute_attention.cli.bench import SUBCOMMANDS, main, make_parser

TINY = "--device cpu --batch 1 --heads 2 --head-dims 8 --dtypes fp32"
FAST = "--rounds 2 --time-ms 1"


def run(text: str) -> int:
    return main(shlex.split(text))


def points_of(text: str, gpu: bool = True) -> list[Point]:
    args = make_parser().parse_args(["speed", *shlex.split(text)])
    return build_points(args, GPU if gpu else CPU)


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


# --- options ------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert points_of("") == named_set("paper")
    assert {p.seqlen_q for p in points_of("", gpu=False)} == {128, 256, 512}
    assert {p.dtype for p in points_of("", gpu=False)} == {"fp32"}


def test_lists_make_a_grid_and_filter_sets() -> None:
    grid = points_of("--head-dims 64,128 --masks causal --seqlens 512,1024 --dtypes fp16,bf16")
    assert len(grid) == 8
    assert all(p.causal and p.batch * p.seqlen_q == 16384 for p in grid)
    assert points_of("--set paper --head-dims 64 --seqlens 512 --masks full") == [
        Point(batch=32, heads=32, seqlen_q=512, head_dim=64)
    ]
    both = points_of("--set gqa,varlen --dtypes fp16")
    assert [p.label for p in both] == [p.label for p in named_set("gqa") + named_set("varlen")]
    assert {p.dtype for p in both} == {"fp16"}


@pytest.mark.parametrize("set_name", ["paper", "gqa", "models", "windows", "varlen", "cpu"])
def test_arguments_of_a_point_give_that_point(set_name: str) -> None:
    for point in named_set(set_name):
        assert points_of(shlex.join(point.arguments())) == [point.key()]


def test_arguments_of_an_odd_point_give_that_point() -> None:
    point = Point(
        batch=3,
        heads=6,
        seqlen_q=5,
        head_dim=40,
        heads_kv=2,
        seqlen_k=9,
        head_dim_v=24,
        dtype="fp16",
        causal=True,
        window=Bounds(4, None),
        softcap=12.5,
        deterministic=True,
    )
    assert points_of(shlex.join(point.arguments())) == [point]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed --set paper --batch 4", "--batch cannot change the shapes of a named set"),
        ("speed --set paper --head-dims 40", "no point of the named set"),
        ("speed --packed 100:10 --batch 4", "packed documents have no --batch"),
        ("speed --packed 100", "expected TOTAL:MEAN"),
        ("speed --contenders nobody --device cpu", "no contender is named 'nobody'"),
        ("speed --device tpu", "expected cuda, cuda:N or cpu"),
        ("speed --against /nonexistent.json", "nonexistent"),
        ("speed --masks triangular", "'triangular' is not one of full, causal"),
        ("speed --window 3", "'3' is not LEFT,RIGHT"),
        ("speed --heads 4 --heads-kv 3 --device cpu", "multiple of"),
    ],
)
def test_mistakes_are_explained(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(text)
    except SystemExit as exit_:  # argparse refuses it
        code = exit_.code
    assert code == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(f"{name} --help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    if name != "contenders":
        assert f"python -m cute_attention bench {name}" in text.split("examples:")[1]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_examples_parse(name: str) -> None:
    examples = SUBCOMMANDS[name].examples.replace("\\\n", " ")
    lines = [line.strip() for line in examples.splitlines()]
    commands = [line for line in lines if line.startswith("python")]
    assert commands or name == "contenders"
    for command in commands:
        args = make_parser().parse_args(shlex.split(command)[4:])
        assert args.command == name


# --- end to end ---------------------------------------------------------------------------------


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table, plot = tmp_path / "s.json", tmp_path / "s.csv", tmp_path / "s.png"
    shapes = f"{TINY} --seqlens 16,32,64 --masks causal {FAST}"
    names = "reference,flash,plain,cudnn"
    code = run(f"speed {shapes} --contenders {names} --json {out} --csv {table} --plot {plot}")
    assert code == 0
    rows = read_json(out).rows
    assert len(rows) == 3 * 3 * 4  # lengths, directions, contenders
    for row in rows:
        if row.contender == "cudnn":
            assert (row.metrics, row.reason) == ({}, "needs an NVIDIA GPU")
        else:
            assert row.reason == ""
            assert set(row.metrics) == {"time_ms", "spread", "tflops"}
            assert len(row.samples) == 2
    assert len(table.read_text().splitlines()) == 1 + len(rows)
    assert is_png(plot)
    text = capsys.readouterr().out
    assert "forward + backward, fp32: TFLOP/s" in text
    assert "ours against the best peer" in text
    assert rows[0].command in text or f"--contenders {names}" not in text


def test_the_printed_command_measures_the_row_again(tmp_path: Path) -> None:
    first, again = tmp_path / "1.json", tmp_path / "2.json"
    run(
        f"speed {TINY} --packed 40:10:3 {FAST} --contenders plain --json {first} --quiet".replace(
            "--batch 1", ""
        )
    )
    row = read_json(first).rows[1]
    assert row.what == "bwd"
    words = shlex.split(row.command)
    assert words[:5] == ["python", "-m", "cute_attention", "bench", "speed"]
    main([*words[4:], "--json", str(again), "--quiet"])
    (repeated,) = read_json(again).rows
    assert repeated.key() == row.key()
    assert repeated.metrics["tflops"] > 0


def test_speed_with_recorded_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "peers.json"
    fields = {"batch": 1, "heads": 2, "dtype": "fp32", "head_dim": 8, "seqlen": 16, "mask": "full"}
    recorded.write_text(json.dumps([{**fields, "fa3:fwd": 1e9}]))
    shapes = f"{TINY} --seqlens 16 --masks full {FAST} --direction fwd"
    assert run(f"speed {shapes} --contenders reference --against {recorded}") == 0
    text = capsys.readouterr().out
    assert "FlashAttention-3 (recorded)" in text
    assert "0 of 1" in text


@pytest.mark.parametrize("name", ["speed", "ladder", "accuracy", "memory", "overhead"])
def test_time_limit_leaves_rows(name: str, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    shapes = f"{TINY} --seqlens 16,32 --masks full"
    assert run(f"{name} {shapes} --contenders plain --limit-s 0 --json {out} --quiet") == 0
    rows = read_json(out).rows
    assert len({row.point.seqlen_q for row in rows} - {1}) == 2  # decoding has one query
    assert {row.reason for row in rows} == {"not reached within the limit of 0 s"}


def test_failures_and_wrong_results_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point(batch=1, heads=2, seqlen_q=16, head_dim=8, dtype="fp32", causal=True)
    plain = CONTENDERS["plain"]
    good = type(plain).build

    class Wrong(type(plain)):  # type: ignore[misc]
        name, role = "wrong", OURS  # judged by others even where it is named first

        def build(self, point, inputs):  # type: ignore[no-untyped-def]
            return good(self, Point(1, 2, 16, 8, dtype="fp32"), inputs)  # forgets the mask

    class Broken(type(plain)):  # type: ignore[misc]
        name = "broken"

        def build(self, point, inputs):  # type: ignore[no-untyped-def]
            raise torch.OutOfMemoryError("tried to allocate 1 PiB")

    settings = speed.Settings(
        torch.device("cpu"), [Wrong(), plain, Broken()], ("fwd", "bwd"), rounds=1, time_ms=1
    )
    rows: list[Row] = []
    speed.Bench(settings).measure([point], rows.extend)
    assert [row.contender for row in rows] == ["wrong", "plain", "broken"] * 2
    for row in rows:
        if row.contender == "plain":
            assert row.reason == "" and row.metrics["tflops"] > 0
        elif row.contender == "wrong":
            assert row.reason.startswith("its result differs from that of plain by")
        else:
            assert row.reason == "out of memory"


def test_most_contenders_are_believed_even_where_a_wrong_one_runs_first() -> None:
    point = Point(batch=1, heads=2, seqlen_q=16, head_dim=8, dtype="fp32", causal=True)
    plain = CONTENDERS["plain"]
    good = type(plain).build

    class WrongPeer(type(plain)):  # type: ignore[misc]
        name = "peer"

        def build(self, point, inputs):  # type: ignore[no-untyped-def]
            return good(self, Point(1, 2, 16, 8, dtype="fp32"), inputs)  # forgets the mask

    class Same(type(plain)):  # type: ignore[misc]
        name = "same"

    settings = speed.Settings(
        torch.device("cpu"), [WrongPeer(), plain, Same()], ("fwd",), rounds=1, time_ms=1
    )
    rows: list[Row] = []
    speed.Bench(settings).measure([point], rows.extend)
    reasons = {row.contender: row.reason for row in rows}
    assert reasons["plain"] == reasons["same"] == ""
    assert reasons["peer"].startswith("its result differs from that of plain, same by")


def test_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "l.json", tmp_path / "l.png"
    shapes = f"{TINY} --seqlens 64,128 {FAST}"
    names = "plain,reference,sm80,sm90"
    assert run(f"ladder {shapes} --contenders {names} --json {out} --plot {plot} --quiet") == 0
    measured = [row for row in read_json(out).rows if row.metrics]
    assert len(measured) == 2 * 2 * 2
    assert all(row.metrics["memory_mib"] > 0 for row in measured)
    assert is_png(plot)
    text = capsys.readouterr().out
    assert text.index("PyTorch, written out") < text.index("ours, reference")
    assert "ours, sm90" in text


def test_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    shapes = "--device cpu --batch 1 --heads 2 --head-dims 16 --seqlens 48 --dtypes bf16"
    names = "reference,plain,flash,sm80"
    code = run(f"accuracy {shapes} --inputs normal,outlier --contenders {names} --json {out}")
    rows = read_json(out).rows
    assert len(rows) == 2 * 2 * 4 * 5  # masks, inputs, contenders, tensors
    measured = {(r.contender, r.what) for r in rows if r.metrics}
    assert ("reference", "lse") in measured and ("flash", "dv") in measured
    assert ("flash", "lse") not in measured
    text = capsys.readouterr().out
    assert ("PASS" in text) == (code == 0)
    assert ("FAIL" in text) == (code == 1)
    assert all(0 < r.metrics["rms_error"] < 0.05 for r in rows if r.metrics)


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "m.json", tmp_path / "m.png"
    shapes = f"{TINY} --seqlens 512,1024 --direction fwd"
    names = "reference,plain,sm80"
    assert run(f"memory {shapes} --contenders {names} --json {out} --plot {plot}") == 0
    by_name = {(r.contender, r.point.seqlen_q): r.metrics for r in read_json(out).rows}
    plain = [by_name["plain", n]["memory_mib"] for n in (512, 1024)]
    ours = [by_name["reference", n]["memory_mib"] for n in (512, 1024)]
    assert plain[1] / plain[0] == pytest.approx(4, rel=0.1)
    assert ours[1] / ours[0] < 2.15
    assert by_name["sm80", 512] == {}
    assert is_png(plot)
    assert "PASS: the memory of our backends is linear" in capsys.readouterr().out


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.json"
    options = "--device cpu --modes eager,graph --calls 2 --rounds 2"
    assert run(f"overhead {options} --contenders reference,flash,sm80 --json {out}") == 0
    rows = read_json(out).rows
    # Contenders, modes, and kinds of the dense form, of that with the LSE, of packed, of decoding.
    assert len(rows) == 3 * 2 * (3 + 3 + 3 + 1)
    cases = {"eager", "lse eager", "packed eager", "decode eager"}
    assert {row.case for row in rows if row.metrics} == cases
    for row in rows:
        eager = row.case in cases and row.contender != "sm80"
        eager &= row.contender != "flash" or row.case in ("eager", "decode eager")
        assert ("host_us" in row.metrics) == eager
        assert bool(row.reason) != eager
        decodes = row.case.startswith("decode")
        assert row.what == "fwd" or not decodes
        assert bool(row.point.lengths) == row.case.startswith("packed")
        ours = row.contender == "reference" and (row.case, row.what) == ("eager", "fwd")
        for part in ("checks", "choice", "launch"):
            assert (row.metrics.get(f"{part}_us", 0) > 0) == ours
    text = capsys.readouterr().out
    assert "CUDA graphs need an NVIDIA GPU" in text
    assert "parts of an eager call" in text
    assert text.count("ours, reference / FLASH (SDPA)") == 2  # ratios, dense and decoding


def test_forms_of_overhead(tmp_path: Path) -> None:
    """Those that are asked for, of the shape that was; each row's command asks for its own."""
    out = tmp_path / "o.json"
    shape = "--device cpu --batch 2 --heads 2 --head-dims 8 --seqlens 3 --dtypes fp32"
    options = f"{shape} --modes eager --calls 1 --rounds 1 --contenders reference"
    assert run(f"overhead {options} --forms packed,decode --json {out} --quiet") == 0
    rows = read_json(out).rows
    assert [(row.case, row.what) for row in rows] == [
        *(("packed eager", kind) for kind in ("fwd", "fwd+tape", "fwdbwd")),
        ("decode eager", "fwd"),
    ]
    packed, decode = rows[0].point, rows[-1].point
    assert (packed.lengths, packed.batch, packed.seqlen_q) == ((3, 3), 1, 6)
    assert (decode.batch, decode.seqlen_q, decode.seqlen_k) == (2, 1, 3)
    assert "--forms packed" in rows[0].command
    assert "--forms decode" in rows[-1].command


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    shapes = f"{TINY} --seqlens 16 --masks full {FAST} --direction fwd"
    run(f"speed {shapes} --contenders reference,plain --json {before} --quiet")
    assert run(f"compare {before} {before} --all") == 0
    data = json.loads(before.read_text())
    for row in data["rows"]:
        row["time_ms"] *= 3.0
        row["spread"] = 0.0
    after.write_text(json.dumps(data))
    capsys.readouterr()
    threshold = "--threshold 0.5"
    slower = read_json(before).rows[0].metrics["spread"] < 2
    assert run(f"compare {before} {after} {threshold}") == int(slower)
    assert "geometric mean 0.333x" in capsys.readouterr().out
    assert run(f"compare {before} {after} --threshold 9") == 0
    assert run(f"compare {after} {before} {threshold}") == 0
    data["rows"] = []
    after.write_text(json.dumps(data))
    assert run(f"compare {before} {after}") == 1


def test_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("contenders --device cpu") == 0
    text = capsys.readouterr().out
    for contender in CONTENDERS.values():
        assert contender.title in text


@pytest.mark.parametrize("name", ["cute_attention.bench", "cute_attention bench"])
def test_runs_as_a_module(name: str) -> None:
    command = [sys.executable, "-m", *name.split(), "compare", "no.json", "no.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no.json" in done.stderr and "Traceback" not in done.stderr
