"""For tests of the tuner: a search that is small, rows of figures, and a process with a compiler
that is none (fake_nvcc.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from built_rows import install_fake
from cute_attention.bench.points import Point
from cute_attention.bench.results import Row as Figures
from cute_attention.native import rows
from cute_attention.rows import Row
from cute_attention.tune.measure import TO_PRESENT
from cute_attention.tune.plan import Entry, Search
from cute_attention.tune.subjects import Subject

PRESENT = next(row for row in rows.table() if row.name == "sm80_fwd_bf16_d64")
SHORT = Point(2, 4, 100, 64)
LONG = Point(1, 4, 300, 64, causal=True)


def entry(name: str, **changes: int | str) -> Entry:
    """A candidate that is compiled under a name."""
    return Entry(Row.of(PRESENT.name, **changes).columns, 1.0, name, f"{name}.so")


def search(*candidates: Entry) -> Search:
    """A search of two points, with the present row and candidates."""
    return Search(Subject(PRESENT, (SHORT, LONG)), (entry("present"), *candidates))


def figure(name: str, point: Point, tflops: float, to_present: float) -> Figures:
    """What was measured of a kernel at a point."""
    metrics = {"tflops": tflops, "time_ms": 1 / tflops, TO_PRESENT: to_present}
    return Figures(point, name, "ours", "fwd", metrics=metrics, samples=(1 / tflops,))


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, since a library is never unloaded, with the fake compiler."""
    variables = os.environ | install_fake(folder) | {"FAKE_NVCC": "library"} | environment
    variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300
    )


UNPROVEN = """
from cute_attention.rows import candidates
candidates._fault = lambda candidate: ""
from cute_attention.cli import main
"""
SHAPE = (
    "--arch sm80 --batch 1 --heads 2 --head-dims 64 --seqlens 64,96 --masks full --dtypes fp16 "
    "--candidates 2 --jobs 1 --minutes 1"
)


def tune(folder: Path, text: str, more: str = "", **environment: str) -> str:
    """The output of the command in a process of its own."""
    code = f"{UNPROVEN}{more}\nraise SystemExit(main(['tune', *{text!r}.split()]))"
    done = run(folder, code, **environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def entries(folder: Path) -> list[dict]:
    (search,) = manifest(folder)["searches"]
    return search["entries"]
