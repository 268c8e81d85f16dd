"""`tune` on a GPU: two candidates that were compiled elsewhere, measured by the public command; and
the trial, which finds a kernel that is wrong.

CUTE_ATTENTION_TUNED names folders that `python -m cute_attention tune --build-only --output` has
written, separated by colons.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

import cute_attention
from cute_attention.bench.inputs import make_inputs
from cute_attention.bench.results import read_json
from cute_attention.cli import main
from cute_attention.native import build, kernel_cache, toolchain
from cute_attention.native.core import Kernel
from cute_attention.problem import Problem
from cute_attention.rows import Row, trial
from cute_attention.rows.builds import Built
from cute_attention.rows.candidates import Candidate, Search, row_of
from cute_attention.tune import folder as folders
from cute_attention.tune.measure import TO_PRESENT, _load, cannot_run_on
from cute_attention.tune.plan import Entry

pytestmark = pytest.mark.gpu

FOLDERS = [
    Path(name)
    for name in os.environ.get("CUTE_ATTENTION_TUNED", "").split(os.pathsep)
    if name and (Path(name) / folders.MANIFEST).is_file()
]


def small_copy(source: Path, target: Path) -> folders.Folder:
    """The present row and two candidates of the first search of a folder, at its first two
    points."""
    found = folders.read(source)
    search = found.searches[0]
    built = [entry for entry in search.entries if found.has(entry)]
    if len(built) < 3 or built[0] != search.present:
        pytest.skip(f"{source} has no present row and two candidates")
    target.mkdir()
    for entry in built[:3]:
        shutil.copyfile(source / entry.file, target / entry.file)
    subject = dataclasses.replace(search.subject, points=search.subject.points[:2])
    found.path = target
    found.searches = [dataclasses.replace(search, subject=subject, entries=tuple(built[:3]))]
    found.save()
    return found


@pytest.mark.skipif(not FOLDERS, reason="CUTE_ATTENTION_TUNED names no folder of a search")
@pytest.mark.parametrize("source", FOLDERS, ids=lambda path: path.name)
def test_two_candidates_are_measured(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = small_copy(source, tmp_path / "tuned")
    if reason := cannot_run_on(torch.device("cuda", 0), found.arch):
        pytest.skip(reason)
    plot = tmp_path / "plot.png"
    command = ["tune", "--measure-only", "--input", str(found.path), "--peers", "flash"]
    command += ["--rounds", "2", "--time-ms", "5", "--minutes", "5", "--plot", str(plot)]
    assert main(command) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "replaces" in said or "is the best of 3" in said, said
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    device = torch.cuda.get_device_name(0)
    assert set(found.trials(device).values()) == {""}, found.trials(device)
    results = read_json(found.results_path(device))
    (search,) = found.searches
    for point in search.subject.points:
        rows = {row.contender: row for row in results.rows if row.point.key() == point.key()}
        for entry in search.entries:
            row = rows[entry.name]
            assert row.reason == "" and row.metrics["tflops"] > 0
            assert 0.05 < row.metrics[TO_PRESENT] < 20
        assert rows[search.present.name].metrics[TO_PRESENT] == 1.0
        assert "flash" in rows

    # What is measured is not measured again.
    before = found.results_path(device).read_bytes()
    assert main(command) == 0
    assert found.results_path(device).read_bytes() == before
    assert "replaces" in (said := capsys.readouterr().out) or "is the best of 3" in said


@pytest.mark.skipif(not FOLDERS, reason="CUTE_ATTENTION_TUNED names no folder of a search")
@pytest.mark.parametrize("source", FOLDERS, ids=lambda path: path.name)
def test_autotune_chooses_among_kernels_that_are_built(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `rows.autotune` but the compiler: what it would compile are libraries of the folder.
    The second call remembers, and measures nothing."""
    found = small_copy(source, tmp_path / "tuned")
    if reason := cannot_run_on(torch.device("cuda", 0), found.arch):
        pytest.skip(reason)
    (search,) = found.searches
    entries = {row_of(entry.columns): entry for entry in search.entries}
    trusted, *others = entries
    tuner = sys.modules["cute_attention.rows.autotune"]

    def kernel_of(row: Row) -> Kernel:
        kernel, reason = _load(entries[row], found)
        assert kernel is not None, reason
        return kernel

    chosen = Search([Candidate(row, 1.0) for row in others])
    monkeypatch.setenv(kernel_cache.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "key_of", lambda *words: "of the headers and the compiler")
    monkeypatch.setattr(toolchain, "find", lambda: None)
    monkeypatch.setattr(tuner, "present_row", lambda *words: search.subject.present)
    monkeypatch.setattr(tuner, "proven", lambda *words: chosen)
    monkeypatch.setattr(tuner, "build_all", lambda rows, *words: [Built(row) for row in rows])
    monkeypatch.setattr(Row, "build", kernel_of)

    point = search.subject.points[0]
    inputs = make_inputs(point, torch.device("cuda", 0)).detached
    options = {"causal": point.causal, "direction": search.subject.present.direction}
    kernel = cute_attention.rows.autotune(*inputs, **options)
    assert kernel.name in {entry.name for entry in search.entries}
    (file,) = (tmp_path / "cache").glob("choice-*.json")
    times = json.loads(file.read_text())["times_ms"]
    assert [*times] == [row.name for row in (trusted, *others)]
    assert all(0 < time < 1000 for time in times.values())
    assert times[kernel_row(kernel, entries).name] <= times[trusted.name]

    def measured(*words: object) -> list[float]:
        raise AssertionError("it measures again")

    monkeypatch.setattr(tuner, "measured", measured)
    assert cute_attention.rows.autotune(*inputs, **options) == kernel


def kernel_row(kernel: Kernel, entries: dict[Row, Entry]) -> Row:
    """The row of a kernel of a search."""
    return next(row for row, entry in entries.items() if entry.name == kernel.name)


def plain_kernels() -> list[Kernel]:
    """A loaded forward and backward kernel of head dim 64 that runs here."""
    capability = torch.cuda.get_device_capability()
    return [
        kernel
        for kernel in cute_attention.kernels()
        if (kernel.head_dim, kernel.head_dim_v, kernel.dtype) == (64, 64, "bf16")
        and not kernel.score_mods
        and (kernel.arch == "sm80" or capability == (9, 0))
    ]


def test_the_trial_believes_right_kernels_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = plain_kernels()
    if not kernels:
        pytest.skip("no kernel of head dim 64 is loaded")
    device = torch.device("cuda", 0)
    problem = Problem(heads=8, heads_kv=2, head_dim=64, head_dim_v=64, device=device)
    for kernel in kernels:
        asked = problem._replace(direction=kernel.direction)
        assert trial.fault_of(kernel, kernel, asked) == ""
    right = trial.attention
    calls = []

    def wrong(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        out = right(*tensors, **options)  # type: ignore[arg-type]
        if "kernel" in options:
            calls.append(options)
            if len(calls) % 2 == 1:  # the kernel that is tried comes before the trusted one
                return out * torch.where(torch.arange(64, device="cuda") == 63, 0.5, 1.0).to(out)
        return out

    monkeypatch.setattr(trial, "attention", wrong)
    for kernel in kernels:
        calls.clear()
        said = trial.fault_of(kernel, kernel, problem._replace(direction=kernel.direction))
        assert "is wrong for 257 queries, 257 keys" in said, kernel.name
