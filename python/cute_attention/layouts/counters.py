"""What Nsight Compute counts in the kernels of named rows: its command line, and what it prints. It
needs nothing but the kernels: what is predicted of these counters, ncu.py says."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cute_attention.layouts.errors import LayoutError

_WAVEFRONTS = "sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op"
# The counters of Nsight Compute, by their names in the table. It computes them from the addresses
# of each instruction, so they are the same at every launch.
METRICS = {
    "ldmatrix": "smsp__inst_executed_op_ldsm.sum",
    "ldmatrix conflicts": "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm.sum",
    "ldmatrix wavefronts": f"smsp__{_WAVEFRONTS}_ldsm.sum",
    "load wavefronts": f"smsp__{_WAVEFRONTS}_ld.sum",
    "store wavefronts": f"smsp__{_WAVEFRONTS}_st.sum",
    "WGMMA wavefronts": f"sm__{_WAVEFRONTS}_gmma.sum",
}
# Conflicts as the hardware counts them. These include conflicts with data that arrives from global
# memory, which no layout decides: they are printed and not compared.
COLLISIONS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"  # of all warps, which nothing predicts
# MMAs of all warps, WGMMAs among them, and WGMMAs alone. Each of the four warps of a warpgroup
# counts its WGMMA.
MMA = "sm__inst_executed_pipe_tensor_op_hmma.sum"
WGMMA = "sm__inst_executed_pipe_tensor_op_gmma.sum"


def find_ncu() -> str:
    """The Nsight Compute command line."""
    places = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu"]
    places += sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu")), reverse=True)
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    raise LayoutError("Nsight Compute was not found: put `ncu` on the PATH")


def _metrics(names: Sequence[str]) -> list[str]:
    """The counters to ask for. Chips before 9.0 do not know those of WGMMA."""
    wgmma = any(name.startswith("sm90") for name in names)
    asked = (*METRICS.values(), COLLISIONS, INSTRUCTIONS, MMA, WGMMA)
    return [metric for metric in asked if wgmma or "gmma" not in metric]


def command(
    names: Sequence[str],
    ncu: str = "ncu",
    module: str = "cute_attention.layouts.launch",
    arguments: Sequence[str] | None = None,
) -> list[str]:
    """The command line that measures these rows and prints the counters as CSV. What launches them
    is a module of Python with arguments; these are the names where they are left out."""
    return [
        *(ncu, "--csv", "--clock-control", "none", "--target-processes", "all"),
        *("--kernel-name-base", "mangled", "--kernel-name", "regex:sm[0-9]+_(fwd|bwd)_"),
        *("--metrics", ",".join(_metrics(names))),
        *(sys.executable, "-m", module, *(names if arguments is None else arguments)),
    ]


def measure(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The counters of each kernel, ROW or ROW/KERNEL, measured on this GPU."""
    rows = list(dict.fromkeys(name.partition("/")[0] for name in names))
    return parse(run(command(rows, find_ncu())), names)


def run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command line of Nsight Compute prints.

    Raises:
        LayoutError: it fails.
    """
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    if result.returncode != 0 or "==ERROR==" in result.stdout + result.stderr:
        raise LayoutError(f"ncu: {(result.stdout + result.stderr)[-1500:]}")
    return result.stdout


def csv_lines(output: str) -> Iterable[dict[str, str]]:
    """The lines of the CSV that ncu prints among its own and those of the program."""
    return csv.DictReader(line for line in output.splitlines() if line.startswith('"'))


def _is_kernel(function: str, name: str) -> bool:
    """Whether a function is a kernel of the row ROW, or of ROW/KERNEL. Its name is mangled, or as
    ncu prints it: `void grad_kv<sm90_bwd_bf16_d256>(BackwardArguments)`. It is that of the kernel,
    a template with the row as an argument. A mangled name has its length before it."""
    row, _, part = name.partition("/")
    of_row = re.search(rf"(\b|{len(row)}){row}(E|\b)", function) is not None
    of_part = re.search(rf"(\b{part}<|{len(part)}{part}I)", function) is not None
    return of_row and (of_part or not part)


def parse(output: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Counters by name, ROW or ROW/KERNEL, from the CSV that ncu prints. Those of ROW are summed
    over the row's kernels; those of other kernels are left out."""
    columns = {metric: name for name, metric in METRICS.items()}
    columns |= {COLLISIONS: "collisions", INSTRUCTIONS: "instructions", MMA: "mma", WGMMA: "wgmma"}
    found: dict[str, dict[str, float]] = {}
    for line in csv_lines(output):
        function = line["Kernel Name"]
        kernel = next((name for name in names if _is_kernel(function, name)), None)
        value = line["Metric Value"].replace(",", "")
        if kernel and line["Metric Name"] in columns and re.fullmatch(r"[0-9.]+", value):
            counters, column = found.setdefault(kernel, {}), columns[line["Metric Name"]]
            counters[column] = counters.get(column, 0.0) + float(value)
    return found
