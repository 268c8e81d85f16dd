"""`bench cycles`: the command line of Nsight Compute, and what is made of its counters."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from cute_attention.bench import cycles, cycles_command
from cute_attention.bench.builds import Build, child
from cute_attention.bench.contenders import CONTENDERS
from cute_attention.bench.machine import describe
from cute_attention.bench.points import Point
from cute_attention.bench.results import point_to_dict
from cute_attention.bench.tables import make_console
from cute_attention.cli.bench import main
from cute_attention.layouts import counters
from cute_attention.layouts.errors import LayoutError

POINTS = [Point(batch=1, heads=2, seqlen_q=length, head_dim=64) for length in (128, 256)]
CPU = torch.device("cpu")
SETTINGS = cycles.Settings(CPU, "base", seed=3)
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
    words = cycles.command(Build(), tmp_path / "calls.json", SETTINGS, "/opt/ncu")
    assert words[0] == "/opt/ncu"
    assert words[words.index("--clock-control") + 1] == "base"
    assert "sm__cycles_elapsed.max" in words[words.index("--metrics") + 1].split(",")
    at = words.index(sys.executable)
    file = str(tmp_path / "calls.json")
    assert words[at:] == [sys.executable, child.__file__, "", "cpu", "3", "count", file]


class Ncu:
    """Stands in for the process: writes the reasons that the program would write."""

    def __init__(self, reasons: list[str], output: str, code: int = 0) -> None:
        self.reasons, self.output, self.code = reasons, output, code
        self.asked: list[object] = []

    def __call__(self, words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        file = Path(words[-1])
        self.asked = json.loads(file.read_text())
        if not self.code:
            file.write_text(json.dumps(self.reasons))
        return subprocess.CompletedProcess(words, self.code, self.output, "")


def rows_of(monkeypatch: pytest.MonkeyPatch, ncu: Ncu, build: Build) -> list[cycles.Row]:
    monkeypatch.setattr(counters, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(counters.subprocess, "run", ncu)
    contenders = [CONTENDERS["flash"], CONTENDERS["sm90"]]
    asked = cycles.calls_of(build, POINTS[: 1 + bool(build.label)], ["bwd"], contenders)
    return cycles.measure(asked, build, SETTINGS)


def test_a_row_for_each_call_and_a_reason_for_each_that_was_not_made(monkeypatch):
    """What stands before a call that fails is there, too, and perhaps kernels of it."""
    ncu = Ncu(["no flash here", ""], printed())
    flash, ours = rows_of(monkeypatch, ncu, Build())
    assert ncu.asked == [[name, point_to_dict(POINTS[0]), "bwd"] for name in ("flash", "sm90")]
    assert (flash.contender, flash.role, flash.reason) == ("flash", "peer", "no flash here")
    assert not flash.metrics
    assert (ours.contender, ours.role, ours.reason) == ("sm90", "ours", "")
    assert ours.metrics["longest_cycles"] == 5e6
    assert "bench cycles " in ours.command and "--contenders sm90 --clock base" in ours.command


def test_another_build_makes_calls_of_ours_alone(monkeypatch, tmp_path, capsys):
    (tmp_path / "libcute_attention_sm90a.so").touch()
    build = Build.of("before", tmp_path)
    here = rows_of(monkeypatch, Ncu(["no flash here", ""], printed()), Build())
    rows = rows_of(monkeypatch, Ncu(["", ""], printed()), build)
    assert [(row.contender, row.role) for row in rows] == [("sm90 (before)", "build")] * 2
    assert f"--contenders sm90 --build before={tmp_path}" in rows[0].command
    cycles_command.print_cycles(make_console(), [*here, *rows], "base")
    said = capsys.readouterr().out
    assert "one call, all its kernels, at the base clock" in said
    line = next(line for line in said.splitlines() if "before" in line)
    assert line.split()[-6:] == ["2", "2501.0", "2500.0", "0.500", "0.07", "9.0"]


def test_counters_that_are_not_told_are_a_reason(monkeypatch):
    lines = printed().splitlines()
    untold = [line.replace('"9,000,000"', '"n/a"') for line in lines if "17,000,000" not in line]
    rows = rows_of(monkeypatch, Ncu(["", ""], "\n".join(untold)), Build())
    assert [row.reason for row in rows] == ["Nsight Compute has not counted dram_bytes"] * 2
    only_between = [line for line in lines if "kernel<" not in line and "prepare" not in line]
    rows = rows_of(monkeypatch, Ncu(["", ""], "\n".join(only_between)), Build())
    assert [row.reason for row in rows] == ["Nsight Compute has seen no kernel"] * 2


def test_an_error_of_nsight_compute_ends_the_run(monkeypatch):
    ncu = Ncu([], "==ERROR== ERR_NVGPUCTRPERM: no permission", code=1)
    with pytest.raises(LayoutError, match="ncu: ==ERROR== ERR_NVGPUCTRPERM"):
        rows_of(monkeypatch, ncu, Build())
    with pytest.raises(LayoutError, match="ncu has counted 0 calls, and 2 were asked for"):
        rows_of(monkeypatch, Ncu(["", ""], ""), Build())


def test_the_program_marks_each_call_and_tells_why_some_were_not_made(monkeypatch, tmp_path):
    """A profiler is made up: "[" and "]" are where it is started and stopped, "|" is the kernel
    between calls, "." a call that fails the third time and "o" one that does not."""
    seen: list[str] = []

    def made(name: str, fails: bool) -> object:
        def step() -> None:
            seen.append(name)
            if fails and seen.count(name) == 3:
                raise RuntimeError("no third one")

        return step

    class Steps(child.Steps):
        def make(self, name, point, direction):
            return made("." if name == "reference" else "o", name == "reference"), nullcontext

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("|"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("["))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("]"))
    file = tmp_path / "calls.json"
    point = point_to_dict(Point(batch=1, heads=1, seqlen_q=16, head_dim=64, dtype="fp32"))
    names = ("sm90", "reference", "auto")
    file.write_text(json.dumps([[name, point, "fwd"] for name in names]))
    child.count(file, Steps("cpu", 0))
    assert "".join(seen) == "[|]" + "[|]..[.]" + "[|]oo[o]"
    assert json.loads(file.read_text()) == [
        "needs an NVIDIA GPU", "RuntimeError: no third one", "",
    ]  # fmt: skip


def test_nothing_is_started_after_the_limit(monkeypatch, tmp_path):
    results = tmp_path / "results.json"
    monkeypatch.setattr(cycles_command, "begin", lambda *_: (torch.device("cuda"), describe(CPU)))
    monkeypatch.setattr(cycles_command, "report_absent", lambda *_: {})
    monkeypatch.setattr(counters, "run", None)  # it is not called
    shape = "--batch 1 --heads 2 --seqlens 128 --head-dims 64 --masks full --direction bwd"
    arguments = ["cycles", *shape.split(), "--contenders", "sm90", "--limit-s", "-1"]
    assert main([*arguments, "--json", str(results)]) == 0
    (row,) = json.loads(results.read_text())["rows"]
    assert row["reason"] == "not reached within the limit of -1 s"


def test_it_needs_a_gpu(capsys):
    assert main(["cycles", "--device", "cpu"]) == 2
    assert "cycles needs an NVIDIA GPU" in capsys.readouterr().err
