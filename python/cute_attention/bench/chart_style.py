"""What all charts share: colours, axes, the legend, and the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from PIL import Image  # matplotlib requires it

from .contenders import OURS, PEER
from .ratios import best, by_point, geometric_mean
from .results import Row
from .tables import titled

# Ours have warm colours, peers cool or neutral ones. A contender has the same in every plot.
_STYLES = {
    "sm90": ("#d62728", "o"),
    "auto": ("#b3123f", "o"),
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


def style(contender: str, role: str) -> dict[str, Any]:
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


def lengths_axis(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length(n) for n in lengths])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel("sequence length, tokens")
    clean(axis, "both")


def clean(axis: Any, grid: str) -> None:
    axis.grid(True, axis=grid, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def save(figure: Any, path: Path, title: str, handles: Sequence[Any]) -> None:
    """Title above, one legend below for all panels, and the file: PNG or SVG, as its name says."""
    width, height = figure.get_size_inches()
    columns = max(1, min(len(handles), int(width / 1.7)))
    lines = -(-len(handles) // columns)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", y=1 - 0.08 / height, va="top")
    figure.tight_layout(rect=(0, (0.12 + 0.22 * lines) / height, 1, 1 - 0.06 / height))
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    if path.suffix == ".png":  # these few colours take a quarter of the space that any colour takes
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def line_handles(roles: dict[str, str], **changes: Any) -> list[Any]:
    """The legend's entries. `changes` replace parts of the lines' style."""
    return [
        Line2D([], [], label=label(name, roles), **{**style(name, role), **changes})
        for name, role in roles.items()
    ]


def label(name: str, roles: dict[str, str]) -> str:
    """A contender's name in the legend: the package's own if no other one of ours is shown."""
    ours = [other for other, role in roles.items() if role == OURS]
    return "cute-attention" if ours == [name] else titled(name)


def roles_of(rows: Iterable[Row]) -> dict[str, str]:
    return {row.contender: row.role for row in rows if row.metrics}


def against(rows: Sequence[Row]) -> tuple[str, str]:
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
