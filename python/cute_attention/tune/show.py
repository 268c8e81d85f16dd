"""What a search has found, for people: a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.contenders import OURS
from ..bench.points import Point
from ..bench.results import Row
from ..bench.tables import WHAT, make_table, number, ratio_text, titled
from .measure import TO_PRESENT
from .plan import Entry, Search
from .verdict import Verdict

_MOST_LINES = 8  # candidates in a plot
_OURS: dict[str, Any] = {"linewidth": 2, "marker": "o"}
_PEER: dict[str, Any] = {"linestyle": ":", "marker": "x"}


def print_search(console: Console, search: Search, verbose: bool = False) -> None:
    """The candidates of a search before they are measured, and what was refused."""
    table = make_table(
        f"{search.subject.present.name}: {len(search.entries) - 1} candidates of "
        f"{search.considered} rows within the ranges"
    )
    for name in ("row", "tile", "stages", "warps", "ptxas", "estimate", "library"):
        table.add_column(name, justify="left" if name in ("row", "library") else "right")
    for entry in search.entries:
        state = entry.file or (entry.error.splitlines()[0] if entry.error else "not compiled")
        table.add_row(*_columns(entry), f"{entry.estimate:.2f}", state)
    console.print(table)
    if search.refused:
        console.print(f"the layout lab refused {len(search.refused)}:", style="dim")
        for name, reason in search.refused:
            console.print(Text(f"    {name}: {reason}", style="dim"), soft_wrap=True)


def _columns(entry: Entry) -> list[str]:
    row = entry.columns
    return [
        entry.name or row.name,
        f"{row.tile_m} x {row.tile_n}",
        str(row.stages),
        str(row.warps),
        row.ptxas,
    ]


def _place(point: Point) -> str:
    return f"{point.label or point.mask} {point.shape_text()}"


def print_verdict(console: Console, verdict: Verdict, reasons: dict[str, str]) -> None:
    """The figures of a search, the fastest first, and why some candidates have none."""
    search = verdict.search
    points = [point.key() for point in search.subject.points]
    found = {(row.point.key(), row.contender): row for row in verdict.rows if row.metrics}
    title = (
        f"{search.subject.present.name}, {WHAT[search.subject.direction]}: TFLOP/s (speed over "
        "that of the present row)"
    )
    table = make_table(title)
    for name in ("row", "tile", "stages", "warps", "ptxas"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for point in search.subject.points:
        table.add_column(_place(point), justify="right")
    for name in ("mean", "worst"):
        table.add_column(name, justify="right")
    _add(table, [*_columns(search.present)], search.present.name, points, found, ["", ""])
    for each in verdict.standings:
        means = [ratio_text(each.mean), ratio_text(each.worst)]
        _add(table, [*_columns(each.entry)], each.entry.name, points, found, means)
    table.add_section()
    for name in dict.fromkeys(row.contender for row in verdict.rows if row.role != OURS):
        _add(table, [titled(name), "", "", "", ""], name, points, found, ["", ""])
    console.print(table)
    for name, reason in reasons.items():
        console.print(Text(f"not measured: {name}: {reason}", style="dim"), soft_wrap=True)


def _add(
    table: Table,
    columns: Sequence[str],
    contender: str,
    points: Sequence[Point],
    found: dict[tuple[Point, str], Row],
    means: Sequence[str | Text],
) -> None:
    cells: list[str | Text] = []
    for point in points:
        row = found.get((point, contender))
        cell = Text(number(row.metrics["tflops"]) if row else "-")
        if row and TO_PRESENT in row.metrics:
            cell.append(" (").append_text(ratio_text(row.metrics[TO_PRESENT])).append(")")
        cells.append(cell)
    table.add_row(*columns, *cells, *means)


def markdown(verdicts: Sequence[Verdict], machine: str) -> str:
    """The verdicts as docs/tuning.md has them: a line for each search. Speeds are over that of the
    present row: the geometric mean of the points, and the lowest. `machine` is where they were
    measured."""
    head = ["row of the tables", "points", "rows within the ranges", "candidates", "the fastest"]
    parts = [f"On {machine}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for verdict in verdicts:
        search = verdict.search
        parts.append(
            f"| `{search.subject.present.name}` | {len(search.subject.points)} "
            f"| {search.considered} | {_tried(verdict)} | {_fastest(verdict)} |"
        )
    return "\n".join([*parts, ""])


def _tile(entry: Entry) -> str:
    row = entry.columns
    stages = "1 stage" if row.stages == 1 else f"{row.stages} stages"
    return f"{row.tile_m} x {row.tile_n}, {stages}, {row.warps} warps, {row.ptxas}"


def _tried(verdict: Verdict) -> str:
    """All candidates: those that were measured with their speed, the others with the reason."""
    measured = {each.entry.columns: each for each in verdict.standings}
    said = []
    for entry in verdict.search.entries[1:]:
        if each := measured.get(entry.columns):
            said.append(f"{_tile(entry)}: {each.mean:.3f}, {each.worst:.3f} at worst")
        else:
            why = entry.error or verdict.faults.get(entry.name) or "not measured at every point"
            said.append(f"{_tile(entry)}: {why.splitlines()[0]}")
    return "; ".join(said) or "none"


def _fastest(verdict: Verdict) -> str:
    if verdict.winner:
        return f"{_tile(verdict.winner.entry)} is ahead"
    return f"the row itself, of {len(verdict.standings) + 1}"


def plot_verdict(path: Path, verdict: Verdict, machine: str) -> None:
    """The speed of the best candidates and of the peers over that of the present row."""
    from ..bench.chart_style import clean, plt, save

    points = [point.key() for point in verdict.search.subject.points]
    names = {each.entry.name: each.entry.columns.name for each in verdict.standings[:_MOST_LINES]}
    names |= {row.contender: titled(row.contender) for row in verdict.rows if row.role != OURS}
    found = {
        (row.point.key(), row.contender): row.metrics[TO_PRESENT]
        for row in verdict.rows
        if TO_PRESENT in row.metrics
    }
    figure, axis = plt.subplots(figsize=(max(7.0, 1.6 * len(points) + 3), 5.2))
    ours = {each.entry.name for each in verdict.standings}
    lines = []
    for name, label in names.items():
        places = [i for i, point in enumerate(points) if (point, name) in found]
        ratios = [found[points[i], name] for i in places]
        lines += axis.plot(places, ratios, label=label, **(_OURS if name in ours else _PEER))
    axis.axhline(1, color="#777777", linewidth=1, zorder=1)
    axis.set_xticks(
        range(len(points)), [_place(point) for point in points], rotation=20, ha="right", fontsize=8
    )
    axis.set_xlabel("point: mask, batch x sequence length, heads, head dim")
    axis.set_ylabel("speed over that of the present row")
    clean(axis, "both")
    title = (
        f"{verdict.search.subject.present.name}, {WHAT[verdict.search.subject.direction]}, on "
        f"{machine}: higher is faster"
    )
    save(figure, path, title, lines)
