"""`ladder`: the steps from the plain formula to the fastest kernel, in one table.

Measured as `speed` measures, with the peak memory of each step; the plot shows how both grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .growth import exponent, series
from .results import Row
from .tables import WHAT, make_table, number, print_reasons, ratio_text, titled

STEPS = "plain,reference,flex,sm80,sm90"


def ladder_table(what: str, rows: Sequence[Row]) -> Table | None:
    """All steps at the longest sequence that the first step, the plain formula, could do."""
    rows = [row for row in rows if row.what == what and row.metrics]
    if not rows:
        return None
    first = [row for row in rows if row.contender == rows[0].contender]
    point = max((row.point for row in first), key=lambda point: point.seqlen_q)
    rungs = [row for row in rows if row.point == point]
    time_growth = series(rows, "time_ms")
    memory_growth = series(rows, "memory_mib")
    title = f"{WHAT[what]}: {point.text()}"
    table = make_table(title)
    table.add_column("step")
    for name in ("time, ms", "TFLOP/s", "peak memory, MiB", "faster than the first"):
        table.add_column(name, justify="right")
    for name in ("than the step before", "time grows as", "memory grows as"):
        table.add_column(name, justify="right")
    before = rungs[0]
    for row in rungs:
        key = row.contender, what
        table.add_row(
            titled(row.contender),
            number(row.metrics["time_ms"]),
            number(row.metrics["tflops"]),
            number(row.metrics["memory_mib"]),
            ratio_text(rungs[0].metrics["time_ms"] / row.metrics["time_ms"]),
            ratio_text(before.metrics["time_ms"] / row.metrics["time_ms"]),
            growth_text(exponent(time_growth.get(key, []))),
            growth_text(exponent(memory_growth.get(key, []))),
        )
        before = row
    return table


def growth_text(value: float | None) -> str:
    return "-" if value is None else f"s^{value:.1f}"


def print_ladder(console: Console, rows: Sequence[Row]) -> None:
    for what in dict.fromkeys(row.what for row in rows):
        table = ladder_table(what, rows)
        if table is not None:
            console.print()
            console.print(table)
    print_reasons(console, rows)
