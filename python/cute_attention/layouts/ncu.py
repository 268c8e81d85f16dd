"""`check --ncu`: the bank conflicts that a GPU counts, beside those that the model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cute_attention.layouts.checks import Report, bank_phases
from cute_attention.layouts.counters import METRICS, measure, parse
from cute_attention.layouts.launch import HEADS, TILES_M, TILES_N
from cute_attention.layouts.model import ELEMENT_BYTES, Kernel
from cute_attention.layouts.numbers import number_passes, row_exchanges, row_numbers
from cute_attention.layouts.trace import TileCopy, accumulator_elements, operand_copies, tile_copies

WAVEFRONT_BYTES = 128
WARPGROUP = 128  # threads


@dataclass(frozen=True)
class Comparison:
    """The table of predicted and measured counters, and whether they agree."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class Call:
    """A call without a mask, of whole tiles."""

    heads: int  # of all sequences
    queries: int
    keys: int

    def tiles(self, kernel: Kernel) -> tuple[int, int]:
        """How many tiles of queries, and how many of keys, it has for a kernel."""
        m, n = kernel.tile
        return self.queries // m, self.keys // n


def call_of_launch(kernel: Kernel) -> Call:
    """The call of launch.py. The tiles of one of several kernels of a row may be others than those
    of the row."""
    return Call(HEADS, TILES_M * kernel.row.tile_m, TILES_N * kernel.row.tile_n)


def _times(kernel: Kernel, copy: TileCopy, call: Call) -> int:
    """How often a call runs a copy of a tile."""
    if kernel.row.arch == "sm90" and copy.tile.tensor == "o":
        return 0  # in a call as small as that of launch.py threads store O (sm90/output_boxes.h)
    m, n = call.tiles(kernel)
    # Copies that run once for each tile of queries or of keys. All others run for each tile of
    # scores.
    once_a_tile = {"o": m, "grad_q": m, "grad_k": n, "grad_v": n}
    return call.heads * (
        m * n if copy.kind == "operand" else once_a_tile.get(copy.tile.tensor, m * n)
    )


def predicted(kernel: Kernel, call: Call | None = None) -> dict[str, int]:
    """The counters of a call, by default that of launch.py, that follow from a kernel's layouts.
    The counters of a row without a named kernel are those of all its kernels. They do not count
    what cp.async and TMA write."""
    call = call or call_of_launch(kernel)
    counts = dict.fromkeys(METRICS, 0)
    tiles_m, tiles_n = call.tiles(kernel)
    for copy in [*tile_copies(kernel), *operand_copies(kernel)]:
        passes = bank_phases(copy)
        times = _times(kernel, copy, call)
        if copy.instruction.startswith("ldmatrix"):
            counts["ldmatrix"] += times * passes.shape[0] * passes.shape[1]
            counts["ldmatrix conflicts"] += times * int((passes - 1).sum())
            counts["ldmatrix wavefronts"] += times * int(passes.sum())
        elif copy.instruction != "cp.async":
            side = "store" if copy.kind == "accumulator" else "load"
            counts[f"{side} wavefronts"] += times * int(passes.sum())
    for numbers in row_numbers(kernel):
        times = call.heads * tiles_m * tiles_n
        counts["load wavefronts"] += times * int(number_passes(numbers).sum())
    for exchange in row_exchanges(kernel):
        times = call.heads * tiles_m * 2  # the maxima of the first tile, the sums of all
        counts["store wavefronts"] += times * int(exchange.store_passes.sum())
        counts["load wavefronts"] += times * int(exchange.load_passes.sum())
    counts["WGMMA wavefronts"] = _descriptor_wavefronts(kernel, call)
    return counts


def _descriptor_wavefronts(kernel: Kernel, call: Call) -> int:
    """The wavefronts with which WGMMA reads shared memory. For each tile of scores each warpgroup
    reads its part of A and its part of B: A once for each WGMMA beside which another has the next
    columns. For each block of keys a product that is one step late is computed once more than there
    are tiles of queries."""
    total = 0
    tiles_m, tiles_n = call.tiles(kernel)
    for product in kernel.products:
        times = call.heads * tiles_n * (tiles_m + product.get("late", False))
        a, b = product.get("a", {}), product.get("b", {})
        for operand in (a, b):
            if operand.get("from") == "descriptors":
                warpgroups = accumulator_elements(product).shape[0] // WARPGROUP
                blocks = np.array(operand["starts"])[0].size  # of 16 k
                if operand is a:
                    blocks *= len(b["starts"][0])
                size = warpgroups * blocks * operand["rows"] * 16 * ELEMENT_BYTES
                total += times * size // WAVEFRONT_BYTES
    return total


def _compared(kernel: Kernel) -> list[str]:
    """The counters of a row that its layouts decide. In an sm90 kernel loads and stores are not
    among them, because they also move what warps tell each other: the tiles that the producer
    announces, and in the backward the block of keys. In an sm80 kernel there is no WGMMA."""
    ldmatrix = [key for key in METRICS if key.startswith("ldmatrix")]
    if kernel.row.arch == "sm90":
        return [*ldmatrix, "WGMMA wavefronts"]
    return [*ldmatrix, "load wavefronts", "store wavefronts"]


def compare(reports: Sequence[Report], counters: Path | None = None) -> Comparison:
    """Measures every row of the reports, or reads what was measured, and sets it beside its
    prediction."""
    kernels = {report.kernel.name: report.kernel for report in reports}
    names = list(kernels)
    return table(kernels, parse(counters.read_text(), names) if counters else measure(names))


def table(kernels: dict[str, Kernel], measured: dict[str, dict[str, float]]) -> Comparison:
    """Predicted / measured of each row and counter that its layouts decide."""
    lines = ["| row | " + " | ".join(METRICS) + " | collisions | agrees |"]
    lines.append("|---" * (len(METRICS) + 3) + "|")
    agrees = bool(kernels)
    for name, kernel in kernels.items():
        if name not in measured:
            why = "not launched: it is not built, or no kernel for this GPU"
            lines.append(f"| {name} | {why} |" + " |" * (len(METRICS) + 1))
            continue
        expected, counted = predicted(kernel), measured[name]
        compared = _compared(kernel)
        holds = all(counted.get(key) == expected[key] for key in compared)
        agrees &= holds
        cells = [
            f"{expected[key]} / {counted.get(key, float('nan')):.0f}" if key in compared else ""
            for key in METRICS
        ]
        cells.append(f"{counted.get('collisions', float('nan')):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if holds else 'NO'} |")
    return Comparison("predicted / measured\n" + "\n".join(lines), agrees)
