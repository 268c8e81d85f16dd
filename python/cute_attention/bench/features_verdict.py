"""The targets of `features`, and the tables that hold its rows against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .contenders import CONTENDERS, OURS, PEER
from .features import PLAIN
from .points import Point
from .ratios import best
from .results import Row
from .tables import WHAT, make_table, measured_columns, number, print_reasons, ratio_text, titled

# The least speed of a call with one feature, over that of the same call without it. A sink has no
# target of its own: it is part of every kernel.
TARGETS = {
    "alibi": {"fwd": 0.92, "bwd": 0.95},
    "dropout": {"fwd": 0.80, "bwd": 0.85},
    "softcap": {"fwd": 0.77, "bwd": 0.85},
    "bias": {"fwd": 0.85, "bwd": 0.80},
}
# That of every feature at once, which a part of them must reach all the more.
TOGETHER = {"fwd": 0.55, "bwd": 0.60}
# The target of a bias holds while it fits the L2 cache, here that of an H100 or H200. Beyond it,
# the time that the bias takes to be read counts, and not the speed without it.
L2_BYTES = 50 * 2**20
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


def target(point: Point, contender: str, direction: str) -> float | None:
    """The least ratio to plain, or None where there is no target. The reference backend is not
    about speed."""
    costly = [name for name in point.features if name != "sink"]
    if contender == "reference" or not costly:
        return None
    scores = point.heads * point.seqlen_q * point.seqlen_k
    if point.bias and scores * BYTES[point.dtype] > L2_BYTES:
        return None
    table = TARGETS[costly[0]] if len(costly) == 1 else TOGETHER
    return table.get(direction)


@dataclass(frozen=True)
class Line:
    """One contender of ours with one feature at one shape, and the peers beside it."""

    ours: Row
    peers: dict[str, Row]

    @property
    def target(self) -> float | None:
        return target(self.ours.point, self.ours.contender, self.ours.what)

    @property
    def to_plain(self) -> float | None:
        return self.ours.metrics.get("to_plain")

    @property
    def verdict(self) -> str:
        """PASS or SHORT; empty where there is nothing to judge."""
        if self.target is None or self.to_plain is None:
            return ""
        return "PASS" if self.to_plain >= self.target else "SHORT"

    @property
    def best_peer(self) -> Row | None:
        return best(self.peers.values(), PEER)

    @property
    def ahead(self) -> float | None:
        """Our speed over that of the fastest peer."""
        peer = self.best_peer
        return self.ours.metrics["tflops"] / peer.metrics["tflops"] if peer else None


def lines(rows: Sequence[Row]) -> list[Line]:
    """The measured rows of ours, each with the measured peers of its point and direction."""
    found = []
    others: dict[tuple[str, Point], dict[str, Row]] = {}
    for row in rows:
        if row.role != OURS and row.metrics:
            others.setdefault((row.what, row.point), {})[row.contender] = row
    for row in rows:
        if row.role == OURS and row.metrics:
            found.append(Line(row, others.get((row.what, row.point), {})))
    return found


def progress(heading: str, rows: Sequence[Row]) -> list[str | Text]:
    """What to print about the rows of one shape and direction as soon as they are there."""
    first = rows[0]
    shown: list[str | Text] = [
        Text(f"{heading} {WHAT[first.what]} {first.point.plain().text()}", style="bold")
    ]
    for line in lines(rows):
        figures = [f"{number(line.ours.metrics['tflops']):>8} TFLOP/s"]
        if line.to_plain:
            figures.append(f"{line.to_plain:.2f} of plain {line.verdict}".rstrip())
        figures += [f"{titled(name)} {_speed(row)}" for name, row in line.peers.items()]
        shown.append(f"    {titled(line.ours.contender)} {line.ours.case:26} {', '.join(figures)}")
    return shown


HEAD = ("dim", "mask", "batch", "seqlen", "feature", "TFLOP/s", "of plain", "target", "verdict")
TEXT = ("mask", "feature", "verdict")  # aligned at the left


def _cells(line: Line, peers: Sequence[str]) -> list[str | Text]:
    point, ratio = line.ours.point, line.to_plain
    style = {"PASS": "bold green", "SHORT": "bold red"}.get(line.verdict, "")
    batch = f"{len(point.lengths)} docs" if point.varlen else str(point.batch)
    cells: list[str | Text] = [
        str(point.head_dim),
        point.mask,
        batch,
        str(point.seqlen_q),
        line.ours.case,
        _speed(line.ours),
        f"{ratio:.2f}" if ratio else "",
        f"{line.target:.2f}" if line.target else "",
        Text(line.verdict, style=style),
    ]
    cells += [_speed(line.peers[name]) if name in line.peers else "" for name in peers]
    if _compared(peers):
        cells.append(ratio_text(line.ahead) if line.ahead else "")
    return cells


def _compared(names: Sequence[str]) -> bool:
    """Whether one of these contenders is a peer, not only a baseline."""
    return any(CONTENDERS[name].role == PEER for name in names)


def _speed(row: Row) -> str:
    spread = f" ({row.metrics['spread']:.0%})" if "spread" in row.metrics else ""
    return number(row.metrics["tflops"]) + spread


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[str], list[Line]]]:
    """(title, peers with a figure, lines) of each contender of ours, direction and dtype."""
    sections = []
    judged = lines(rows)
    keys = [(x.ours.what, x.ours.point.dtype, x.ours.contender) for x in judged]
    for what, dtype, contender in dict.fromkeys(keys):
        part = [x for x, key in zip(judged, keys, strict=True) if key == (what, dtype, contender)]
        peers = measured_columns([row for x in part for row in x.peers.values()])
        sections.append((f"{titled(contender)}, {WHAT[what]}, {dtype}", peers, part))
    return sections


def _head(peers: Sequence[str]) -> list[str]:
    return [*HEAD, *map(titled, peers), *(["ours / best peer"] if _compared(peers) else [])]


def _table(title: str, peers: Sequence[str], part: Sequence[Line]) -> Table:
    table = make_table(f"{title}: TFLOP/s (spread), and over that of the plain call")
    for name in _head(peers):
        table.add_column(name, justify="left" if name in TEXT else "right")
    for line in part:
        if line.ours.case == PLAIN and table.row_count:
            table.add_section()
        table.add_row(*_cells(line, peers))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The tables as Markdown, with the verdicts below."""
    blocks = []
    for title, peers, part in _sections(rows):
        head = _head(peers)
        block = [f"{title}:", "", "| " + " | ".join(head) + " |"]
        block.append("|" + "".join("---|" if name in TEXT else "---:|" for name in head))
        block += ["| " + " | ".join(map(str, _cells(line, peers))) + " |" for line in part]
        blocks.append("\n".join(block))
    verdicts = [f"- {text}" for _, text in summaries(rows)]
    return "\n\n".join([*blocks, "\n".join(verdicts)]) + "\n"


def summaries(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """(whether it passes, what to say) of each contender of ours, direction and feature: against
    its target, and against the peers."""
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines(rows):
        if line.ours.case != PLAIN:
            key = (line.ours.contender, line.ours.what, line.ours.case)
            groups.setdefault(key, []).append(line)
    found = []
    for (contender, what, case), part in groups.items():
        who = f"{titled(contender)}, {WHAT[what]}, {case}"
        judged = [line for line in part if line.verdict]
        if judged:
            short = [line for line in judged if line.verdict == "SHORT"]
            word = "SHORT" if short else "PASS"
            reached = f"{len(judged) - len(short)} of {len(judged)} points reach their target"
            worst = _least(judged, lambda line: (line.to_plain or 0) / (line.target or 1))
            text = f"{word}: {who}: {reached}; worst {worst.to_plain:.2f} for {worst.target:.2f}"
            found.append((not short, f"{text} ({worst.ours.point.text()})"))
        compared = [line for line in part if line.ahead is not None]
        if compared:
            ahead = sum((line.ahead or 0) >= 1 for line in compared)
            worst = _least(compared, lambda line: line.ahead or 0)
            assert worst.best_peer is not None
            word = "PASS" if ahead == len(compared) else "SHORT"
            text = f"{word}: {who}: ahead of every peer at {ahead} of {len(compared)} points"
            peer = f"{worst.ahead:.2f}x {titled(worst.best_peer.contender)}"
            place = f"{peer} ({worst.ours.point.text()})"
            found.append((word == "PASS", f"{text}; worst {place}"))
    return found


def _least(part: Sequence[Line], key: Callable[[Line], float]) -> Line:
    return min(part, key=key)


def print_features(console: Console, rows: Sequence[Row]) -> bool:
    """Prints tables, what could not be measured, and the verdicts; returns whether every point
    reaches its target and no peer is ahead."""
    for section in _sections(rows):
        console.print()
        console.print(_table(*section))
    print_reasons(console, rows, cases="feature")
    console.print()
    said = summaries(rows)
    for passes, text in said:
        console.print(Text(text, style="bold green" if passes else "bold red"), soft_wrap=True)
    return all(passes for passes, _ in said)
