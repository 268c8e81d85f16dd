"""`bench cycles`: the command line of Nsight Compute, and what is made of its counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_attention.bench import cycles, cycles_command
from cute_attention.bench.builds import Build, child
from cute_attention.bench.contenders import CONTENDERS
from cute_attention.bench.points import Point
from cute_attention.bench.results import point_to_dict
from cute_attention.bench.tables import make_console
from cute_attention.cli.bench import main
from cute_attention.layouts.errors import LayoutError

POINTS = [Point(batch=1, heads=2, seqlen_q=length, head_dim=64) for length in (128, 256)]
CPU = torch.device("cpu")
# What Nsight Compute prints: lines of its own and of the program, and CSV. Of two calls the first
# has two kernels and the second one.
HEADER = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
LAUNCHES = (
    ("at::cuda::<unnamed>::spin_kernel(long)", 1, 1, 1),
    ("void prepare<sm90_bwd>(A)", 1000, 2000, 3000),
    ("void kernel<sm90_bwd, 1>(A)", 2_500_000, 70_000, 9_000_000),
    ("at::cuda::<unnamed>::spin_kernel(long)", 1, 1, 1),
    ("void kernel<sm90_bwd, 1>(A)", 5_000_000, 150_000, 17_000_000),
)


def printed() -> str:
    lines = ["==PROF== Connected to process 7", "a line of the program", HEADER]
    for number, (name, *values) in enumerate(LAUNCHES):
        for metric, value in zip(cycles.METRICS.values(), values, strict=True):
            lines.append(f'"{number}","7","{name}","{metric}","","{value:,}"')
    return "\n".join(lines)


def test_kernels_are_those_of_their_calls():
    first, second = cycles.parse(printed())
    assert [launch.name.split("<")[0] for launch in first] == ["void prepare", "void kernel"]
    assert cycles.metrics_of(first) == {
        "cycles": 2_501_000,
        "instructions": 72_000,
        "dram_bytes": 9_003_000,
        "longest_cycles": 2_500_000,
        "kernels": 2,
    }
    assert cycles.metrics_of(second)["cycles"] == 5_000_000


def test_the_command_line(tmp_path):
    words = cycles.command(Build(), tmp_path / "cases.json", "base", "/opt/ncu")
    assert words[0] == "/opt/ncu"
    assert words[words.index("--clock-control") + 1] == "base"
    assert "sm__cycles_elapsed.max" in words[words.index("--metrics") + 1].split(",")
    at = words.index(sys.executable)
    assert words[at:] == [sys.executable, child.__file__, "", "once", str(tmp_path / "cases.json")]


class Ncu:
    """Stands in for the process: writes the reasons that the program would write."""

    def __init__(self, reasons: list[str], output: str, code: int = 0) -> None:
        self.reasons, self.output, self.code = reasons, output, code
        self.asked: list[dict[str, object]] = []

    def __call__(self, words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        file = Path(words[-1])
        self.asked.append(json.loads(file.read_text()))
        if not self.code:
            file.write_text(json.dumps(self.reasons))
        return subprocess.CompletedProcess(words, self.code, self.output, "")


def rows_of(monkeypatch: pytest.MonkeyPatch, ncu: Ncu, build: Build) -> list[cycles.Row]:
    monkeypatch.setattr(cycles, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(cycles.subprocess, "run", ncu)
    contenders = [CONTENDERS["sm90"], CONTENDERS["flash"]]
    asked = cycles.cases_of(build, POINTS, ["bwd"], contenders)
    return cycles.measure(asked, build, CPU, 3, "base")


def test_a_row_for_each_call_and_a_reason_for_each_that_was_not_made(monkeypatch):
    ncu = Ncu(["", "no flash here", "", "no flash here"], printed())
    rows = rows_of(monkeypatch, ncu, Build())
    cases = [[c, point_to_dict(p), "bwd"] for p in POINTS for c in ("sm90", "flash")]
    assert ncu.asked == [json.loads(json.dumps({"device": "cpu", "seed": 3, "cases": cases}))]
    found = [(row.contender, row.role, row.point, row.reason) for row in rows]
    assert found == [
        ("sm90", "ours", POINTS[0], ""),
        ("flash", "peer", POINTS[0], "no flash here"),
        ("sm90", "ours", POINTS[1], ""),
        ("flash", "peer", POINTS[1], "no flash here"),
    ]
    assert [row.metrics.get("longest_cycles") for row in rows] == [2.5e6, None, 5e6, None]


def test_another_build_makes_calls_of_ours_alone(monkeypatch, tmp_path, capsys):
    (tmp_path / "libcute_attention_sm90a.so").touch()
    build = Build.of("before", tmp_path)
    here = rows_of(monkeypatch, Ncu(["", "", "", ""], printed()), Build())
    rows = rows_of(monkeypatch, Ncu(["", ""], printed()), build)
    assert [(row.contender, row.role) for row in rows] == [("sm90 (before)", "build")] * 2
    # Only two of the four calls of this package have counters: the others say so.
    assert [row.reason for row in here[2:]] == ["Nsight Compute has counted no kernel"] * 2
    cycles_command.print_cycles(make_console(), [*here, *rows], "base")
    said = capsys.readouterr().out
    assert "one call, all its kernels, at the base clock" in said
    line = next(line for line in said.splitlines() if "before" in line)
    assert line.split()[-6:] == ["2", "2501.0", "2500.0", "1.000", "0.07", "9.0"]


def test_an_error_of_nsight_compute_ends_the_run(monkeypatch):
    ncu = Ncu([], "==ERROR== ERR_NVGPUCTRPERM: no permission", code=1)
    with pytest.raises(LayoutError, match="ncu: ==ERROR== ERR_NVGPUCTRPERM"):
        rows_of(monkeypatch, ncu, Build())


def test_the_program_tells_why_calls_were_not_made(tmp_path):
    """On the CPU kernels are refused, and no profiler is started for others."""
    file = tmp_path / "cases.json"
    point = point_to_dict(Point(batch=1, heads=1, seqlen_q=16, head_dim=64, dtype="fp32"))
    cases = [[name, point, "fwd"] for name in ("sm90", "reference")]
    file.write_text(json.dumps({"device": "cpu", "seed": 0, "cases": cases}))
    subprocess.run(Build().command("once", str(file)), check=True, env=os.environ)
    first, second = json.loads(file.read_text())
    assert first == "needs an NVIDIA GPU"
    assert second  # there is no GPU to wait for


def test_it_needs_a_gpu(capsys):
    assert main(["cycles", "--device", "cpu"]) == 2
    assert "cycles needs an NVIDIA GPU" in capsys.readouterr().err
