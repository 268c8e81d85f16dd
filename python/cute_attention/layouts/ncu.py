"""`check --ncu`: the bank conflicts that a GPU counts, beside those that the model predicts."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_attention.layouts.checks import Report, bank_phases
from cute_attention.layouts.errors import LayoutError
from cute_attention.layouts.launch import HEADS, TILES_M, TILES_N
from cute_attention.layouts.model import Kernel
from cute_attention.layouts.trace import TileCopy, operand_copies, tile_copies

# What is counted, by the name it has in the table.
METRICS = {
    "ldmatrix": "smsp__inst_executed_op_ldsm.sum",
    "load conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
COMPARED = ("ldmatrix", "load conflicts", "store conflicts")
TOLERANCE = 0.01  # of the wavefronts: other traffic in the same pipe is counted now and then


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured, as a table."""

    text: str
    agrees: bool


def _times(kernel: Kernel, copy: TileCopy) -> int:
    """How often the launch of launch.py runs a copy of a tile."""
    tiles = HEADS * TILES_M
    walked = copy.kind == "operand" or copy.tile.tensor in ("k", "v")
    return tiles * TILES_N if walked else tiles


def predicted(kernel: Kernel) -> dict[str, int]:
    """The counters of one launch, by the layouts. cp.async is a load of global memory here."""
    counts = dict.fromkeys(METRICS, 0)
    for copy in [*tile_copies(kernel), *operand_copies(kernel)]:
        passes = bank_phases(copy)
        times = _times(kernel, copy)
        if copy.instruction.startswith("ldmatrix"):
            counts["ldmatrix"] += times * passes.shape[0] * passes.shape[1]
        if copy.instruction == "cp.async":
            continue
        side = "store" if copy.kind == "accumulator" else "load"
        counts[f"{side} conflicts"] += times * int((passes - 1).sum())
        counts[f"{side} wavefronts"] += times * int(passes.sum())
    return counts


def find_ncu() -> str:
    """The Nsight Compute command line."""
    places = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu"]
    places += sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True)
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    raise LayoutError("check --ncu: Nsight Compute was not found: put `ncu` on the PATH")


def command(names: Sequence[str], ncu: str = "ncu") -> list[str]:
    """What measures these rows: it prints the counters as CSV."""
    return [
        *(ncu, "--csv", "--clock-control", "none", "--target-processes", "all"),
        *("--kernel-name-base", "mangled", "--metrics", ",".join(METRICS.values())),
        *(sys.executable, "-m", "cute_attention.layouts.launch", *names),
    ]


def measure(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Counters of each row's launch."""
    result = subprocess.run(command(names, find_ncu()), capture_output=True, text=True)
    if result.returncode != 0 or "==ERROR==" in result.stdout + result.stderr:
        raise LayoutError(f"check --ncu: {(result.stdout + result.stderr)[-1500:]}")
    return parse(result.stdout, names)


def _is_row(kernel: str, row: str) -> bool:
    """Whether a kernel has the name of a row; mangled, a type is its length and its letters."""
    return re.search(rf"(\b|{len(row)}){row}(E|\b)", kernel) is not None


def parse(output: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Counters by row, from the CSV that ncu prints; launches of other kernels are left out."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    columns = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, float]] = {}
    for line in csv.DictReader(lines):
        kernel = line["Kernel Name"]
        row = next((name for name in names if _is_row(kernel, name)), None)
        value = line["Metric Value"].replace(",", "")
        if row and line["Metric Name"] in columns and re.fullmatch(r"[0-9.]+", value):
            found.setdefault(row, {})[columns[line["Metric Name"]]] = float(value)
    return found


def compare(reports: Sequence[Report], counters: Path | None = None) -> Comparison:
    """Measures every forward row of the reports, or reads what was measured, and sets it beside
    its prediction."""
    kernels = {r.kernel.name: r.kernel for r in reports if r.kernel.row.direction == "forward"}
    names = list(kernels)
    return table(kernels, parse(counters.read_text(), names) if counters else measure(names))


def table(kernels: dict[str, Kernel], measured: dict[str, dict[str, float]]) -> Comparison:
    """Predicted / measured of each row and counter."""
    lines = ["| row | " + " | ".join(METRICS) + " | agrees |"]
    lines.append("|---" * (len(METRICS) + 2) + "|")
    agrees = bool(kernels)
    for name, kernel in kernels.items():
        if name not in measured:
            lines.append(f"| {name} | not launched: another row served the call |" + " |" * 5)
            continue
        expected, counted = predicted(kernel), measured[name]
        room = TOLERANCE * (expected["load wavefronts"] + expected["store wavefronts"]) + 1
        holds = all(
            key in counted and abs(counted[key] - expected[key]) <= room for key in COMPARED
        )
        agrees &= holds
        cells = [f"{expected[key]} / {counted.get(key, float('nan')):.0f}" for key in METRICS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if holds else 'NO'} |")
    return Comparison("predicted / measured\n" + "\n".join(lines), agrees)
