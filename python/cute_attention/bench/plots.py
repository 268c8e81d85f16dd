"""Plots as PNG (or any suffix matplotlib writes): ours in strong colours and thick lines, peers in
thin ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from .contenders import OURS
from .points import Point
from .results import Row
from .tables import WHAT, measured_columns, titled

# Ours warm, peers cool or neutral; each contender keeps its colour and marker in every plot.
_STYLES = {
    "sm90": ("#d62728", "o"),
    "sm80": ("#ff7f0e", "s"),
    "reference": ("#b8860b", "D"),
    "fa4": ("#17607a", "^"),
    "fa3": ("#1f77b4", "v"),
    "fa2": ("#7fb8e6", "<"),
    "cudnn": ("#2ca02c", "P"),
    "flash": ("#8c6bb1", "X"),
    "efficient": ("#c49ddb", ">"),
    "flex": ("#17becf", "d"),
    "xformers": ("#a55a4a", "p"),
    "math": ("#7f7f7f", "h"),
    "plain": ("#3f3f3f", "*"),
}


def _style(contender: str, role: str) -> dict[str, Any]:
    name, _, suffix = contender.partition(" ")
    colour, marker = _STYLES.get(name, ("#5b7553", "."))
    ours = role == OURS
    return {
        "color": colour,
        "marker": marker,
        "linewidth": 2.8 if ours else 1.3,
        "markersize": 7 if ours else 5,
        "linestyle": ":" if suffix else "-",
        "zorder": 3 if ours else 2,
    }


def _lengths_axis(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [_length(n) for n in lengths])
    axis.minorticks_off()
    axis.grid(True, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _save(figure: Any, path: Path, title: str, names: dict[str, str]) -> None:
    """Title above, one legend below for all panels, and the file."""
    handles = [
        Line2D([], [], label=titled(name), **_style(name, role)) for name, role in names.items()
    ]
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width / 1.7)))
    lines = -(-len(handles) // columns)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", y=1 - 0.08 / height, va="top")
    below = (0.16 + 0.24 * lines) / height if handles else 0.0
    figure.tight_layout(rect=(0, below, 1, 1 - 0.32 / height))
    if handles:
        figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _roles(rows: Iterable[Row]) -> dict[str, str]:
    return {row.contender: row.role for row in rows if row.metrics}


def _panel_name(point: Point) -> str:
    dim = str(point.head_dim)
    if point.head_dim_v != point.head_dim:
        dim += f"/{point.head_dim_v}"
    return f"head dim {dim}, {point.mask}, {point.dtype}"


def plot_speed(path: Path, rows: Sequence[Row], machine: str) -> None:
    """TFLOP/s against the sequence length, a panel per head dim, mask and direction; bars per point where the
    points do not form such lines."""
    measured = [row for row in rows if row.metrics]
    panels = list(dict.fromkeys(_panel_name(row.point) for row in measured))
    lengths = {row.point.seqlen_q for row in measured}
    named = any(row.point.varlen or row.point.label for row in measured)
    if named or len(lengths) < 3:
        _plot_bars(path, measured, machine)
    else:
        _plot_lines(path, measured, panels, machine)


def _plot_lines(path: Path, rows: Sequence[Row], panels: Sequence[str], machine: str) -> None:
    directions = list(dict.fromkeys(row.what for row in rows))
    columns = min(len(panels), 3)
    lines_per_direction = -(-len(panels) // columns)
    count = lines_per_direction * len(directions)
    figure, axes = plt.subplots(
        count, columns, figsize=(4.4 * columns + 0.4, 2.9 * count + 0.8), squeeze=False
    )
    for index, direction in enumerate(directions):
        for number, panel in enumerate(panels):
            axis = axes[index * lines_per_direction + number // columns][number % columns]
            part = [r for r in rows if r.what == direction and _panel_name(r.point) == panel]
            _lines(axis, part)
            axis.set_title(f"{WHAT[direction]}: {panel}", fontsize=9, loc="left")
            if number % columns == 0:
                axis.set_ylabel("TFLOP/s")
            axis.set_xlabel("sequence length, tokens")
        for number in range(len(panels), lines_per_direction * columns):
            axes[index * lines_per_direction + number // columns][number % columns].axis("off")
    _save(figure, path, f"Speed on {machine}: higher is better", _roles(rows))


def _lines(axis: Any, rows: Sequence[Row]) -> None:
    """One line per contender; points that share a length (several batch sizes) are separate lines'
    points."""
    for name, role in _roles(rows).items():
        part = [row for row in rows if row.contender == name]
        by_tokens: dict[int, list[tuple[int, float]]] = {}
        for row in part:
            tokens = row.point.batch * row.point.seqlen_q
            by_tokens.setdefault(tokens, []).append((row.point.seqlen_q, row.metrics["tflops"]))
        single = all(len(values) == 1 for values in by_tokens.values())
        groups = [[v for vs in by_tokens.values() for v in vs]] if single else by_tokens.values()
        for values in groups:
            xs, ys = zip(*sorted(values), strict=True)
            axis.plot(xs, ys, **_style(name, role))
    _lengths_axis(axis, sorted({row.point.seqlen_q for row in rows}))
    axis.set_ylim(bottom=0)


def _plot_bars(path: Path, rows: Sequence[Row], machine: str) -> None:
    directions = list(dict.fromkeys(row.what for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    names = measured_columns(rows)
    roles = _roles(rows)
    height = len(points) * (0.17 * len(names) + 0.25) + 1.2
    figure, axes = plt.subplots(
        1,
        len(directions),
        figsize=(5.2 * len(directions) + 2.4, height),
        squeeze=False,
        sharey=True,
    )
    thick = 0.86 / max(1, len(names))
    for axis, direction in zip(axes[0], directions, strict=True):
        found = {(r.point, r.contender): r.metrics["tflops"] for r in rows if r.what == direction}
        for i, name in enumerate(names):
            places = [p + (i - (len(names) - 1) / 2) * thick for p in range(len(points))]
            values = [found.get((point, name), 0.0) for point in points]
            colour = _style(name, roles[name])["color"]
            bars = axis.barh(places, values, thick * 0.92, color=colour)
            labels = [f"{v:.3g}" if v else "" for v in values]
            weight = "bold" if roles[name] == OURS else "normal"
            axis.bar_label(bars, labels, padding=2, fontsize=7, fontweight=weight)
        axis.set_title(WHAT[direction], fontsize=9, loc="left")
        axis.set_xlabel("TFLOP/s")
        axis.margins(x=0.12)
        axis.grid(True, axis="x", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    names_of_points = [
        f"{p.label}\n{p.mask} {p.shape_text()}" if p.label else f"{p.mask}\n{p.shape_text()}"
        for p in points
    ]
    axes[0][0].set_yticks(range(len(points)), names_of_points, fontsize=8)
    axes[0][0].invert_yaxis()
    _save(figure, path, f"Speed on {machine}: longer is better", roles)


def plot_growth(
    path: Path, rows: Sequence[Row], metrics: dict[str, str], machine: str, title: str
) -> None:
    """Figures against the sequence length, both axes logarithmic: a row per direction, a column per
    metric.

    `metrics` maps a metric to the label of its axis. A grey line shows what linear growth looks
    like.
    """
    measured = [row for row in rows if row.metrics]
    directions = list(dict.fromkeys(row.what for row in measured))
    figure, axes = plt.subplots(
        max(1, len(directions)),
        len(metrics),
        figsize=(5.0 * len(metrics) + 0.6, 3.4 * max(1, len(directions)) + 0.8),
        squeeze=False,
    )
    for line, direction in zip(axes, directions, strict=False):
        for axis, (metric, label) in zip(line, metrics.items(), strict=True):
            part = [r for r in measured if r.what == direction and r.metrics.get(metric, 0) > 0]
            for name, role in _roles(part).items():
                values = sorted(
                    (r.point.seqlen_q, r.metrics[metric]) for r in part if r.contender == name
                )
                axis.plot(*zip(*values, strict=True), **_style(name, role))
            axis.set_yscale("log")
            _lengths_axis(axis, sorted({row.point.seqlen_q for row in part}))
            _guides(axis, part, metric)
            axis.set_title(f"{WHAT[direction]}: {label}", fontsize=9, loc="left")
            axis.set_ylabel(label)
            axis.set_xlabel("sequence length, tokens")
    _save(figure, path, f"{title} on {machine}: lower is better", _roles(measured))


def _guides(axis: Any, rows: Sequence[Row], metric: str) -> None:
    """Slopes of linear and quadratic growth, from the smallest figure of the shortest sequence."""
    lengths = sorted({row.point.seqlen_q for row in rows})
    if len(lengths) < 2:
        return
    base = min(row.metrics[metric] for row in rows if row.point.seqlen_q == lengths[0])
    low, high = axis.get_ylim()
    for power, text in ((1, "linear"), (2, "quadratic")):
        ys = [base * (n / lengths[0]) ** power for n in lengths]
        axis.plot(lengths, ys, color="#aaaaaa", linewidth=0.9, linestyle="--", zorder=1)
        axis.annotate(
            text,
            (lengths[-1], ys[-1]),
            xytext=(-2, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7,
            color="#888888",
        )
    axis.set_ylim(low, max(high, base * lengths[-1] / lengths[0] * 1.5))
