"""The rule of docs/design.md applied to the rows of `accuracy`, and the tables that show it.

The rule: the root mean square and the largest error of our output and gradients are at most
PEER_LIMIT times those of the better of FLASH and cuDNN on the same inputs, and at most twice those
of plain PyTorch in the same dtype. The first ratio is computed for each draw of the inputs. It
breaks the rule if its mean over the draws is above the limit by more than SLACK standard errors of
that mean: a smaller excess may be chance. Few peers return an LSE, so ours is only compared with
plain PyTorch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .accuracy import GRADED, TENSORS
from .contenders import OURS
from .points import Point
from .results import Row
from .tables import make_table, print_reasons, titled

PEERS = ("flash", "cudnn")
PEER_LIMIT = 1.10
SLACK = 2.0  # standard errors
PLAIN_FACTOR = 2.0
KINDS = {"rms": "rms", "max": "largest"}  # of errors, and what they are called


@dataclass(frozen=True)
class Ratio:
    """Our error over the better peer's: the mean over draws, and its standard error."""

    mean: float
    error: float
    peer: str

    def text(self) -> str:
        return f"{self.mean:.2f}x" + (f" ±{self.error:.2f}" if self.error else "")


@dataclass(frozen=True)
class Verdict:
    """One of our rows held against the rule; `broken` says how it fails, empty where it passes."""

    row: Row
    to_plain: float | None  # rms error as a multiple of plain PyTorch's
    to_peer: dict[str, Ratio] = field(default_factory=dict)  # by kind of error
    broken: str = ""


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The rule applied to every row of ours."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.metrics:
            groups.setdefault((row.point, row.what, row.case), []).append(row)
    found = []
    for group in groups.values():
        plain = next((row for row in group if row.contender == "plain"), None)
        peers = [row for row in group if row.contender in PEERS]
        found += [_judge(row, plain, peers) for row in group if row.role == OURS]
    return found


def _times(row: Row, other: Row | None, metric: str) -> float | None:
    if other is None or other.metrics[metric] == 0:
        return None
    return row.metrics[metric] / other.metrics[metric]


def _draws(row: Row, kind: str) -> tuple[float, ...]:
    samples = row.samples if kind == "rms" else row.max_samples
    return samples or (row.metrics[f"{kind}_error"],)


def ratio(row: Row, peers: Sequence[Row], kind: str) -> Ratio | None:
    """Our error over that of the peer with the smaller mean error, computed for each draw; None if
    that peer has no error at all."""
    peer = min(peers, key=lambda other: other.metrics[f"{kind}_error"], default=None)
    if peer is None or not all(_draws(peer, kind)):
        return None
    pairs = zip(_draws(row, kind), _draws(peer, kind), strict=False)
    ratios = [mine / other for mine, other in pairs]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return Ratio(statistics.fmean(ratios), error, peer.contender)


def _judge(row: Row, plain: Row | None, peers: Sequence[Row]) -> Verdict:
    broken = []
    for kind, called in KINDS.items():
        value = _times(row, plain, f"{kind}_error")
        if value is not None and value > PLAIN_FACTOR:
            broken.append(f"{called} error {value:.2f}x plain PyTorch's")
    to_peer = {}
    for kind, called in KINDS.items():
        found = ratio(row, peers, kind) if row.what in GRADED else None
        if found is None:
            continue
        to_peer[kind] = found
        if found.mean > PEER_LIMIT + SLACK * found.error:
            broken.append(f"{called} error {found.text()} {titled(found.peer)}'s")
    return Verdict(row, _times(row, plain, "rms_error"), to_peer, "; ".join(broken))


def _cell(name: str, metrics: dict[str, float]) -> str:
    if not metrics:
        return "-"
    if "rms_share" not in metrics or "max_share" not in metrics:
        return f"{metrics['rms_error']:.2e} ({metrics['max_error']:.1e})"
    return f"{metrics['rms_share']:.3f} ({metrics['max_share']:.2f})"


def accuracy_table(point: Point, case: str, rows: Sequence[Row]) -> Table:
    title = (
        f"{point.text()}, {case} inputs: error over that of rounding the exact result, "
        "rms (largest); of the LSE, itself"
    )
    table = make_table(title)
    table.add_column("contender")
    for name in TENSORS:
        table.add_column(name, justify="right")
    for contender in dict.fromkeys(row.contender for row in rows if row.metrics):
        found = {row.what: row.metrics for row in rows if row.contender == contender}
        table.add_row(titled(contender), *(_cell(name, found[name]) for name in TENSORS))
    return table


def worst_table(judged: Sequence[Verdict]) -> Table | None:
    """A table with a line for each contender of ours and kind of inputs: the largest ratios over
    all points."""
    table = make_table(
        "worst over all points: error over the better of FLASH and cuDNN, rms; largest"
    )
    table.add_column("contender")
    table.add_column("inputs")
    for name in GRADED:
        table.add_column(name, justify="right")
    judged = [verdict for verdict in judged if verdict.to_peer]
    if not judged:
        return None
    for contender, case in dict.fromkeys((v.row.contender, v.row.case) for v in judged):
        cells = []
        for name in GRADED:
            part = [
                verdict.to_peer
                for verdict in judged
                if (verdict.row.contender, verdict.row.case, verdict.row.what)
                == (contender, case, name)
            ]
            worst = [
                max(
                    (found[kind] for found in part if kind in found),
                    key=lambda r: r.mean,
                    default=None,
                )
                for kind in KINDS
            ]
            cells.append("; ".join("-" if each is None else each.text() for each in worst))
        table.add_row(titled(contender), case, *cells)
    return table


def print_accuracy(console: Console, rows: Sequence[Row]) -> bool:
    """Prints tables and verdicts; returns whether all rows of ours keep the rule."""
    for point in dict.fromkeys(row.point for row in rows):
        for case in dict.fromkeys(row.case for row in rows):
            part = [row for row in rows if row.point == point and row.case == case]
            if any(row.metrics for row in part):
                console.print()
                console.print(accuracy_table(point, case, part))
    print_reasons(console, rows)
    judged = verdicts(rows)
    worst = worst_table(judged)
    if worst is not None:
        console.print()
        console.print(worst)
    broken = [verdict for verdict in judged if verdict.broken]
    console.print()
    for verdict in broken:
        row = verdict.row
        place = f"{titled(row.contender)}, {row.what}, {row.case}, {row.point.text()}"
        text = f"FAIL: {place}: {verdict.broken}"
        console.print(Text(text, style="bold red"), soft_wrap=True)
    if judged and not broken:
        plain = max((v.to_plain for v in judged if v.to_plain is not None), default=None)
        text = f"PASS: {len(judged)} errors of ours keep the rule"
        text += f", at most {plain:.2f}x plain PyTorch's" if plain is not None else ""
        ratios = [found for verdict in judged for found in verdict.to_peer.values()]
        if ratios:
            highest = max(ratios, key=lambda found: found.mean)
            text += f", at most {highest.text()} {titled(highest.peer)}'s"
        console.print(Text(text, style="bold green"), soft_wrap=True)
    return not broken
