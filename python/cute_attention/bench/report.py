"""What a run prints while it measures, and the files that it writes. It rewrites them after every
point, so that nothing is lost where a run is cut off."""

from __future__ import annotations

import argparse
import time
from collections.abc import Container, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from .machine import Environment
from .results import Row, write_csv, write_json
from .tables import WHAT, number, titled


class Report:
    """Collects rows, prints them as they come and keeps the files current. Use as a context
    manager."""

    def __init__(
        self,
        kind: str,
        args: argparse.Namespace,
        environment: Environment,
        console: Console,
        total: int,
    ) -> None:
        self.kind = kind
        self.args = args
        self.environment = environment
        self.console = console
        self.rows: list[Row] = []
        self._started = self._saved = time.monotonic()
        self._steps, self._total = 0, total
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=args.quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(kind, total=total)

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
        self.save()

    def add(self, rows: Sequence[Row], lines: Sequence[str | Text] = ()) -> None:
        """The rows of one step of the run and what to print about them."""
        self.rows += rows
        self._steps += 1
        self._bar.advance(self._task)
        if not self.args.quiet:
            for line in lines:
                self.console.print(line, soft_wrap=True)
        if time.monotonic() - self._saved > 5:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        if self.args.json:
            write_json(self.args.json, self.kind, self.environment, self.rows)
        if self.args.csv:
            write_csv(self.args.csv, self.environment, self.rows)

    def heading(self) -> str:
        """`[3/72 12s]`, before the lines of a step."""
        seconds = time.monotonic() - self._started
        return f"[{self._steps + 1}/{self._total} {seconds:.0f}s]"


def speed_lines(report: Report, rows: Sequence[Row], skip: Container[str] = ()) -> list[str | Text]:
    """The contenders of one point, fastest first, and the command that measures the point again."""
    first = rows[0]
    lines: list[str | Text] = [
        Text(f"{report.heading()} {WHAT[first.what]} {first.point.text()}", style="bold")
    ]
    measured = sorted((r for r in rows if r.metrics), key=lambda r: -r.metrics["tflops"])
    for row in measured:
        metrics = row.metrics
        text = (
            f"    {titled(row.contender):22} {number(metrics['tflops']):>8} TFLOP/s"
            f" {number(metrics['time_ms']):>9} ms"
        )
        if "spread" in metrics:
            text += f"  spread {metrics['spread']:.1%}"
        if "peak_share" in metrics:
            text += f"  {metrics['peak_share']:.0%} of peak"
        if "memory_mib" in metrics:
            text += f"  {number(metrics['memory_mib'])} MiB"
        lines.append(text)
    lines += [
        Text(f"    {titled(row.contender):22} - {row.reason}", style="dim")
        for row in rows
        if row.reason and row.contender not in skip
    ]
    return lines
