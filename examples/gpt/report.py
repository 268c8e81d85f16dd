"""What a person reads: which backend ran and why, the curves as PNG and CSV, the verdict."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import cute_attention

from .model import GPT
from .training import Deviation, Recipe, Run, deviation

_COLOURS = ("#d62728", "#1f77b4")  # ours warm, PyTorch's cool


def backend_report(model: GPT, recipe: Recipe) -> str:
    """Which backend computes the attention of a training step, and why no faster one does."""

    shape = model.shape

    def like(heads: int) -> torch.Tensor:
        size = (recipe.batch, shape.context, heads, shape.head_dim)
        return torch.empty(size, dtype=recipe.dtype, device=recipe.device)

    q, k, v = like(shape.heads), like(shape.heads_kv), like(shape.heads_kv)
    model.train()
    answer = cute_attention.explain(q, k, v, causal=True, **model.attention_options())
    lines = [f"attention  {answer.call}; asked for: {answer.requested}"]
    for direction, reports, chosen in (
        ("forward", answer.forward, answer.chosen),
        ("backward", answer.backward, answer.chosen_backward),
    ):
        kernel = next((row.name for r in reports for row in r.rows if row.chosen), None)
        ran = f"{chosen}, kernel {kernel}" if kernel and chosen != "reference" else chosen
        lines.append(f"  {direction:<8} ran on: {ran}")
        names = [report.backend for report in reports]
        for report in reports[: names.index(chosen) if chosen in names else None]:
            why = "; ".join(report.reasons) or "serves, but was not asked for"
            lines.append(f"           not on: {report.backend}, because {why}")
    return "\n".join(lines)


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One line for each step: its number and the training loss of each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(run.name for run in runs)])
        for step, losses in enumerate(zip(*(run.losses for run in runs), strict=True)):
            writer.writerow([step, *losses])


def plot(path: Path, runs: Sequence[Run], title: str, tolerance: Deviation) -> None:
    """The loss curves; below them, where there are two, how far apart they lie."""
    heights = [3, 1] if len(runs) == 2 else [1]
    figure, panels = plt.subplots(
        len(heights),
        figsize=(8, 4.5 if len(runs) == 1 else 6),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
    )
    curves = panels[0, 0]
    for number, run in enumerate(runs):
        _draw_curve(curves, run, number)
    half = runs[0].held_out[0][1] / 2
    curves.axhline(half, color="#555555", linestyle=":", linewidth=1)
    curves.annotate(
        "half of the start",
        (1, half),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#555555",
    )
    curves.set_ylabel("loss, nats per byte")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False)
    if len(runs) == 2:
        _draw_deviation(panels[1, 0], runs, tolerance)
    panels[-1, 0].set_xlabel("step")
    for panel in panels[:, 0]:
        panel.grid(True, color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_curve(panel: Any, run: Run, number: int) -> None:
    """Ours as a broad line, so that PyTorch's dashes show on it where the two agree."""
    ours = number == 0
    panel.plot(
        run.losses,
        label=f"{run.name}: training",
        color=_COLOURS[number],
        linestyle="-" if ours else "--",
        linewidth=2.4 if ours else 1.0,
    )
    panel.plot(
        *zip(*run.held_out, strict=True),
        label=f"{run.name}: held out",
        color="#111111" if ours else "#7fb8e6",
        linestyle="none",
        marker="o" if ours else "x",
        markersize=6 if ours else 5,
        zorder=3,
    )


def _draw_deviation(panel: Any, runs: Sequence[Run], tolerance: Deviation) -> None:
    apart = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
    panel.semilogy([max(value, 1e-9) for value in apart], color="#555555", linewidth=0.8)
    panel.axhline(tolerance.largest, color=_COLOURS[0], linestyle=":", linewidth=1)
    panel.annotate(
        "tolerance",
        (1, tolerance.largest),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=_COLOURS[0],
    )
    panel.set_ylabel("deviation")


def verdict_on_loss(run: Run) -> tuple[bool, str]:
    """Whether the held-out loss fell to under half of its start, in words."""
    start, end = run.held_out[0][1], run.held_out[-1][1]
    passed = end < start / 2
    return passed, (
        f"{_word(passed)}: in {len(run.losses)} steps the loss on text held out from training went "
        f"from {start:.3f} to {end:.3f} nats per byte, {end / start:.0%} of its start (asked for: "
        f"under 50%). The training loss went from {run.losses[0]:.3f} to {run.end:.3f}."
    )


def verdict_on_curves(ours: Run, other: Run, tolerance: Deviation) -> tuple[bool, str]:
    """Whether the two curves agree, in words."""
    apart = deviation(ours, other)
    passed = apart.within(tolerance)
    return passed, (
        f"{_word(passed)}: from the same seed, the training losses with {other.name} deviate by "
        f"{apart.mean:.2g} in the mean (tolerance {tolerance.mean:g}) and by at most "
        f"{apart.largest:.2g} (tolerance {tolerance.largest:g})."
    )


def _word(passed: bool) -> str:
    return "PASS" if passed else "FAIL"
