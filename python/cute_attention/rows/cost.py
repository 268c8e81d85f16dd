"""What rows are expected to take, before they are compiled and wherever the GPU is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import geometric_mean

from ..native import core
from ..native.core import Device
from ..native.rows import TableRow
from ..problem import Problem
from .ranges import operand_bytes

# For a machine without a GPU: the chips for which the families were written.
_TYPICAL = {
    "sm80": Device(0, "NVIDIA A100", 80, 108, 163 * 1024, 164 * 1024, 40 * 2**20),
    "sm90": Device(0, "NVIDIA H200", 90, 132, 227 * 1024, 228 * 1024, 50 * 2**20),
}
# Products of a tile that have head_dim and head_dim_v as one of their sizes: S and O forward; S,
# dQ and dK, dP and dV backward.
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}


def typical_device(arch: str) -> Device:
    """A GPU for which estimates are made where there is none."""
    return _TYPICAL[arch]


def estimate_us(row: TableRow, problem: Problem, device: Device) -> float:
    """What the cost model expects of a row, to compare rows of a family with.

    The model is one of forward rows: a CTA has a tile of queries and visits tiles of keys. A
    backward CTA has a tile of keys and visits tiles of queries, so it is asked about as that
    forward, with queries and keys exchanged, and of head dims that stand for all its products.

    Raises:
        OSError: the package was installed without its core.
        ValueError: a size that the core cannot take.
    """
    times_qk, times_v = _PRODUCTS[row.direction]
    asked = dataclasses.replace(
        row, head_dim=times_qk * row.head_dim, head_dim_v=times_v * row.head_dim_v
    )
    if row.direction == "backward":
        asked = dataclasses.replace(asked, tile_m=row.tile_n, tile_n=row.tile_m)
        problem = problem._replace(
            seqlen_q=problem.seqlen_k,
            seqlen_k=problem.seqlen_q,
            window_left=problem.window_right,
            window_right=problem.window_left,
        )
    return core.estimate_us(problem, asked, 32 * row.warps, operand_bytes(row), device)


def relative_estimate(
    row: TableRow, present: TableRow, problems: Sequence[Problem], device: Device
) -> float:
    """The estimate over that of the present row: the geometric mean over problems with work."""
    ratios = [
        estimate_us(row, problem, device) / expected
        for problem in problems
        if (expected := estimate_us(present, problem, device)) > 0
    ]
    return geometric_mean(ratios) if ratios else 1.0
