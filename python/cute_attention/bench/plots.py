"""Charts of results: ours in warm colours and thick lines, everybody else thin and cool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .chart_style import against, length, lengths_axis, line_handles, roles_of, save, style
from .named_charts import plot_named
from .results import Row
from .tables import WHAT


def plot_speed(path: Path, rows: Sequence[Row], machine: str) -> None:
    """Plots TFLOP/s against the sequence length, with a panel per direction, mask and head dim.

    Points that do not form such lines (named models, packed documents) are drawn as bars or
    marks.
    """
    measured = [row for row in rows if row.metrics]
    lengths = {row.point.seqlen_q for row in measured}
    named = any(row.point.varlen or row.point.label for row in measured)
    panels = _panels(measured)
    tangled = any(  # a line would pass twice through one length, with other heads for example
        len({(row.contender, row.point.seqlen_q) for row in part}) < len(part)
        for part in panels.values()
    )
    if named or tangled or len(lengths) < 3:
        plot_named(path, measured, machine)
    else:
        _plot_lines(path, panels, machine)


def _panels(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (line, column) of the figure: directions and masks down, head dims across; masks
    across where there is one head dim."""
    places = {(row.point.key(), row.what) for row in rows}
    grouped = {(p.seqlen_q, p.mask, p.head_dim, p.head_dim_v, p.dtype, w) for p, w in places}
    by_tokens = len(grouped) < len(places)  # several batch sizes share a length
    dims = {(row.point.head_dim, row.point.head_dim_v, row.point.dtype) for row in rows}
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(WHAT).index(row.what)):
        point = row.point
        dim_v = "" if point.head_dim == point.head_dim_v else f"/{point.head_dim_v}"
        column = f"head dim {point.head_dim}{dim_v}, {point.dtype}"
        tokens = f", {length(point.batch * point.seqlen_q)} tokens" if by_tokens else ""
        if len(dims) == 1:
            place = f"{WHAT[row.what]}{tokens}", f"{point.mask}, {column}"
        else:
            place = f"{WHAT[row.what]}, {point.mask}{tokens}", column
        panels.setdefault(place, []).append(row)
    return panels


def _plot_lines(path: Path, panels: dict[tuple[str, str], list[Row]], machine: str) -> None:
    lines = list(dict.fromkeys(line for line, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    size = (max(7.0, 3.3 * len(columns) + 0.5), 1.95 * len(lines) + 1.0)
    figure, axes = plt.subplots(
        len(lines), len(columns), figsize=size, squeeze=False, sharex="col", sharey="row"
    )
    for line, row_of_axes in zip(lines, axes, strict=True):
        for column, axis in zip(columns, row_of_axes, strict=True):
            part = panels.get((line, column))
            if not part:
                axis.axis("off")
                continue
            _speed_panel(axis, part)
            axis.set_title(f"{line}, {column}", fontsize=9, loc="left")
            axis.label_outer()
        row_of_axes[0].set_ylabel("TFLOP/s")
        row_of_axes[0].set_ylim(0, 1.14 * row_of_axes[0].get_ylim()[1])
    title = f"Attention on {machine}: TFLOP/s, higher is better"
    rows = [row for part in panels.values() for row in part]
    save(figure, path, title, line_handles(roles_of(rows)))


def _speed_panel(axis: Any, rows: Sequence[Row]) -> None:
    for name, role in roles_of(rows).items():
        values = sorted(
            (r.point.seqlen_q, r.metrics["tflops"]) for r in rows if r.contender == name
        )
        axis.plot(*zip(*values, strict=True), **style(name, role))
    lengths_axis(axis, sorted({row.point.seqlen_q for row in rows}))
    text, colour = against(rows)
    place = {"xy": (0.02, 0.98), "xycoords": "axes fraction", "va": "top"}
    axis.annotate(text, color=colour, fontsize=8.5, fontweight="bold", **place)


def plot_growth(
    path: Path, rows: Sequence[Row], metrics: dict[str, str], machine: str, title: str
) -> None:
    """Figures against the sequence length, both axes logarithmic: a row per direction, a column
    per metric. `metrics` maps each to the label of its axis."""
    measured = [row for row in rows if row.metrics]
    directions = list(dict.fromkeys(row.what for row in measured))
    size = (5.6 * len(metrics) + 0.6, 3.4 * len(directions) + 0.9)
    figure, axes = plt.subplots(len(directions), len(metrics), figsize=size, squeeze=False)
    for line, direction in zip(axes, directions, strict=True):
        for axis, (metric, label) in zip(line, metrics.items(), strict=True):
            part = [r for r in measured if r.what == direction and r.metrics.get(metric, 0) > 0]
            _growth_panel(axis, part, metric)
            axis.set_title(f"{WHAT[direction]}: {label}", fontsize=9, loc="left")
            axis.set_ylabel(label)
    title = (
        f"{title}\n{machine}, {measured[0].point.dtype}, {measured[0].point.mask}: lower is better"
    )
    save(figure, path, title, line_handles(roles_of(measured)))


def _growth_panel(axis: Any, rows: Sequence[Row], metric: str) -> None:
    for name, role in roles_of(rows).items():
        values = sorted((r.point.seqlen_q, r.metrics[metric]) for r in rows if r.contender == name)
        axis.plot(*zip(*values, strict=True), **style(name, role))
    axis.set_yscale("log")
    lengths = sorted({row.point.seqlen_q for row in rows})
    lengths_axis(axis, lengths)
    figures = [row.metrics[metric] for row in rows]
    axis.set_ylim(min(figures) / 1.6, max(figures) * 1.6)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    base = min(r.metrics[metric] for r in rows if r.point.seqlen_q == lengths[0])
    for power, text in ((1, "linear"), (2, "quadratic")):
        _guide(axis, lengths, base, power, text)


def _guide(axis: Any, lengths: Sequence[int], base: float, power: int, text: str) -> None:
    """The slope of s^power from the smallest figure of the shortest sequence, named at its end."""
    top = axis.get_ylim()[1]
    last = min(lengths[-1], lengths[0] * (top / base) ** (1 / power))
    if last <= lengths[0]:
        return
    ends = (lengths[0], last), (base, base * (last / lengths[0]) ** power)
    axis.plot(*ends, color="#aaaaaa", linewidth=0.9, linestyle="--", zorder=1)
    place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
    end = ends[0][1], ends[1][1]
    axis.annotate(text, end, fontsize=7, color="#888888", annotation_clip=False, **place)
