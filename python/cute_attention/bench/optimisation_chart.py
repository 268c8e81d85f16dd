"""The chart of `bench steps`: a bar for each step, and the bank conflicts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from .chart_style import clean, save, style
from .contenders import PEER
from .optimisation_report import with_peer
from .results import Row


def plot_steps(path: Path, rows: Sequence[Row], machine: str) -> None:
    """Draws the steps at the first point: TFLOP/s, where they were measured, and the bank conflicts
    of ldmatrix that the layout lab predicts."""
    rows = [row for row in rows if row.point == rows[0].point]
    steps = with_peer(rows)
    measured = any("tflops" in known for _, known in steps)
    panels = [("tflops", "TFLOP/s")] if measured else []
    panels.append(("conflicts", "bank conflicts of ldmatrix, predicted"))
    size = (5.2 * len(panels) + 2.2, 0.32 * len(steps) + 1.4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    names = [row.contender for row, _ in steps]
    colours = [style(row.case.partition("_")[0], row.role)["color"] for row, _ in steps]
    for axis, (name, title) in zip(axes[0], panels, strict=True):
        values = [known.get(name, 0.0) for _, known in steps]
        axis.barh(range(len(steps)), values, color=colours)
        axis.set_yticks(range(len(steps)), names)
        axis.set_xlabel(title)
        clean(axis, "x")
    axes[0][0].invert_yaxis()
    peer = next((row for row in rows if row.role == PEER and "tflops" in row.metrics), None)
    if peer:
        axes[0][0].axvline(peer.metrics["tflops"], color="#8c6bb1", linestyle="--")
        axes[0][0].set_title("dashed: FlashAttention-2", fontsize=9, loc="left")
    where = f", on {machine}" if measured else ""
    save(figure, path, f"From a plain kernel to the full one{where}", [])
