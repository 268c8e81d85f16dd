"""The table and the picture of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from cute_attention.bench.chart_style import clean, save

from .measure import WHAT, Figures

_STYLES = (("#d62728", "o", 2.8), ("#c49ddb", ">", 1.3))  # ours warm and broad, PyTorch's cool


def table(found: Sequence[Figures]) -> str:
    """Markdown, a line for each size and each thing measured; what was refused stands below."""
    ours, theirs = dict.fromkeys(figures.name for figures in found)
    lines = [
        f"| residues | what | {ours}, ms | {theirs}, ms | speed over it | {ours}, MiB "
        f"| {theirs}, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, other in zip(found[::2], found[1::2], strict=True):
        ratio = f"{other.ms / one.ms:.2f}" if one.rounds and other.rounds else "-"
        cells = [_cell(f, "ms") for f in (one, other)] + [ratio]
        cells += [_cell(f, "mib") for f in (one, other)]
        lines.append(f"| {one.residues} | {one.what} | {' | '.join(cells)} |")
    lines += [
        f"not measured: {f.name}, {f.residues} residues, {f.what}: {f.reason}"
        for f in found
        if f.reason
    ]
    return "\n".join(lines)


def _cell(figures: Figures, value: str) -> str:
    return f"{getattr(figures, value):.3g}" if figures.rounds else "-"


def plot(path: Path, found: Sequence[Figures], title: str) -> None:
    """Time above and memory below, against the size; a column for each thing measured."""
    names = list(dict.fromkeys(figures.name for figures in found))
    figure, axes = plt.subplots(2, len(WHAT), figsize=(3.3 * len(WHAT), 5.4), sharex=True)
    handles = {}
    for column, what in enumerate(WHAT):
        for name, (colour, marker, width) in zip(names, _STYLES, strict=True):
            measured = [f for f in found if f.what == what and f.name == name and f.rounds]
            sizes = [figures.residues for figures in measured]
            for line, value in enumerate(("ms", "mib")):
                (handles[name],) = axes[line, column].plot(
                    sizes,
                    [getattr(figures, value) for figures in measured],
                    label=name,
                    color=colour,
                    marker=marker,
                    linewidth=width,
                )
        axes[0, column].set_title(what, fontsize=9, loc="left")
        axes[1, column].set_xlabel("residues")
        for axis in axes[:, column]:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_xscale("log", base=2)
            sizes = sorted({figures.residues for figures in found})
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.tick_params(axis="x", which="minor", bottom=False)
            clean(axis, "both")
    axes[0, 0].set_ylabel("ms")
    axes[1, 0].set_ylabel("peak memory, MiB")
    save(figure, path, title, list(handles.values()))
