"""The rule of `robustness` applied to its rows, and the tables that show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .contenders import OURS, PEER
from .limits import Limits
from .points import Point
from .results import Row
from .robustness import DIRECTIONS, FAILED, TENSORS
from .roundings import LIMITS
from .tables import make_table, number, print_reasons, titled

# An rms error of less than this many roundings counts as exact. Where a softmax is 1 at one key and
# 0 elsewhere, the errors of all contenders are this small, and their ratio says nothing.
EXACT = 0.01


@dataclass(frozen=True)
class Line:
    """One contender of ours, one direction and one input: its rows and what is wrong with them."""

    point: Point
    contender: str
    direction: str
    case: str
    rows: dict[str, Row]  # by tensor; under the direction's name, the row with the time
    to_peer: dict[str, float]  # rms error over that of the better peer, by tensor
    peers: dict[str, str]  # who that is
    broken: tuple[str, ...]

    @property
    def time(self) -> dict[str, float]:
        row = self.rows.get(self.direction)
        return row.metrics if row else {}

    def place(self) -> str:
        return f"{titled(self.contender)}, {self.direction}, {self.case}, {self.point.text()}"


def lines(rows: Sequence[Row], limits: Limits) -> list[Line]:
    """The rows of our contenders, gathered into lines and judged."""
    groups: dict[tuple[Point, str, str, str], dict[str, Row]] = {}
    best: dict[tuple[Point, str, str], Row] = {}
    for row in rows:
        if row.role == OURS and (row.metrics or row.reason.startswith(FAILED)):
            direction = next(d for d in DIRECTIONS if row.what in (d, *TENSORS[d]))
            key = (row.point, row.contender, direction, row.case)
            groups.setdefault(key, {})[row.what] = row
        elif row.role == PEER and "rms_error" in row.metrics:
            place = (row.point, row.case, row.what)
            other = best.get(place)
            if other is None or row.metrics["rms_error"] < other.metrics["rms_error"]:
                best[place] = row
    return [_judge(*key, found, best, limits) for key, found in groups.items()]


def _judge(
    point: Point,
    contender: str,
    direction: str,
    case: str,
    rows: dict[str, Row],
    best: dict[tuple[Point, str, str], Row],
    limits: Limits,
) -> Line:
    broken: list[str] = []
    to_peer: dict[str, float] = {}
    peers: dict[str, str] = {}
    for name, row in rows.items():
        metrics = row.metrics
        if row.reason:
            broken.append(f"{name} {row.reason}")
        elif "time_ratio" in metrics:
            ratio, limit = metrics["time_ratio"], limits.time_of(contender)
            if ratio > limit:
                broken.append(f"{ratio:.2f}x the time of normal inputs, allowed {limit:.2f}x")
        elif "not_finite" in metrics:
            broken.append(f"{metrics['not_finite']:.0f} values of {name} are not finite")
        else:
            if metrics["roundings"] > LIMITS[name]:
                text = f"{name} is off by {metrics['roundings']:.3g} roundings"
                broken.append(f"{text}, allowed {LIMITS[name]:g}")
            peer = best.get((point, case, name))
            if peer is not None and metrics["rms_roundings"] > EXACT:
                exact = metrics["rms_error"] * EXACT / metrics["rms_roundings"]
                least = max(peer.metrics["rms_error"], exact, metrics["stored_lse"])
                ratio = metrics["rms_error"] / least
                to_peer[name], peers[name] = ratio, peer.contender
                if ratio > limits.error:
                    broken.append(f"rms error of {name} {ratio:.2f}x {titled(peer.contender)}'s")
    return Line(point, contender, direction, case, rows, to_peer, peers, tuple(broken))


def _error_cell(line: Line, name: str) -> Text:
    row = line.rows.get(name)
    if row is None or not row.metrics:
        return Text("-")
    if "not_finite" in row.metrics:
        return Text("not finite", style="bold red")
    text = number(row.metrics["roundings"])
    if name in line.to_peer:
        text += f" ({line.to_peer[name]:.2f}x)"
    return Text(text)


def table_of(point: Point, contender: str, direction: str, found: Sequence[Line]) -> Table:
    title = (
        f"{titled(contender)}, {direction}, {point.text()}: time over that of normal inputs; "
        "largest error in roundings (rms error over the better peer's)"
    )
    table = make_table(title)
    table.add_column("input")
    for name in ("ms", "time", *TENSORS[direction]):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for line in found:
        time = line.time
        cells = [number(time["time_ms"]), f"{time['time_ratio']:.2f}x"] if time else ["-", "-"]
        verdict = Text("; ".join(line.broken), style="bold red") if line.broken else Text("ok")
        errors = [_error_cell(line, name) for name in TENSORS[direction]]
        table.add_row(line.case, *cells, *errors, verdict)
    return table


def _summary(found: Sequence[Line]) -> str:
    """The worst figures of the lines, in words."""
    timed = [line for line in found if "time_ratio" in line.time]
    ratios = [(ratio, name, line) for line in found for name, ratio in line.to_peer.items()]
    parts = []
    if timed:
        slowest = max(timed, key=lambda line: line.time["time_ratio"])
        parts.append(f"at most {slowest.time['time_ratio']:.2f}x the time ({slowest.case})")
    if ratios:
        ratio, name, line = max(ratios, key=lambda each: each[0])
        peer = titled(line.peers[name])
        parts.append(f"at most {ratio:.2f}x the rms error of {peer} ({name}, {line.case})")
    return "; ".join(parts)


def print_robustness(console: Console, rows: Sequence[Row], limits: Limits) -> bool:
    """Prints tables and verdicts; returns whether all lines of ours keep the rule."""
    judged = lines(rows, limits)
    places = dict.fromkeys((line.point, line.contender, line.direction) for line in judged)
    for place in places:
        part = [line for line in judged if (line.point, line.contender, line.direction) == place]
        console.print()
        console.print(table_of(*place, part))
    told = [r for r in rows if r.role != OURS or not r.reason.startswith(FAILED)]
    print_reasons(console, told)
    console.print()
    broken = [line for line in judged if line.broken]
    for line in broken:
        text = f"FAIL: {line.place()}: {'; '.join(line.broken)}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
    for contender, direction in dict.fromkeys((x.contender, x.direction) for x in judged):
        part = [x for x in judged if (x.contender, x.direction) == (contender, direction)]
        failed = sum(bool(line.broken) for line in part)
        who = f"{titled(contender)}, {direction}"
        if failed:
            text = f"FAIL: {who}: {failed} of {len(part)} lines break the rule; {_summary(part)}"
            console.print(Text(text, style="bold red"), soft_wrap=True)
        else:
            text = f"PASS: {who}: {len(part)} lines keep the rule; {_summary(part)}"
            console.print(Text(text, style="bold green"), soft_wrap=True)
    return not broken
