"""`compare`: two result files side by side, and whether the second is worse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .contenders import OURS
from .ratios import geometric_mean
from .results import Results, Row
from .tables import make_table, ratio_text, titled

# The figure compared for each kind of file; smaller is better for all of them.
METRICS = {
    "speed": "time_ms",
    "ladder": "time_ms",
    "memory": "memory_mib",
    "accuracy": "rms_error",
    "robustness": "time_ratio",
    "overhead": "host_us",
}


@dataclass(frozen=True)
class Change:
    """One row of both files. Ratios are old / new, so above 1 means that the new file is better."""

    old: Row
    new: Row
    metric: str
    threshold: float

    @property
    def ratio(self) -> float | None:
        """Old / new; None if either file lacks the figure."""
        if self.metric not in self.old.metrics or self.metric not in self.new.metrics:
            return None
        old, new = self.old.metrics[self.metric], self.new.metrics[self.metric]
        if new == 0:
            return 1.0 if old == 0 else float("inf")
        return old / new

    @property
    def noise(self) -> float:
        """The larger of the two spreads: a smaller change may be chance."""
        return max(row.metrics.get("spread", 0.0) for row in (self.old, self.new))

    @property
    def lost(self) -> bool:
        return self.metric in self.old.metrics and self.metric not in self.new.metrics

    @property
    def moved(self) -> bool:
        """Whether the row changed by more than the threshold and by more than the spread."""
        if self.ratio is None:
            return self.lost
        grown = 1 / self.ratio - 1 if self.ratio else float("inf")
        return abs(grown) > max(self.threshold, self.noise)

    @property
    def worse(self) -> bool:
        return self.moved and (self.ratio is None or self.ratio < 1)


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    only_old: list[Row]
    only_new: list[Row]
    different_machines: list[str]  # "name: old -> new" for what makes ratios doubtful

    def regressions(self, everybody: bool = False) -> list[Change]:
        """The rows that are worse: ours, or everybody's. A row without a figure in the new file is
        worse too."""
        return [c for c in self.changes if c.worse and (everybody or c.old.role == OURS)]


def compare(old: Results, new: Results, threshold: float) -> Comparison:
    if old.kind != new.kind:
        raise ValueError(f"cannot compare a file of {old.kind} with one of {new.kind}")
    metric = METRICS[old.kind]
    before = {row.key(): row for row in old.rows}
    after = {row.key(): row for row in new.rows}
    doubts = []
    for name in ("device", "driver", "torch"):
        a, b = old.environment.get(name), new.environment.get(name)
        if a != b:
            doubts.append(f"{name}: {a} -> {b}")
    return Comparison(
        changes=[
            Change(row, after[key], metric, threshold)
            for key, row in before.items()
            if key in after
        ],
        only_old=[row for key, row in before.items() if key not in after],
        only_new=[row for key, row in after.items() if key not in before],
        different_machines=doubts,
    )


def _table(changes: Sequence[Change], title: str) -> Table:
    table = make_table(title)
    for name in ("contender", "what", "point"):
        table.add_column(name)
    for name in ("old", "new", "old / new", "spread", ""):
        table.add_column(name, justify="right")
    for change in changes:
        cells = [
            f"{x.metrics[change.metric]:.4g}" if x.metrics else "-"
            for x in (change.old, change.new)
        ]
        ratio = ratio_text(change.ratio) if change.ratio is not None else Text("-")
        mark = Text("")
        if change.moved:
            word, style = ("worse", "bold red") if change.worse else ("better", "bold green")
            mark = Text(word, style=style)
        table.add_row(
            titled(change.old.contender),
            " ".join(filter(None, (change.old.what, change.old.case))),
            change.old.point.text(),
            *cells,
            ratio,
            f"{change.noise:.0%}",
            mark,
        )
    return table


def print_comparison(console: Console, comparison: Comparison, everything: bool) -> None:
    """Prints the rows that moved, or all rows, and then one line per contender."""
    for doubt in comparison.different_machines:
        console.print(Text(f"measured on different machines: {doubt}", style="bold yellow"))
    shown = [c for c in comparison.changes if everything or c.moved]
    if shown:
        metric = shown[0].metric
        title = f"{metric} (smaller is better)" + ("" if everything else ": what moved")
        console.print(_table(shown, title))
    for contender in dict.fromkeys(c.old.contender for c in comparison.changes):
        part = [c for c in comparison.changes if c.old.contender == contender]
        ratios = [c.ratio for c in part if c.ratio]
        if not ratios:
            continue
        mean = geometric_mean([r for r in ratios if r != float("inf")] or [1.0])
        worse, better = sum(c.worse for c in part), sum(c.moved and not c.worse for c in part)
        console.print(
            f"{titled(contender)}: geometric mean {mean:.3f}x over {len(ratios)} rows, "
            f"{better} better, {worse} worse, {len(part) - better - worse} within the noise"
        )
    for name, rows in (("first", comparison.only_old), ("second", comparison.only_new)):
        if rows:
            console.print(
                f"{len(rows)} rows are in the {name} file alone, such as {rows[0].point.text()}"
            )
    for change in comparison.changes:
        if change.lost:
            text = f"{titled(change.old.contender)}, {change.old.point.text()}: {change.new.reason}"
            console.print(Text(f"no longer measured: {text}", style="bold red"))
