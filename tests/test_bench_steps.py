"""`bench steps`: its steps, its kernels in a folder, its tables and its page; no GPU, no nvcc."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich", reason="the benchmark's extra is not installed")

from built_rows import install_fake
from cute_attention.bench import (
    kernel_folder,
    optimisation_command,
    optimisation_kernels,
    optimisation_lab,
)
from cute_attention.bench.contenders import OURS, PEER
from cute_attention.bench.machine import describe
from cute_attention.bench.optimisation_report import cells, explanations, markdown, with_peer
from cute_attention.bench.optimisations import STEPS, chosen, table_row
from cute_attention.bench.points import Point
from cute_attention.bench.report import Report
from cute_attention.bench.results import Row, read_json
from cute_attention.bench.tables import make_console
from cute_attention.cli.bench import main, make_parser
from cute_attention.errors import BuildError
from cute_attention.native import core, kernel_cache, toolchain

ROOT = Path(__file__).resolve().parents[1]
POINT = Point(batch=4, heads=16, seqlen_q=4096, head_dim=128)
needs_core = pytest.mark.skipif(not core.available(), reason="the core library is not installed")


def columns(step) -> dict[str, object]:
    values = dataclasses.asdict(step.row.columns)
    values.pop("name")
    return values | values.pop("study")


# What each step changes of the step before it, the titles of docs/steps.md in the words of rows.
CHANGES = {
    "+ swizzle": {"swizzle"},
    "+ asynchronous copies": {"copies"},
    "+ double buffers, eager loads": {"stages", "loads"},
    "+ fragments ahead": {"fragments_ahead"},
    "+ optimistic softmax": {"softmax"},
    "+ larger tiles": {"tile_m", "tile_n", "warps"},
    "+ one buffer again": {"stages"},
    "+ two consumers": {"tile_m", "warps"},
    "+ turns": {"turns", "softmax"},  # the softmax that "auto" was without turns, by its name
    "+ straight softmax": {"softmax"},
    "+ persistence": {"grid"},
}


def test_each_step_changes_what_it_says_and_ladders_end_at_a_row_of_the_tables():
    changed = {}
    for before, step in itertools.pairwise(STEPS):
        if step.name.startswith("+"):
            old, new = columns(before), columns(step)
            changed[step.name] = {name for name in new if new[name] != old[name]}
        else:
            assert table_row(before) == "sm80_fwd_bf16_d128"
    assert changed == CHANGES
    assert table_row(STEPS[-1]) == "sm90_fwd_bf16_d128"
    assert [step.name for step in STEPS if table_row(step)] == [
        "+ one buffer again",
        "+ persistence",
    ]
    assert len({step.row.name for step in STEPS}) == len({step.name for step in STEPS}) == 13
    assert {step.row.columns.arch for step in chosen(["sm90"])} == {"sm90"}
    assert len(chosen(["sm80", "sm90"])) == len(STEPS)


def row(step: int, **metrics: float) -> Row:
    own = STEPS[step]
    return Row(POINT, own.name, OURS, "fwd", case=own.row.name, metrics=metrics)


def test_tables_show_what_is_known():
    rows = [
        row(1, tflops=200.0, peak_share=0.2, registers=240, conflicts=0, counted_conflicts=0),
        Row(POINT, "flash", PEER, "fwd", metrics={"tflops": 400.0, "time_ms": 1.0}),
        row(0, tflops=100.0, peak_share=0.1, registers=250, conflicts=1376256),
        row(8, conflicts=0),
    ]
    assert [each.contender for each, _ in with_peer(rows)] == [STEPS[i].name for i in (0, 1, 8)]
    head, lines = cells(rows)
    assert head == [
        *("step", "TFLOP/s", "of peak", "of FlashAttention-2", "registers", "conflicts"),
        "conflicts counted",
    ]
    assert lines == [
        ["Ampere: plain", "100", "10%", "0.25", "250", "1376256", "-"],
        ["+ swizzle", "200", "20%", "0.50", "240", "0", "0"],
        ["Hopper: TMA, WGMMA, warp roles", "-", "-", "-", "-", "0", "-"],
    ]
    text = markdown(rows, "a GPU")
    assert text.startswith("On a GPU, bf16 full 4x4096 h16 d128; ")
    assert text.splitlines()[0].endswith(": 400 TFLOP/s:")
    assert "| + swizzle | 200 | 20% | 0.50 | 240 | 0 | 0 |" in text
    assert markdown([row(0, conflicts=3.0)], "a CPU").startswith("Predicted:\n\n| step | conflicts")


def test_the_page_has_the_current_steps():
    page = (ROOT / "docs" / "steps.md").read_text()
    assert explanations() in page
    for step in STEPS:
        assert f"| {step.name} |" in page
        assert step.why.count(". ") in (1, 2), "two sentences, or three"
    for image in ("steps_banks_plain", "steps_banks_swizzled", "steps_swizzled_k"):
        assert f"images/{image}.png" in page
        assert (ROOT / "docs" / "images" / f"{image}.png").stat().st_size > 5000


def test_a_result_file_fills_the_page(tmp_path):
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("wheels"))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "steps.md"
    page.write_text(
        "<!-- figures: x -->\nwhat was there\n<!-- end -->\n"
        "<!-- explanations: x -->\n<!-- end -->\n"
    )
    results = tmp_path / "steps.json"
    data = {"schema": 1, "environment": {"device": "A GPU"}}
    data["rows"] = [row(0, tflops=100.0).to_dict(), row(1, tflops=200.0).to_dict()]
    results.write_text(json.dumps(data | {"kind": "steps"}))
    command = [sys.executable, str(tmp_path / "tools" / "steps_table.py"), str(results)]
    subprocess.run(command, check=True)
    assert "On A GPU, bf16 full 4x4096 h16 d128:" in page.read_text()
    assert "| + swizzle | 200 |" in page.read_text() and "what was there" not in page.read_text()
    assert STEPS[0].why in page.read_text()
    drawn = tmp_path / "docs" / "images" / "steps.png"
    assert drawn.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    again = tmp_path / "again.png"
    assert main(["plot", str(results), "--output", str(again)]) == 0
    assert again.read_bytes() == drawn.read_bytes()
    results.write_text(json.dumps(data | {"kind": "speed"}))
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0 and "is a file of speed, expected one of steps" in refused.stderr


def test_without_a_gpu_it_shows_what_is_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        optimisation_lab,
        "predicted",
        lambda steps: ({step.row.name: {"conflicts": 7.0} for step in steps[:1]}, ""),
    )
    file, chart = tmp_path / "steps.json", tmp_path / "steps.png"
    words = ["steps", "--device", "cpu", "--json", str(file), "--plot", str(chart)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "not measured: needs an NVIDIA GPU; what follows is predicted" in said
    found = read_json(file)
    assert (found.kind, len(found.rows)) == ("steps", len(STEPS))
    assert [each.case for each in found.rows] == [step.row.name for step in STEPS]
    assert found.rows[0].metrics == {"conflicts": 7.0}
    assert {each.reason for each in found.rows} == {"needs an NVIDIA GPU"}
    assert chart.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_the_lab_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(optimisation_lab, "predicted", lambda steps: ({}, "no lab here"))
    assert main(["steps", "--device", "cpu", "--architectures", "sm90"]) == 0
    said = capsys.readouterr().out
    assert "not predicted: no lab here" in said
    assert "+ persistence" in said and "Ampere" not in said


def test_build_only_needs_a_folder(capsys):
    assert main(["steps", "--build-only"]) == 2
    assert "--build-only needs --kernels DIR" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["steps", "experiments --arch sm90"])
def test_a_missing_compiler_is_told(tmp_path, monkeypatch, capsys, command):
    def find():
        raise BuildError("nvcc was not found. Get it with pip")

    monkeypatch.setattr(optimisation_lab, "predicted", lambda steps: ({}, "no lab here"))
    monkeypatch.setattr(toolchain, "find", find)
    words = [*command.split(), "--build-only", "--kernels", str(tmp_path / "kernels")]
    assert main(words) == 2
    assert f"{command.split()[0]}: nvcc was not found. Get it" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("kernel", "of_caches"),
    [
        (
            "forwardINS_4rows4nameELNS0_8KeyPlaceE0EEEv",
            "forwardINS_4rows4nameELNS0_8KeyPlaceE1EEEv",
        ),
        ("forwardINS_4rows4nameEEEv", "forwardINS0_10CachedKeysINS_4rows4nameEEEEEv"),
    ],
    ids=("sm80", "sm90"),
)
def test_registers_are_those_of_the_kernel_that_is_measured(
    tmp_path, monkeypatch, kernel, of_caches
):
    used = {"combineI4halfE": 300, of_caches: 246, kernel: 236}
    lines = [
        f" Function {name}:\n  REG:{registers} STACK:8 SHARED:1024 LOCAL:4 CONSTANT[0]:960"
        for name, registers in used.items()
    ]
    program = tmp_path / "cuobjdump"
    program.write_text("#!/bin/sh\ncat <<'EOF'\n" + "\n".join(lines) + "\nEOF\n")
    program.chmod(0o755)
    monkeypatch.setattr(toolchain, "program", lambda name: str(program))
    found = optimisation_kernels.machine_code(tmp_path / "x.so")
    assert found == {"registers": 236.0, "spilled_bytes": 12.0}


def test_a_folder_must_have_one_library_of_a_row(tmp_path):
    first, second = STEPS[5].row, STEPS[4].row  # the name of one begins with that of the other
    assert second.name.startswith(first.name)
    (tmp_path / f"libcute_attention_{second.name}_01234567.so").touch()
    with pytest.raises(BuildError, match=f"has 0 libraries of {first.name}, expected 1"):
        kernel_folder.load(first, tmp_path)
    for digits in ("01234567", "89abcdef"):
        (tmp_path / f"libcute_attention_{first.name}_{digits}.so").touch()
    with pytest.raises(BuildError, match=f"has 2 libraries of {first.name}, expected 1"):
        kernel_folder.load(first, tmp_path)


BUILD = """
import sys
from pathlib import Path
from cute_attention import kernels
from cute_attention.bench import kernel_folder as built, optimisations
folder = Path(sys.argv[1])
row = optimisations.STEPS[0].row
(folder / f"libcute_attention_{row.name}_01234567.so").write_text("of an older build")
path = built.build(row, folder, [90])
assert built.libraries_of(row, folder) == [path], "an older one is gone"
assert built.load(row, folder).name == path.stem.removeprefix("libcute_attention_")
assert len(kernels()) == 1
print(path)
"""


@needs_core
def test_kernels_are_built_in_one_place_and_loaded_in_another(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    environment = os.environ | install_fake(tmp_path) | {"FAKE_NVCC": "library"}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    without = os.environ | {"CUDACXX": "/nowhere", kernel_cache.FOLDER: str(tmp_path / "empty")}
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from cute_attention.bench import kernel_folder as built, optimisations\n"
        "row = optimisations.STEPS[0].row\n"
        "for kernel in built.load(row, Path(sys.argv[1])), built.load_file("
        "*built.libraries_of(row, Path(sys.argv[1]))):\n"
        "    assert (kernel.tile_m, kernel.stages) == (64, 1)\n"
        "    assert kernel.on_request == (sys.argv[2] == 'loaded now')\n"
    )
    for told, path in (("loaded now", ""), ("a plug-in", str(elsewhere))):
        done = subprocess.run(
            [sys.executable, "-c", code, str(elsewhere), told],
            env=without | {"CUTE_ATTENTION_KERNEL_PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_the_lab_predicts_the_first_steps():
    pytest.importorskip("pycute")
    found, missing = optimisation_lab.predicted(STEPS[:2])
    assert missing == ""
    plain, swizzled = (found[step.row.name] for step in STEPS[:2])
    assert plain | {"conflicts": 0} == swizzled
    # 2 heads, 8 tiles of 64 queries, 32 of 32 keys; a warp of 32 queries loads 2 x 8 fragments of Q
    # and, of K and V, 2 x 8 and 8 x 2 for each of them.
    assert plain["ldmatrix"] == 2 * 8 * 32 * 2 * (16 + 16 + 16)
    assert plain["conflicts"] == 7 * 4 * plain["ldmatrix"]
    # S has 512 x 1024 scores with 128 columns each, O the same again.
    assert plain["mma"] == 2 * 2 * 512 * 1024 * 128 // (16 * 8 * 16)
    assert plain["shared_memory"] == 2 * 128 * (64 + 32 + 32)


def test_steps_are_measured_beside_flash_attention_2(tmp_path, monkeypatch, capsys):
    """What runs on a GPU, on a CPU: the reference backend stands in for the kernels of the steps,
    of which one is not built."""
    device = torch.device("cpu")
    kernels = {
        step.row.name: SimpleNamespace(name=f"{step.row.name}_0", arch="sm80") for step in STEPS
    }

    def kernel_of(step, args):
        if step.name == "+ swizzle":
            raise BuildError("no such library\nand more lines")
        return kernels[step.row.name]

    def counted(found, files):
        assert len(found) == 7 and files == []
        return {STEPS[0].row.name: {"counted_instructions": 5.0}}, ""

    monkeypatch.setattr(optimisation_command, "_kernel", kernel_of)
    monkeypatch.setattr(optimisation_command.StepContender, "missing", lambda self, device: None)
    monkeypatch.setattr(
        optimisation_command.StepContender,
        "_options",
        lambda self, point, **extra: {"causal": point.causal, "backend": "reference", **extra},
    )
    monkeypatch.setattr(optimisation_command, "PEERS", ("fa2", "flash"))
    monkeypatch.setattr(optimisation_lab, "counted", counted)
    words = f"steps --architectures sm80 --rounds 2 --time-ms 1 --kernels {tmp_path} --quiet"
    args = make_parser().parse_args(words.split())
    point = Point(batch=1, heads=2, seqlen_q=64, head_dim=16, dtype="fp32")
    figures = {STEPS[0].row.name: {"conflicts": 7.0}}
    environment = describe(device)
    console = make_console()
    steps = chosen(["sm80"])
    args.json = tmp_path / "steps.json"
    with Report("steps", args, environment, console, 1) as report:
        optimisation_command._measure(steps, [point], figures, report, args, device, environment)
    assert figures[STEPS[0].row.name] == {"conflicts": 7.0, "counted_instructions": 5.0}
    found = {row.contender: row for row in report.rows}
    assert list(found) == [
        *(step.name for step in steps if step.name != "+ swizzle"),
        *("flash", "+ swizzle"),
    ]
    assert found["+ swizzle"].reason == "no such library" and not found["+ swizzle"].metrics
    assert found["flash"].role == PEER and found["flash"].metrics["tflops"] > 0
    for step in steps:
        row = found[step.name]
        assert row.case == step.row.name
        if step.name != "+ swizzle":
            assert row.metrics["tflops"] > 0 and row.role == OURS, row.reason
            assert row.command.startswith("python -m cute_attention bench steps")
    head, lines = cells(report.rows)
    assert head == ["step", "TFLOP/s", "of FlashAttention-2"] and len(lines) == 8
