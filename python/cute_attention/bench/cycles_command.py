"""`cycles`, from its options to its table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import cycles
from .beginning import begin, report_absent
from .builds import Build, builds_of
from .contenders import OURS, select
from .options import Defaults, build_points
from .ratios import by_point
from .report import Report
from .results import Row
from .sets import MASKS
from .steps import Deadline
from .tables import WHAT, make_console, make_table, print_reasons, titled

GPU = Defaults((64, 128), MASKS, (4096,), ("bf16",))


def run_cycles(args: argparse.Namespace) -> int:
    """Counts all calls of this package and the peers first, then those of each other build."""
    console = make_console()
    device, environment = begin(args, console)
    if device.type != "cuda":
        raise ValueError("cycles needs an NVIDIA GPU")
    points = build_points(args, GPU)
    contenders = select(args.contenders or "sm90,sm80", device)
    report_absent(contenders, device, args, console)
    builds = [Build(), *builds_of(args.builds)]
    settings = cycles.Settings(device, args.clock, args.seed)
    deadline = Deadline(args.limit_s)
    with Report("cycles", args, environment, console, len(builds)) as report:
        for build in builds:
            calls = cycles.calls_of(build, points, args.direction, contenders)
            if late := deadline.passed():
                rows = [cycles.row_of(call, build, settings, late) for call in calls]
            else:
                rows = cycles.measure(calls, build, settings)
            report.add(rows, [f"{report.heading()} {build.in_build or 'this package'}"])
    print_cycles(console, report.rows, args.clock)
    return 0


def print_cycles(console: Console, rows: Sequence[Row], clock: str) -> None:
    """The counters of each call, point by point, and what could not be counted."""
    measured = [row for row in rows if row.metrics]
    if measured:
        console.print(cycles_table(measured, clock))
    print_reasons(console, rows)


def cycles_table(rows: Sequence[Row], clock: str) -> Table:
    """A ratio is the cycles of the line over those of the first contender of ours at the point."""
    held = "at the base clock" if clock == "base" else "at any clock"
    table = make_table(f"one call, all its kernels, {held}")
    for name in ("direction", "point", "contender"):
        table.add_column(name)
    for name in (
        "kernels",
        "cycles, thousands",
        "of the longest",
        "over ours",
        "instructions, millions",
        "memory, MB",
    ):
        table.add_column(name, justify="right")
    for (what, point), group in by_point(rows).items():
        ours = next((row for row in group if row.role == OURS), None)
        for row in group:
            figures = row.metrics
            ratio = figures["cycles"] / ours.metrics["cycles"] if ours else None
            table.add_row(
                WHAT[what],
                point.text(),
                titled(row.contender),
                f"{figures['kernels']:.0f}",
                f"{figures['cycles'] / 1e3:.1f}",
                f"{figures['longest_cycles'] / 1e3:.1f}",
                Text(f"{ratio:.3f}" if ratio else "-"),
                f"{figures['instructions'] / 1e6:.2f}",
                f"{figures['dram_bytes'] / 1e6:.1f}",
            )
        table.add_section()
    return table
