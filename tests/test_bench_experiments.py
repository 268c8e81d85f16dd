"""`bench experiments` on a CPU: what is varied, what is measured, what is skipped and why."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention import attention
from cute_attention.bench import experiments, kernel_folder
from cute_attention.bench.contenders import CONTENDERS, OURS, PEER
from cute_attention.bench.contenders.blocks import BuiltKernel, BuiltRow, KeyBlocks
from cute_attention.bench.experiments import CPU, EXPERIMENTS, METRICS, blocks_of, points_of
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.machine import describe
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row, read_json, write_json
from cute_attention.bench.speed import Case, Settings
from cute_attention.cli.bench import main
from cute_attention.errors import BuildError
from cute_attention.native import rows
from cute_attention.rows import Row as KernelRow

ROOT = Path(__file__).resolve().parents[1]
BASE = Point(1, 2, 48, 16, dtype="fp32")
TINY = (
    "experiments --device cpu --batch 1 --heads 2 --seqlens 48 --head-dims 16 --dtypes fp32 "
    "--rounds 2 --time-ms 1 --direction fwd,fwdbwd"
)


def measured(tmp_path: Path, text: str) -> list[Row]:
    out = tmp_path / "rows.json"
    assert main([*shlex.split(text), "--json", str(out), "--quiet"]) == 0
    return read_json(out).rows


def test_each_experiment_varies_one_size() -> None:
    for name in EXPERIMENTS:
        points = dict(points_of(name, BASE, CPU))
        assert (name == "block") == (not points), "blocks are contenders at one point"
        for value, point in points.items():
            changed = {
                field.name
                for field in dataclasses.fields(Point)
                if getattr(point, field.name) != getattr(BASE, field.name)
            }
            allowed = {
                "dtype": {"dtype"},
                "length": {"seqlen_q", "seqlen_k"},
                "head-dim": {"head_dim", "head_dim_v"},
                "heads": {"heads", "heads_kv"},
            }[name]
            assert changed <= allowed and value in str(point)
    assert [value for value, _ in points_of("dtype", BASE, CPU)] == ["fp32", "fp16", "bf16"]


def test_all_experiments_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    rows_ = measured(tmp_path, f"{TINY} --plot {plot}")
    said = capsys.readouterr().out
    found = {row.case.partition(" ")[0] for row in rows_ if row.metrics}
    assert found == set(EXPERIMENTS)
    for row in rows_:
        assert row.reason == "" and set(METRICS) <= set(row.metrics)
        assert all(row.metrics[metric] > 0 for metric in METRICS), row
        assert f"--experiments {row.case.partition(' ')[0]}" in row.command
    dtypes = {(row.point.dtype, row.contender) for row in rows_ if row.case.startswith("dtype")}
    assert {("fp32", "reference"), ("fp16", "reference"), ("bf16", "reference")} <= dtypes
    for experiment in EXPERIMENTS.values():
        assert f"{experiment.title}, forward (" in said
        assert f"{experiment.title}, forward + backward (" in said
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and plot.stat().st_size > 20_000


def test_a_result_file_fills_the_page_and_draws(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("wheels"))
    page = tmp_path / "docs" / "experiments.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- figures: x -->\nold\n<!-- end -->\nafter\n")
    metrics = {"time_ms": 1.5, "memory_mib": 20.0, "tflops": 300.0}
    point = Point(4, 16, 4096, 128)
    rows_ = [
        Row(point, "128 x 128", OURS, "fwd", case="block 128 x 128", metrics=metrics),
        Row(point, "128 x 64", OURS, "fwd", case="block 128 x 64", reason="it is not there"),
        *(
            Row(point, name, role, what, case=f"heads {heads}", reason="no time is left")
            for heads in (1, 2)
            for what in ("fwd", "fwdbwd")
            for name, role in (("sm90", OURS), ("cudnn", PEER))
        ),
        Row(point, "sm90", OURS, "fwd", case="length 4096", metrics=metrics),
        Row(point, "cudnn", PEER, "fwd", case="length 4096", metrics=metrics),
    ]
    results = tmp_path / "experiments.json"
    environment = dataclasses.replace(describe(torch.device("cpu")), device="Some GPU")
    write_json(results, "experiments", environment, rows_)
    tool = [sys.executable, str(tmp_path / "tools" / "experiments_page.py"), str(results)]
    subprocess.run(tool, check=True)
    text = page.read_text()
    assert text.startswith("before\n<!-- figures: x -->\nOn Some GPU.\n") and "old" not in text
    assert text.endswith("<!-- end -->\nafter\n")
    assert "### Block size, forward (bf16 full 4x4096 h16 d128 and the like)" in text
    assert "| block size | contender | time, ms | peak memory, MiB | TFLOP/s |" in text
    assert text.count("| 1.50 | 20.0 | 300 |") == 3, text
    assert text.split("Not measured:\n\n")[1].splitlines()[:-2] == [
        "- block size 128 x 64 (forward; ours): it is not there",
        "- heads 1, 2 (forward, forward + backward; ours, sm90, cuDNN (SDPA)): no time is left",
    ]
    drawn = tmp_path / "docs" / "images" / "experiments.png"
    assert drawn.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = tmp_path / "again.png"
    assert main(["plot", str(results), "--output", str(again)]) == 0
    assert again.read_bytes() == drawn.read_bytes()

    write_json(results, "speed", environment, rows_)
    refused = subprocess.run(tool, capture_output=True, text=True)
    assert refused.returncode == 1 and "expected one of experiments" in refused.stderr


def test_lists_of_the_command_line_are_the_values(tmp_path: Path) -> None:
    text = TINY.replace("--seqlens 48", "--seqlens 16,32,80").replace("fwd,fwdbwd", "fwd")
    rows_ = measured(tmp_path, f"{text} --experiments length,heads --contenders reference")
    lengths = [row.point.seqlen_q for row in rows_ if row.case.startswith("length")]
    assert lengths == [16, 32, 80]
    assert [row.point.heads for row in rows_ if row.case.startswith("heads")] == list(CPU.heads)
    assert {row.point.seqlen_q for row in rows_ if row.case.startswith("heads")} == {16}


def test_what_cannot_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_ = measured(tmp_path, f"{TINY} --experiments dtype --contenders sm90,reference")
    reasons = {row.reason for row in rows_ if row.contender == "sm90"}
    assert reasons == {"needs an NVIDIA GPU"}
    said = capsys.readouterr().out
    assert "not measured" in said and "needs an NVIDIA GPU" in said
    assert main(shlex.split("experiments --device cpu --packed 100:20 --heads 2")) == 2
    assert "experiments vary the sizes of dense calls" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(shlex.split("experiments --experiments warps"))
    assert "'warps' is not one of block, dtype" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [1, 16, 20, 48, 1000])
def test_blocks_of_keys_are_attention(keys: int) -> None:
    inputs = make_inputs(BASE, torch.device("cpu"))
    call = KeyBlocks(keys).build(BASE, inputs)
    torch.testing.assert_close(call(*inputs.leaves), attention(*inputs.leaves), rtol=0, atol=2e-6)
    grads = torch.autograd.grad(call(*inputs.leaves), inputs.leaves, inputs.grad_out)
    right = torch.autograd.grad(attention(*inputs.leaves), inputs.leaves, inputs.grad_out)
    for ours, theirs in zip(grads, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    causal = dataclasses.replace(BASE, causal=True)
    assert "without masks" in str(KeyBlocks(keys).refuses(causal, "fwd"))


def test_blocks_on_a_gpu_are_rows_like_that_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "chip_of", lambda device: (90, 227 * 1024))
    base = Point(4, 16, 4096, 64)
    found = blocks_of(base, torch.device("cuda", 0), experiments.GPU)
    assert all(isinstance(each, BuiltRow) for each in found) and 3 <= len(found) <= 7
    names = [each.name for each in found]
    assert "192 x 128" in names and len(set(names)) == len(names)
    assert BuiltRow(KernelRow.of("sm90_fwd_bf16_d64")).refuses(base, "fwdbwd")
    unserved = dataclasses.replace(base, head_dim=512, head_dim_v=512)
    rest = blocks_of(unserved, torch.device("cuda", 0), experiments.GPU)
    assert rest and all(isinstance(each, KeyBlocks) for each in rest)
    monkeypatch.setattr(experiments, "chip_of", lambda device: (80, 163 * 1024))
    ampere = [each.name for each in blocks_of(base, torch.device("cuda", 0), experiments.GPU)]
    assert "128 x 64" in ampere and len(set(ampere)) == len(ampere) >= 3


def test_blocks_come_from_a_folder_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one machine builds another one measures, and compiles nothing."""
    made: list[KernelRow] = []

    def build(row: KernelRow, folder: Path, chips: object) -> Path:
        made.append(row)
        return folder / f"libcute_attention_{row.name}_01234567.so"

    monkeypatch.setattr(kernel_folder, "build", build)
    text = f"experiments --head-dims 64 --build-only --arch sm90 --kernels {tmp_path}"
    assert main(shlex.split(text)) == 0
    said = capsys.readouterr().out
    assert len(made) >= 3 and all(f"{row.name}: {tmp_path}" in said for row in made)

    monkeypatch.setattr(experiments, "chip_of", lambda device: (90, 227 * 1024))
    asked: list[tuple[KernelRow, Path]] = []

    def load(row: KernelRow, folder: Path) -> object:
        asked.append((row, folder))
        raise BuildError(f"{folder} has 0 libraries of {row.name}, expected 1")

    monkeypatch.setattr(kernel_folder, "load", load)
    monkeypatch.setattr(KernelRow, "build", None)
    base = Point(4, 16, 4096, 64)
    blocks = blocks_of(base, torch.device("cuda", 0), experiments.GPU, tmp_path)
    inputs = make_inputs(BASE, torch.device("cpu"))
    for each in blocks:
        with pytest.raises(BuildError, match="has 0 libraries of sm90_fwd_bf16_d64"):
            each.build(base, inputs)
    assert [row for row, _ in asked] == made and {folder for _, folder in asked} == {tmp_path}

    assert main(shlex.split("experiments --build-only --arch sm90")) == 2
    assert "--build-only needs --arch, and --kernels DIR" in capsys.readouterr().err
    text = "experiments --build-only --arch sm90 --dtypes fp32 --kernels here"
    assert main(shlex.split(text)) == 2
    assert "no row of the tables of sm90 computes" in capsys.readouterr().err


def test_what_no_machine_can_measure_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a forward row's tile, and fp32 of kernels for fp16 and bf16."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    block = BuiltRow(KernelRow.of("sm90_fwd_bf16_d64"))
    half, single = Point(1, 2, 48, 16), BASE
    for contender, point, direction, device, possible in (
        (block, half, "fwd", gpu, True),
        (block, half, "fwdbwd", gpu, False),
        (KeyBlocks(16), single, "fwdbwd", cpu, True),
        (CONTENDERS["sm90"], half, "fwdbwd", gpu, True),
        (CONTENDERS["sm90"], single, "fwd", gpu, False),
        (CONTENDERS["cudnn"], single, "fwd", gpu, False),
        (CONTENDERS["flash"], single, "fwd", gpu, False),
        (CONTENDERS["flash"], single, "fwd", cpu, True),
        (CONTENDERS["reference"], single, "fwd", gpu, True),
    ):
        case = Case(contender, point)
        assert experiments.can_be(case, direction, device) == possible, (contender.name, direction)

    monkeypatch.setattr(CONTENDERS["flash"], "half_on", frozenset({"cpu"}), raising=False)
    settings = Settings(cpu, [CONTENDERS["flash"]], rounds=1, time_ms=1.0, memory=True)
    found: list[Row] = []
    bench = experiments.Experiments(settings, BASE, CPU)
    bench.measure_all(["dtype"], lambda rows: found.extend(rows))
    assert {(row.point.dtype, row.contender) for row in found} == {
        *((dtype, "reference") for dtype in ("fp32", "fp16", "bf16")),
        *((dtype, "flash") for dtype in ("fp16", "bf16")),
    }


def test_a_built_kernel_is_asked_for_by_name() -> None:
    row = next(row for row in rows.table() if row.name == "sm80_fwd_bf16_d64")
    kernel = type("Kernel", (), {"name": row.name, "arch": "sm80"})()
    contender = BuiltKernel(kernel)
    options = contender._options(Point(1, 2, 8, 16, causal=True))
    assert options["kernel"] is kernel and options["backend"] == "auto" and options["causal"]
    assert contender.missing(torch.device("cpu")) == "needs an NVIDIA GPU"
