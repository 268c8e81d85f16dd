"""Plots as PNG: ours in warm colours and thick lines, everybody else thin and cool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .contenders import OURS, PEER
from .points import Point
from .ratios import best, by_point, geometric_mean
from .results import Row
from .tables import WHAT, titled

# Ours have warm colours, peers cool or neutral ones. A contender has the same in every plot.
_STYLES = {
    "sm90": ("#d62728", "o"),
    "sm80": ("#ff7f0e", "s"),
    "reference": ("#b8860b", "D"),
    "fa4": ("#12305f", "^"),
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
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel("sequence length, tokens")
    _clean(axis, "both")


def _clean(axis: Any, grid: str) -> None:
    axis.grid(True, axis=grid, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _save(figure: Any, path: Path, title: str, handles: Sequence[Any]) -> None:
    """Title above, one legend below for all panels, and the file."""
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width / 1.7)))
    lines = -(-len(handles) // columns)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", y=1 - 0.08 / height, va="top")
    figure.tight_layout(rect=(0, (0.12 + 0.22 * lines) / height, 1, 1 - 0.06 / height))
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _line_handles(roles: dict[str, str]) -> list[Any]:
    return [
        Line2D([], [], label=titled(name), **_style(name, role)) for name, role in roles.items()
    ]


def _roles(rows: Iterable[Row]) -> dict[str, str]:
    return {row.contender: row.role for row in rows if row.metrics}


def _against(rows: Sequence[Row]) -> tuple[str, str]:
    """The text of a panel that compares our best with the best peer, and the text's colour."""
    ratios = []
    for group in by_point(rows).values():
        ours, peer = best(group, OURS), best(group, PEER)
        if ours and peer:
            ratios.append(ours.metrics["tflops"] / peer.metrics["tflops"])
    if not ratios:
        return "", "black"
    mean = geometric_mean(ratios)
    colour = "#1a7f37" if mean >= 1.02 else "#b3261e" if mean <= 0.98 else "black"
    return f"ours / best peer: {mean:.2f}x", colour


def plot_speed(path: Path, rows: Sequence[Row], machine: str) -> None:
    """Plots TFLOP/s against the sequence length, with a panel per direction, mask and head dim.

    Points that do not form such lines (named models, packed documents) become bars.
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
        _plot_bars(path, measured, machine)
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
        tokens = f", {_length(point.batch * point.seqlen_q)} tokens" if by_tokens else ""
        if len(dims) == 1:
            place = f"{WHAT[row.what]}{tokens}", f"{point.mask}, {column}"
        else:
            place = f"{WHAT[row.what]}, {point.mask}{tokens}", column
        panels.setdefault(place, []).append(row)
    return panels


def _plot_lines(path: Path, panels: dict[tuple[str, str], list[Row]], machine: str) -> None:
    lines = list(dict.fromkeys(line for line, _ in panels))
    columns = list(dict.fromkeys(column for _, column in panels))
    size = (4.4 * len(columns) + 0.4, 2.9 * len(lines) + 0.8)
    figure, axes = plt.subplots(len(lines), len(columns), figsize=size, squeeze=False)
    for line, row_of_axes in zip(lines, axes, strict=True):
        for column, axis in zip(columns, row_of_axes, strict=True):
            part = panels.get((line, column))
            if not part:
                axis.axis("off")
                continue
            _speed_panel(axis, part)
            axis.set_title(f"{line}, {column}", fontsize=9, loc="left")
        row_of_axes[0].set_ylabel("TFLOP/s")
    title = f"Attention on {machine}: TFLOP/s, higher is better"
    rows = [row for part in panels.values() for row in part]
    _save(figure, path, title, _line_handles(_roles(rows)))


def _speed_panel(axis: Any, rows: Sequence[Row]) -> None:
    for name, role in _roles(rows).items():
        values = sorted(
            (r.point.seqlen_q, r.metrics["tflops"]) for r in rows if r.contender == name
        )
        axis.plot(*zip(*values, strict=True), **_style(name, role))
    _lengths_axis(axis, sorted({row.point.seqlen_q for row in rows}))
    axis.set_ylim(bottom=0, top=1.12 * axis.get_ylim()[1])
    text, colour = _against(rows)
    place = {"xy": (0.02, 0.98), "xycoords": "axes fraction", "va": "top"}
    axis.annotate(text, color=colour, fontsize=8.5, fontweight="bold", **place)


def _plot_bars(path: Path, rows: Sequence[Row], machine: str) -> None:
    directions = list(dict.fromkeys(row.what for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    roles = _roles(rows)
    height = len(points) * (0.17 * len(roles) + 0.22) + 1.3
    size = (5.2 * len(directions) + 2.4, height)
    figure, axes = plt.subplots(1, len(directions), figsize=size, squeeze=False, sharey=True)
    for axis, direction in zip(axes[0], directions, strict=True):
        part = [row for row in rows if row.what == direction]
        _bars(axis, points, part, roles)
        text, colour = _against(part)
        axis.set_title(WHAT[direction], fontsize=9, loc="left")
        axis.set_title(text, fontsize=9, loc="right", color=colour, fontweight="bold")
    names = [
        f"{p.label}\n{p.mask} {p.shape_text()}" if p.label else f"{p.mask}\n{p.shape_text()}"
        for p in points
    ]
    axes[0][0].set_yticks(range(len(points)), names, fontsize=8)
    axes[0][0].set_ylim(len(points) - 0.4, -0.6)
    handles = [
        Patch(label=titled(name), color=_style(name, role)["color"]) for name, role in roles.items()
    ]
    _save(figure, path, f"Attention on {machine}: TFLOP/s, longer is better", handles)


def _bars(axis: Any, points: Sequence[Point], rows: Sequence[Row], roles: dict[str, str]) -> None:
    """Draws a group of bars per point. On our bars stands their speed over the best peer's."""
    thick = 0.86 / len(roles)
    found = {(row.point, row.contender): row.metrics["tflops"] for row in rows}
    peers = {point: best(group, PEER) for (_, point), group in by_point(rows).items()}
    for i, (name, role) in enumerate(roles.items()):
        places = [p + (i - (len(roles) - 1) / 2) * thick for p in range(len(points))]
        values = [found.get((point, name), 0.0) for point in points]
        bars = axis.barh(places, values, 0.92 * thick, color=_style(name, role)["color"])
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
    _clean(axis, "x")


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
    _save(figure, path, title, _line_handles(_roles(measured)))


def _growth_panel(axis: Any, rows: Sequence[Row], metric: str) -> None:
    for name, role in _roles(rows).items():
        values = sorted((r.point.seqlen_q, r.metrics[metric]) for r in rows if r.contender == name)
        axis.plot(*zip(*values, strict=True), **_style(name, role))
    axis.set_yscale("log")
    lengths = sorted({row.point.seqlen_q for row in rows})
    _lengths_axis(axis, lengths)
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
