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


def lines_of(name: str, what: str, rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """The title, the head and the lines of the table of an experiment; no lines where nothing was
    measured."""
    measured = [row for row in of_experiment(rows, name, what) if row.metrics]
    experiment = EXPERIMENTS[name]
    title = f"{experiment.title}, {WHAT[what]}"
    if measured:
        base = measured[0 if name == "block" else -1].point
        title += f" ({base.text()} and the like)"
    lines = [
        [
            value_of(row),
            titled(series_of(row)),
            *(number(row.metrics[metric]) for metric in METRICS),
        ]
        for row in measured
    ]
    return title, [experiment.title, "contender", *METRICS.values()], lines


def table_of(name: str, what: str, rows: Sequence[Row]) -> Table | None:
    """The figures of an experiment; None where nothing was measured."""
    title, head, lines = lines_of(name, what, rows)
    if not lines:
        return None
    table = make_table(title)
    for index, column in enumerate(head):
        table.add_column(column, justify="right" if index > 1 else "left")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(rows: Sequence[Row], machine: str) -> str:
    """The tables as docs/experiments.md has them, and what was not measured. `machine` is where
    they were."""
    parts = [f"On {machine}.", ""]
    for name in EXPERIMENTS:
        for what in WHAT:
            title, head, lines = lines_of(name, what, rows)
            if lines:
                parts += [f"### {title[0].upper()}{title[1:]}", ""]
                parts += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
                parts += [*(f"| {' | '.join(line)} |" for line in lines), ""]
    reasons = _reasons(rows)
    return "\n".join([*parts, *(["Not measured:", "", *reasons, ""] if reasons else [])])


def _reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each experiment and reason: the values, directions and contenders it holds of."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.reason:
            found.setdefault((row.case.partition(" ")[0], row.reason), []).append(row)
    lines = []
    for (name, reason), own in found.items():
        words = (
            dict.fromkeys(each)
            for each in (
                map(value_of, own),
                (WHAT[row.what] for row in own),
                (titled(series_of(row)) for row in own),
            )
        )
        values, directions, contenders = (", ".join(each) for each in words)
        lines.append(f"- {EXPERIMENTS[name].title} {values} ({directions}; {contenders}): {reason}")
    return lines


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
