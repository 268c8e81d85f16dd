"""`memory`: peak memory of forward and backward against the sequence length; ours must be
linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .again import again
from .contenders import CONTENDERS, OURS, Contender
from .growth import LINEAR, exponent, series
from .inputs import make_inputs
from .memory import MIB, peak_bytes
from .points import Point
from .results import Row
from .steps import Deadline, attempt, cannot_run, free_memory, make_step, measuring
from .tables import WHAT, make_table, measured_columns, number, print_reasons, titled


def measure(
    points: Iterable[Point],
    contenders: Sequence[Contender],
    directions: Sequence[str],
    device: torch.device,
    deadline: Deadline,
    done: Callable[[Row], None],
) -> None:
    """Measures one row per point, direction and contender. While a contender is measured, no
    tensors of another one exist."""
    for point in points:
        for direction in directions:
            for contender in contenders:
                peak = None
                reason = cannot_run(contender, point, direction, device) or deadline.passed()
                if not reason:
                    peak, reason = attempt(_peak_mib, point, direction, contender, device)
                free_memory()
                done(
                    Row(
                        point=point,
                        contender=contender.name,
                        role=contender.role,
                        what=direction,
                        metrics={} if peak is None else {"memory_mib": peak},
                        reason=reason,
                        command=again(
                            "memory",
                            point,
                            device,
                            direction=direction,
                            contenders=contender.name,
                        ),
                    )
                )


def _peak_mib(point: Point, direction: str, contender: Contender, device: torch.device) -> float:
    inputs = make_inputs(point, device)
    with measuring(contender, point):
        step = make_step(contender.build(point, inputs), direction, inputs)
        return peak_bytes(step, device) / MIB


def nonlinear(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Our contenders whose memory grows faster than the sequence: (contender, what) -> exponent."""
    found = {}
    for (contender, what), values in series(rows, "memory_mib").items():
        grows = exponent(values)
        if CONTENDERS[contender].role == OURS and grows is not None and grows > LINEAR:
            found[contender, what] = grows
    return found


def memory_table(what: str, rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if row.what == what]
    columns = measured_columns(rows)
    sample = rows[0].point
    title = f"{WHAT[what]}: peak memory beyond the inputs, MiB ({sample.dtype}, {sample.mask})"
    table = make_table(title)
    table.add_column("shape")
    for name in columns:
        table.add_column(titled(name), justify="right")
    for point in dict.fromkeys(row.point for row in rows):
        found = {row.contender: row.metrics for row in rows if row.point == point and row.metrics}
        cells = [number(found[n]["memory_mib"]) if n in found else "-" for n in columns]
        table.add_row(point.shape_text(), *cells)
    curves = series(rows, "memory_mib")
    grows = [exponent(curves[name, what]) for name in columns]
    table.add_section()
    table.add_row("grows as", *("-" if e is None else f"s^{e:.2f}" for e in grows))
    return table


def print_memory(console: Console, rows: Sequence[Row]) -> None:
    for what in dict.fromkeys(row.what for row in rows if row.metrics):
        console.print()
        console.print(memory_table(what, rows))
    print_reasons(console, rows)
    failures = nonlinear(rows)
    console.print()
    for (contender, what), grows in failures.items():
        text = f"FAIL: {titled(contender)}, {WHAT[what]}: memory grows as s^{grows:.2f}"
        console.print(Text(text, style="bold red"))
    if not failures and any(row.role == OURS and row.metrics for row in rows):
        console.print(Text("PASS: the memory of our backends is linear", style="bold green"))
