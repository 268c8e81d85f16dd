"""`bench speed --build`: another build of the package, in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_attention
from cute_attention.bench.builds import Build, BuildProcess
from cute_attention.cli.bench import main
from cute_attention.timing import median

SHAPE = "--device cpu --batch 1 --heads 2 --head-dims 64 --masks full --dtypes fp32 --rounds 2"
# What is added to the package's __init__: a call that does something else.
WRONG = """
_right = attention
def attention(*arguments, **options):
    return 1.5 * _right(*arguments, **options)
"""
ENDS = """
import os
def attention(q, *arguments, **options):
    os._exit(3)
"""


def build(folder: Path, more: str = "") -> Path:
    """A copy of the package, with something added to it."""
    package = Path(cute_attention.__file__).parent
    shutil.copytree(
        package, folder / "cute_attention", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (folder / "cute_attention" / "__init__.py").open("a") as file:
        file.write(more)
    return folder


def measured(tmp_path: Path, builds: dict[str, Path], more: str) -> list[dict[str, Any]]:
    """The rows of a run at a small shape."""
    asked = [f"--build={label}={folder}" for label, folder in builds.items()]
    results = tmp_path / "results.json"
    arguments = ["speed", *SHAPE.split(), *more.split(), *asked, "--json", str(results)]
    assert main([*arguments, "--time-ms", "1"]) == 0
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"]
    return rows


def test_another_build_is_measured_beside_this_one(tmp_path, capsys):
    other = build(tmp_path / "other")
    rows = measured(
        tmp_path,
        {"other": other},
        "--contenders reference,flash --seqlens 128 --direction fwd,bwd",
    )
    names = ["reference", "reference (other)", "flash"]
    assert [row["contender"] for row in rows] == names * 2
    assert [row["role"] for row in rows] == ["ours", "build", "peer"] * 2
    for row in rows:
        assert not row["reason"] and len(row["samples"]) == 2
        assert row["time_ms"] == median(row["samples"]) > 0
    again = f"--contenders reference --build other={other}"
    assert again in rows[1]["command"] and again not in rows[0]["command"]
    said = capsys.readouterr().out
    assert "ours against the best peer at each point" in said
    assert "ours against the other build at each point" in said


def test_a_build_that_computes_something_else_is_refused(tmp_path):
    builds = {"same": build(tmp_path / "same"), "wrong": build(tmp_path / "wrong", WRONG)}
    rows = measured(tmp_path, builds, "--contenders reference --seqlens 64 --direction fwd")
    reasons = {row["contender"]: row["reason"] for row in rows}
    believed = "reference (same), reference"
    assert reasons == {
        "reference": "",
        "reference (same)": "",
        "reference (wrong)": f"its result differs from that of {believed} by 50% (rms)",
    }


def test_a_build_whose_process_ends_stops_nobody(tmp_path):
    rows = measured(
        tmp_path,
        {"bad": build(tmp_path / "bad", ENDS)},
        "--contenders reference --seqlens 64,128 --direction fwd",
    )
    assert [(row["seqlen_q"], row["contender"], row["reason"]) for row in rows] == [
        (64, "reference", ""),
        (64, "reference (bad)", "the process of bad ended with exit code 3"),
        (128, "reference", ""),
        (128, "reference (bad)", "the process of bad ended with exit code 3"),
    ]


def test_kernel_libraries_alone_are_a_build(tmp_path):
    (tmp_path / "libcute_attention_sm90a.so").touch()
    process = BuildProcess(Build.of("kernels", tmp_path), torch.device("cpu"), seed=0)
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        assert f"CUTE_ATTENTION_KERNEL_PATH={tmp_path}" in environment
        point = {"batch": 1, "heads": 1, "seqlen_q": 64, "head_dim": 64, "dtype": "fp32"}
        assert process.ask("cannot_run", "reference", point, "fwd") == ""
    finally:
        process.close()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("base", "'base' is not LABEL=FOLDER"),
        ("=folder", "'=folder' is not LABEL=FOLDER"),
        ("a b=folder", "'a b=folder' is not LABEL=FOLDER"),
        ("a={here} --build a={here}", "--build a: two builds have this label"),
        ("base={empty}", "expected a folder with the package cute_attention, or with kernel"),
        ("base={broken}", "--build base={broken}: the process of base ended with exit code 1"),
        ("base={other}", "__init__.py was imported, not the package in {other}"),
    ],
)
def test_mistakes_are_told(argument, message, tmp_path, capfd):
    places = {name: tmp_path / name for name in ("empty", "broken", "other")}
    for place in places.values():
        place.mkdir()
    for name, text in (("broken", "raise ImportError"), ("other", "__file__ = '/__init__.py'")):
        (places[name] / "cute_attention").mkdir()
        (places[name] / "cute_attention" / "__init__.py").write_text(text)
    (tmp_path / "libcute_attention_sm90a.so").touch()
    asked = argument.format(here=tmp_path, **places).split(" --build ")
    arguments = ["speed", *SHAPE.split(), *(f"--build={build}" for build in asked)]
    try:
        code = main(arguments)
    except SystemExit as exit:  # of argparse
        code = exit.code
    assert code == 2
    assert message.format(**places) in capfd.readouterr().err
