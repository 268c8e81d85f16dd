"""Charts of points that have names: bars, and for many points their speed over the best peer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .chart_style import against, clean, label, line_handles, roles_of, save, style
from .contenders import OURS, PEER
from .points import Point
from .ratios import best, by_point
from .results import Row
from .tables import WHAT

# With more points than this, a chart with a bar for every contender is too tall to be read.
_MOST_BARS = 12


def plot_named(path: Path, rows: Sequence[Row], machine: str) -> None:
    """A chart of points that no line joins."""
    points = {row.point for row in rows}
    if len(points) > _MOST_BARS and any(row.role == PEER for row in rows):
        _plot_relative(path, rows, machine)
    else:
        _plot_bars(path, rows, machine)


def _plot_bars(path: Path, rows: Sequence[Row], machine: str) -> None:
    directions = list(dict.fromkeys(row.what for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    roles = roles_of(rows)
    height = len(points) * (0.17 * len(roles) + 0.22) + 1.3
    size = (5.2 * len(directions) + 2.4, height)
    figure, axes = plt.subplots(1, len(directions), figsize=size, squeeze=False, sharey=True)
    for axis, direction in zip(axes[0], directions, strict=True):
        part = [row for row in rows if row.what == direction]
        _bars(axis, points, part, roles)
        text, colour = against(part)
        axis.set_title(WHAT[direction], fontsize=9, loc="left")
        axis.set_title(text, fontsize=9, loc="right", color=colour, fontweight="bold")
    names = [
        f"{p.label}\n{p.mask} {p.shape_text()}" if p.label else f"{p.mask}\n{p.shape_text()}"
        for p in points
    ]
    axes[0][0].set_yticks(range(len(points)), names, fontsize=8)
    axes[0][0].set_ylim(len(points) - 0.4, -0.6)
    handles = [
        Patch(label=label(name, roles), color=style(name, role)["color"])
        for name, role in roles.items()
    ]
    save(figure, path, f"Attention on {machine}: TFLOP/s, longer is better", handles)


def _bars(axis: Any, points: Sequence[Point], rows: Sequence[Row], roles: dict[str, str]) -> None:
    """Draws a group of bars per point. On our bars stands their speed over the best peer's."""
    thick = 0.86 / len(roles)
    found = {(row.point, row.contender): row.metrics["tflops"] for row in rows}
    peers = {point: best(group, PEER) for (_, point), group in by_point(rows).items()}
    for i, (name, role) in enumerate(roles.items()):
        places = [p + (i - (len(roles) - 1) / 2) * thick for p in range(len(points))]
        values = [found.get((point, name), 0.0) for point in points]
        bars = axis.barh(places, values, 0.92 * thick, color=style(name, role)["color"])
        labels = []
        for point, value in zip(points, values, strict=True):
            peer = peers.get(point)
            ratio = f" ({value / peer.metrics['tflops']:.2f}x)" if role == OURS and peer else ""
            labels.append(f"{value:.3g}{ratio}" if value else "")
        weight = "bold" if role == OURS else "normal"
        axis.bar_label(bars, labels, padding=2, fontsize=7, fontweight=weight)
    axis.set_xlabel("TFLOP/s")
    axis.margins(x=0.16)
    axis.tick_params(axis="y", length=0)
    clean(axis, "x")


def _plot_relative(path: Path, rows: Sequence[Row], machine: str) -> None:
    """A line per point and a column per direction: every contender's speed over the best peer's."""
    directions = list(dict.fromkeys(row.what for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    size = (4.6 * len(directions) + 2.0, 0.21 * len(points) + 1.5)
    figure, axes = plt.subplots(1, len(directions), figsize=size, squeeze=False, sharey=True)
    for axis, direction in zip(axes[0], directions, strict=True):
        part = [row for row in rows if row.what == direction]
        _relative(axis, points, part)
        text, colour = against(part)
        axis.set_title(WHAT[direction], fontsize=9, loc="left")
        axis.set_title(text, fontsize=9, loc="right", color=colour, fontweight="bold")
    names = [point.label or f"{point.mask} {point.shape_text()}" for point in points]
    axes[0][0].set_yticks(range(len(points)), names, fontsize=8)
    axes[0][0].set_ylim(len(points) - 0.4, -0.6)
    title = f"Attention on {machine}: speed over that of the best peer, farther right is better"
    save(figure, path, title, line_handles(roles_of(rows), linestyle="none"))


def _relative(axis: Any, points: Sequence[Point], rows: Sequence[Row]) -> None:
    """One direction. A bar leads from the best peer to our best, green where ours is ahead."""
    ratios = []
    for (_, point), group in by_point(rows).items():
        ours, peer = best(group, OURS), best(group, PEER)
        if peer is None:
            continue
        place, unit = points.index(point), peer.metrics["tflops"]
        for row in group:
            ratio = row.metrics["tflops"] / unit
            ratios.append(ratio)
            mark = style(row.contender, row.role)
            axis.plot(ratio, place, **{**mark, "linestyle": "none", "alpha": 0.85})
        if ours:
            ratio = ours.metrics["tflops"] / unit
            colour = "#1a7f37" if ratio >= 1 else "#b3261e"
            axis.barh(place, ratio - 1, 0.55, left=1, color=colour, alpha=0.35, zorder=1)
            end = axis.get_yaxis_transform()
            axis.text(
                1.01, place, f"{ratio:.2f}", color=colour, fontsize=7.5, va="center", transform=end
            )
    axis.axvline(1, color="#777777", linewidth=1, zorder=1)
    axis.set_xscale("log")
    axis.set_xlim(max(0.1, min(ratios, default=1) / 1.1), max(1.5, *ratios) * 1.1)
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=20))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("speed over the best peer's")
    axis.tick_params(axis="y", length=0)
    clean(axis, "both")
