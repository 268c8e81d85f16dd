"""The benchmark on a GPU: PyTorch's backends are measured, in every subcommand and direction."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from cute_attention.bench.contenders import CONTENDERS
from cute_attention.bench.results import Row, read_json
from cute_attention.cli.bench import main

pytestmark = pytest.mark.gpu

SHAPE = "--batch 2 --heads 4 --head-dims 64 --dtypes bf16"
FAST = "--rounds 2 --time-ms 2"


def rows_of(tmp_path: Path, command: str) -> list[Row]:
    out = tmp_path / "rows.json"
    assert main([*shlex.split(command), "--json", str(out), "--quiet"]) == 0
    return read_json(out).rows


@pytest.mark.parametrize("extra", ["--masks full,causal", "--heads-kv 2", "--deterministic"])
def test_speed(tmp_path: Path, extra: str) -> None:
    names = "flash,cudnn,plain,math,reference"
    rows = rows_of(tmp_path, f"speed {SHAPE} --seqlens 256 {extra} {FAST} --contenders {names}")
    for row in rows:
        if "deterministic" not in extra or row.contender in ("flash", "reference"):
            assert row.reason == ""
            assert row.metrics["tflops"] > 0
            assert 0 < row.metrics["peak_share"] < 1


def test_packed_documents(tmp_path: Path) -> None:
    command = "speed --packed 1000:200 --heads 4 --head-dims 64 --masks causal"
    rows = rows_of(tmp_path, f"{command} {FAST} --contenders flash,plain,reference")
    assert [row.reason for row in rows] == [""] * 9


def test_kernels_are_measured_where_they_are_loaded(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"speed {SHAPE} --seqlens 256 {FAST} --contenders sm80,flash")
    for row in rows:
        assert row.metrics or "kernel" in row.reason or "backward" in row.reason


@pytest.mark.parametrize(
    "shape",
    [
        f"{SHAPE} --seqlens 256 --masks full,causal",
        f"{SHAPE} --heads-kv 2 --seqlens 64 --seqlen-k 192 --masks causal",
        f"{SHAPE} --seqlens 512 --masks causal --window 100,0",
        "--packed 1000:200 --heads 4 --head-dims 128 --masks causal --dtypes bf16",
    ],
    ids=["dense", "fewer-queries", "window", "packed"],
)
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_other_packages_are_measured(tmp_path: Path, name: str, shape: str) -> None:
    """A row has figures only if its results agree with those of PyTorch, written out."""
    if missing := CONTENDERS[name].missing(torch.device("cuda")):
        pytest.skip(f"{CONTENDERS[name].title}: {missing}")
    rows = rows_of(tmp_path, f"speed {shape} {FAST} --direction fwd,bwd --contenders plain,{name}")
    assert [row.reason for row in rows] == [""] * len(rows)


def test_memory_and_ladder(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"memory {SHAPE} --seqlens 512,1024 --contenders plain,flash")
    peaks = {(r.contender, r.what, r.point.seqlen_q): r.metrics["memory_mib"] for r in rows}
    assert peaks["plain", "fwd", 1024] > 3.5 * peaks["plain", "fwd", 512]
    assert peaks["flash", "fwd", 1024] < 2.5 * peaks["flash", "fwd", 512]
    rows = rows_of(tmp_path, f"ladder {SHAPE} --seqlens 256 {FAST} --contenders plain,reference")
    assert all(row.metrics["memory_mib"] > 0 for row in rows)


def test_overhead(tmp_path: Path) -> None:
    few = "overhead --contenders flash --calls 5 --rounds 2"
    rows = rows_of(tmp_path, f"{few} --modes eager")
    assert [row.reason for row in rows] == [""] * 10
    rows = rows_of(tmp_path, f"{few} --modes eager,graph --forms dense,decode")
    reasons = {(row.case, row.what): row.reason for row in rows}
    assert [key for key, reason in reasons.items() if reason] == [
        ("graph", "fwd+tape"),
        ("decode graph", "fwd"),
    ]


def test_accuracy(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"accuracy {SHAPE} --seqlens 128 --contenders flash,cudnn,plain")
    for row in rows:
        if row.what != "lse" or row.contender == "plain":
            assert row.metrics["rms_error"] < 0.1
