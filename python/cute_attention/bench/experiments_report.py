"""What `experiments` shows: a table for each experiment and direction, and a plot of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from .chart_style import clean, save, style
from .experiments import EXPERIMENTS, METRICS
from .results import Row
from .tables import WHAT, make_table, number, print_reasons, titled


def of_experiment(rows: Sequence[Row], name: str, what: str) -> list[Row]:
    """The rows of an experiment in a direction."""
    return [row for row in rows if row.what == what and row.case.partition(" ")[0] == name]


def value_of(row: Row) -> str:
    """What was varied, in a word."""
    return row.case.partition(" ")[2]


def series_of(row: Row) -> str:
    """The line of a plot that a row is on: its contender, and of blocks ours."""
    return "ours" if row.case.startswith("block ") else row.contender


def table_of(name: str, what: str, rows: Sequence[Row]) -> Table | None:
    """The figures of an experiment; None where nothing was measured."""
    measured = [row for row in of_experiment(rows, name, what) if row.metrics]
    if not measured:
        return None
    experiment = EXPERIMENTS[name]
    base = measured[0].point.text() if name == "block" else measured[-1].point.text()
    table = make_table(f"{experiment.title}, {WHAT[what]} ({base} and the like)")
    table.add_column(experiment.title)
    table.add_column("contender")
    for label in METRICS.values():
        table.add_column(label, justify="right")
    for row in measured:
        figures = [number(row.metrics[metric]) for metric in METRICS]
        table.add_row(value_of(row), titled(series_of(row)), *figures)
    return table


def print_experiments(console: Console, rows: Sequence[Row]) -> None:
    """All tables, and what was skipped with the reason."""
    for name in EXPERIMENTS:
        for what in WHAT:
            table = table_of(name, what, rows)
            if table is not None:
                console.print()
                console.print(table)
    print_reasons(console, rows, "experiment and value")


def plot_experiments(path: Path, rows: Sequence[Row], machine: str) -> None:
    """A line of panels for each experiment and direction, a column for each metric."""
    measured = [row for row in rows if row.metrics]
    lines = [
        (name, what) for name in EXPERIMENTS for what in WHAT if of_experiment(measured, name, what)
    ]
    size = (4.4 * len(METRICS) + 0.6, 2.7 * len(lines) + 1.0)
    figure, axes = plt.subplots(len(lines), len(METRICS), figsize=size, squeeze=False)
    handles: dict[str, Any] = {}
    for (name, what), panels in zip(lines, axes, strict=True):
        part = of_experiment(measured, name, what)
        for axis, (metric, label) in zip(panels, METRICS.items(), strict=True):
            handles |= _panel(axis, part, metric)
            axis.set_title(f"{EXPERIMENTS[name].title}, {WHAT[what]}", fontsize=9, loc="left")
            axis.set_xlabel(EXPERIMENTS[name].axis)
            axis.set_ylabel(label)
    save(figure, path, f"One size varied at a time, on {machine}", list(handles.values()))


def _panel(axis: Any, rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """Draws a metric of an experiment; returns the line of each series by its name."""
    values = list(dict.fromkeys(value_of(row) for row in rows))
    found = {}
    for series, role in {series_of(row): row.role for row in rows}.items():
        own = [row for row in rows if series_of(row) == series]
        places = [values.index(value_of(row)) for row in own]
        figures = [row.metrics[metric] for row in own]
        (found[series],) = axis.plot(places, figures, label=titled(series), **style(series, role))
    axis.set_xticks(range(len(values)), values, fontsize=8)
    axis.set_ylim(bottom=0)
    clean(axis, "y")
    return found
