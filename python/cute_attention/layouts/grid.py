"""Grids of coloured, labelled cells, and saving a figure as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

# They differ in lightness and hue, and black or white text is readable on each.
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#dd9955", "#bbbbbb",
)  # fmt: skip
CELL = 0.34  # inches


def colour(index: int) -> str:
    """One of eight colours."""
    return COLOURS[index % len(COLOURS)]


def distinct(index: int) -> tuple[float, float, float]:
    """One of twenty colours that differ."""
    red, green, blue, _ = matplotlib.colormaps["tab20"](index % 20)
    return red, green, blue


def shade(index: int, count: int) -> tuple[float, float, float]:
    """One of `count` colours along a scale."""
    red, green, blue, _ = matplotlib.colormaps["viridis"](0.15 + 0.8 * index / max(count - 1, 1))
    return red, green, blue


def _ink(fill: str | tuple[float, float, float]) -> str:
    red, green, blue = to_rgb(fill)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def figure(width: float, height: float) -> Figure:
    """A figure of this size in inches that pyplot does not know of, so that no global state
    changes."""
    created = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(created)
    return created


def draw_grid(
    axes: Axes,
    shape: tuple[int, int],
    fill: Callable[[int, int], str | tuple[float, float, float]],
    text: Callable[[int, int], str],
    size: float = 6.0,
) -> None:
    """Draws a grid of cells with the colour `fill(row, col)` and the text `text(row, col)`; row 0
    is at the top."""
    rows, cols = shape
    boxes, fills = [], []
    for row in range(rows):
        for col in range(cols):
            boxes.append([(col, row), (col + 1, row), (col + 1, row + 1), (col, row + 1)])
            fills.append(fill(row, col))
            label = text(row, col)
            if label:
                axes.text(
                    col + 0.5,
                    row + 0.5,
                    label,
                    ha="center",
                    va="center",
                    fontsize=size,
                    color=_ink(fills[-1]),
                    in_layout=False,  # it lies inside the axes
                )
    axes.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="white", linewidths=0.6))
    axes.set_xlim(0, cols)
    axes.set_ylim(rows, 0)
    axes.set_aspect("auto")
    axes.tick_params(length=0, labelsize=6)
    for spine in axes.spines.values():
        spine.set_visible(False)


def ticks(axes: Axes, row_labels: Sequence[str], col_labels: Sequence[str]) -> None:
    """Labels rows and columns in the middle of their cells, and leaves out labels that would not
    fit."""
    for labels, axis in ((row_labels, axes.yaxis), (col_labels, axes.xaxis)):
        every = -(-len(labels) // 32)
        places = range(0, len(labels), every)
        axis.set_ticks([place + 0.5 for place in places], [labels[place] for place in places])


def legend(axes: Axes, entries: Sequence[tuple[str | tuple[float, float, float], str]]) -> None:
    """Draws a legend beside the axes: for each colour a patch and its text."""
    axes.legend(
        handles=[Patch(facecolor=fill, label=label) for fill, label in entries],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        fontsize=7,
        frameon=False,
        borderaxespad=0.0,
    )


def mark(axes: Axes, row: float, col: float, rows: float = 1, cols: float = 1) -> None:
    """Draws a frame around cells."""
    axes.add_patch(
        Rectangle((col, row), cols, rows, fill=False, edgecolor="#cc3311", lw=2.5, clip_on=False)
    )


def save(created: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as SVG and PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg", folder / f"{name}.png"]
    created.draw_without_rendering()
    created.set_layout_engine("none")  # the layout is computed above, once for both files
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        created.savefig(files[0], metadata={"Date": None})
    created.savefig(files[1], dpi=110)
    return files
