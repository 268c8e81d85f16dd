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
from cute_attention.layouts.model import ELEMENT_BYTES, Kernel
from cute_attention.layouts.numbers import number_passes, row_exchanges, row_numbers
from cute_attention.layouts.trace import TileCopy, operand_copies, tile_copies

# What is counted, by the name it has in the table.
METRICS = {
    "ldmatrix": "smsp__inst_executed_op_ldsm.sum",
    "load conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
# Of all wavefronts: accesses that collide with what cp.async and TMA write are counted as
# conflicts, another number at each launch.
TOLERANCE = 0.01
WAVEFRONT_BYTES = 128


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured, as a table."""

    text: str
    agrees: bool


# What is written once a tile of queries or of keys; all else is done once a tile of scores.
_ONCE_A_TILE = {"o": TILES_M, "grad_q": TILES_M, "grad_k": TILES_N, "grad_v": TILES_N}


def _times(kernel: Kernel, copy: TileCopy) -> int:
    """How often the launch of launch.py runs a copy of a tile."""
    each = HEADS * TILES_M * TILES_N
    return (
        each
        if copy.kind == "operand"
        else HEADS * _ONCE_A_TILE.get(copy.tile.tensor, each // HEADS)
    )


def predicted(kernel: Kernel) -> dict[str, int]:
    """The counters of one launch, by the layouts, over all kernels of the row.

    What cp.async and TMA write and WGMMA reads is not counted by the hardware as stores and loads
    of shared memory, and so it is not here.
    """
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
    for numbers in row_numbers(kernel):
        passes = number_passes(numbers)
        counts["load conflicts"] += HEADS * TILES_M * TILES_N * int((passes - 1).sum())
        counts["load wavefronts"] += HEADS * TILES_M * TILES_N * int(passes.sum())
    for exchange in row_exchanges(kernel):
        times = HEADS * TILES_M * 2  # the maxima of the first tile, the sums of all
        for side, passes in (("store", exchange.store_passes), ("load", exchange.load_passes)):
            counts[f"{side} conflicts"] += times * int((passes - 1).sum())
            counts[f"{side} wavefronts"] += times * int(passes.sum())
    return counts


def _tile_wavefronts(kernel: Kernel) -> int:
    """What TMA writes and WGMMA reads in that launch, in wavefronts of 128 bytes."""
    total = 0
    for product in kernel.products:
        m, n, k = product["tile"]
        for side, rows in (("a", m), ("b", n)):
            if product.get(side, {}).get("from") == "descriptors":
                readers = product["warpgroups"] if side == "b" else 1
                total += (1 + readers) * rows * k * ELEMENT_BYTES // WAVEFRONT_BYTES
    return HEADS * TILES_M * TILES_N * total


def _agrees(kernel: Kernel, expected: dict[str, int], counted: dict[str, float]) -> bool:
    """Each counter within the tolerance. Wavefronts that are not predicted are no layout's: the
    tiles that an sm90 producer announces pass through shared memory too."""
    wavefronts = expected["load wavefronts"] + expected["store wavefronts"]
    room = TOLERANCE * (wavefronts + _tile_wavefronts(kernel)) + 1
    keys = [key for key in METRICS if expected[key] or "wavefronts" not in key]
    return all(key in counted and abs(counted[key] - expected[key]) <= room for key in keys)


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
        *("--kernel-name-base", "mangled", "--kernel-name", "regex:sm[0-9]+_(fwd|bwd)_"),
        *("--metrics", ",".join(METRICS.values())),
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
    """Counters by row, from the CSV that ncu prints, summed over the row's kernels; those of other
    kernels are left out."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    columns = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, float]] = {}
    for line in csv.DictReader(lines):
        kernel = line["Kernel Name"]
        row = next((name for name in names if _is_row(kernel, name)), None)
        value = line["Metric Value"].replace(",", "")
        if row and line["Metric Name"] in columns and re.fullmatch(r"[0-9.]+", value):
            counters, column = found.setdefault(row, {}), columns[line["Metric Name"]]
            counters[column] = counters.get(column, 0.0) + float(value)
    return found


def compare(reports: Sequence[Report], counters: Path | None = None) -> Comparison:
    """Measures every row of the reports, or reads what was measured, and sets it beside its
    prediction."""
    kernels = {report.kernel.name: report.kernel for report in reports}
    names = list(kernels)
    return table(kernels, parse(counters.read_text(), names) if counters else measure(names))


def table(kernels: dict[str, Kernel], measured: dict[str, dict[str, float]]) -> Comparison:
    """Predicted / measured of each row and counter."""
    lines = ["| row | " + " | ".join(METRICS) + " | agrees |"]
    lines.append("|---" * (len(METRICS) + 2) + "|")
    agrees = bool(kernels)
    for name, kernel in kernels.items():
        if name not in measured:
            lines.append(
                f"| {name} | not launched: it is not built, or no kernel for this GPU |" + " |" * 5
            )
            continue
        expected, counted = predicted(kernel), measured[name]
        holds = _agrees(kernel, expected, counted)
        agrees &= holds
        cells = [f"{expected[key]} / {counted.get(key, float('nan')):.0f}" for key in METRICS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if holds else 'NO'} |")
    return Comparison("predicted / measured\n" + "\n".join(lines), agrees)
