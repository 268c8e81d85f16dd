"""Tables for people, drawn with rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .contenders import CONTENDERS, OURS, PEER
from .points import Point
from .ratios import Summary, best, build_summaries, by_point, summaries
from .results import Row

WHAT = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}


def make_table(title: str) -> Table:
    """An empty table in the style of all: a bold title at the left, rules but no boxes."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def make_console() -> Console:
    """A console on standard output. Where that is no terminal, it is wide enough for every
    table."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=200)


def titled(name: str) -> str:
    """The column title of a contender."""
    base, _, suffix = name.partition(" ")
    if base in CONTENDERS:
        return f"{CONTENDERS[base].title} {suffix}".strip()
    return name


def ratio_text(ratio: float) -> Text:
    """A ratio in green where ours is ahead and in red where it is behind. Within 2 % it has no
    colour: one run cannot tell such a difference from noise."""
    style = "bold green" if ratio >= 1.02 else "bold red" if ratio <= 0.98 else ""
    return Text(f"{ratio:.2f}x", style=style)


def number(value: float, digits: int = 3) -> str:
    """`digits` significant digits, without an exponent."""
    if value == 0:
        return "0"
    magnitude = f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - int(magnitude.split("e")[1]))
    return f"{float(magnitude):,.{decimals}f}"


def measured_columns(rows: Sequence[Row]) -> list[str]:
    """Contenders with at least one figure, in order of appearance."""
    return list(dict.fromkeys(row.contender for row in rows if row.metrics))


def _point_cells(point: Point) -> list[str]:
    kv = "" if point.heads == point.heads_kv else f"/{point.heads_kv}"
    dim_v = "" if point.head_dim == point.head_dim_v else f"/{point.head_dim_v}"
    seqlen = str(point.seqlen_q) if point.seqlen_q == point.seqlen_k else ""
    seqlen = seqlen or f"{point.seqlen_q}:{point.seqlen_k}"
    batch = f"{len(point.lengths)} docs" if point.varlen else str(point.batch)
    return [f"{point.head_dim}{dim_v}", point.mask, batch, seqlen, f"{point.heads}{kv}"]


def speed_table(what: str, rows: Sequence[Row], dtype: str) -> Table:
    """TFLOP/s of every contender on every point of one direction, the best in bold."""
    title = f"{WHAT[what]}, {dtype}: TFLOP/s (spread between rounds)"
    table = make_table(title)
    labelled = any(row.point.label for row in rows)
    columns = measured_columns(rows)
    for name in (["model"] if labelled else []) + ["dim", "mask", "batch", "seqlen", "heads"]:
        table.add_column(name, justify="left" if name in ("model", "mask") else "right")
    for name in columns:
        table.add_column(titled(name), justify="right")
    shared = any("peak_share" in row.metrics for row in rows)
    for name in ("ours, ms", *(["of peak"] if shared else []), "ours / best peer"):
        table.add_column(name, justify="right")
    section = None
    for (_, point), group in by_point(rows).items():
        if section not in (None, (point.head_dim, point.mask)) and not labelled:
            table.add_section()
        section = point.head_dim, point.mask
        cells: list[str | Text] = [point.label] if labelled else []
        cells += _point_cells(point)
        table.add_row(*cells, *_figures(columns, group, shared))
    return table


def _figures(columns: Sequence[str], group: Sequence[Row], shared: bool) -> list[str | Text]:
    found = {row.contender: row for row in group if row.metrics}
    top = max((row.metrics["tflops"] for row in found.values()), default=0.0)
    cells: list[str | Text] = []
    for name in columns:
        if name not in found:
            cells.append(Text("-", style="dim"))
            continue
        metrics = found[name].metrics
        text = number(metrics["tflops"])
        if "spread" in metrics:
            text += f" ({metrics['spread']:.0%})"
        cells.append(Text(text, style="bold" if metrics["tflops"] == top else ""))
    ours, peer = best(group, OURS), best(group, PEER)
    if ours is None:
        return [*cells, "-", "-", *(["-"] if shared else [])]
    cells.append(number(ours.metrics["time_ms"]))
    if shared:
        share = ours.metrics.get("peak_share")
        cells.append(f"{share:.0%}" if share else "-")
    ratio = ours.metrics["tflops"] / peer.metrics["tflops"] if peer else None
    return [*cells, ratio_text(ratio) if ratio else "-"]


def print_speed(console: Console, rows: Sequence[Row]) -> None:
    """All tables of `speed`, what could not be measured, and the summary against the peers."""
    measured = [row for row in rows if row.metrics]
    for what in dict.fromkeys(row.what for row in measured):
        for dtype in dict.fromkeys(row.point.dtype for row in measured):
            part = [row for row in rows if row.what == what and row.point.dtype == dtype]
            if any(row.metrics for row in part):
                console.print()
                console.print(speed_table(what, part, dtype))
    print_reasons(console, rows)
    print_summaries(console, summaries(rows), "best peer")
    print_summaries(console, build_summaries(rows), "other build")


def print_reasons(console: Console, rows: Sequence[Row], cases: str = "") -> None:
    """Prints why rows have no figures: each contender and reason once, with the number of rows. If
    `cases` is given, a column of this title has the cases of the rows."""
    counts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.reason:
            counts.setdefault((row.contender, row.reason), []).append(row)
    if not counts:
        return
    table = make_table("not measured")
    table.add_column("contender")
    table.add_column("rows", justify="right")
    if cases:
        table.add_column(cases, overflow="fold")
    table.add_column("why", overflow="fold")
    for (contender, reason), group in counts.items():
        place = f"  (at {group[0].point.text()}, {group[0].what})" if len(group) == 1 else ""
        which = [", ".join(dict.fromkeys(row.case for row in group))] if cases else []
        table.add_row(titled(contender), str(len(group)), *which, Text(reason + place))
    console.print()
    console.print(table)


def print_summaries(console: Console, lines: Sequence[Summary], whom: str) -> None:
    """Prints the ratios over all points, and the points at which ours is behind `whom`."""
    if not lines:
        return
    title = f"ours against the {whom} at each point (above 1: ours is faster)"
    table = make_table(title)
    for name in ("contender", "direction"):
        table.add_column(name)
    for name in ("geometric mean", "worst", "ahead at"):
        table.add_column(name, justify="right")
    table.add_column("worst point")
    for line in lines:
        table.add_row(
            titled(line.contender),
            WHAT[line.what],
            ratio_text(line.geomean),
            ratio_text(line.worst.ratio),
            f"{line.ahead} of {line.count}",
            f"{line.worst.point.text()} (against {titled(line.worst.peer.contender)})",
        )
    console.print()
    console.print(table)
    _print_behind(console, lines, whom)


def _print_behind(console: Console, lines: Sequence[Summary], whom: str) -> None:
    """Every point at which a contender of ours is slower."""
    if not any(line.behind for line in lines):
        return
    table = make_table(f"points behind the {whom}")
    for name in ("contender", "direction", "point"):
        table.add_column(name)
    for name in (f"ours / {whom}", "ours, ms", "its, ms"):
        table.add_column(name, justify="right")
    table.add_column(whom)
    for line in lines:
        for pair in line.behind:
            table.add_row(
                titled(line.contender),
                WHAT[line.what],
                pair.point.text(),
                ratio_text(pair.ratio),
                number(pair.ours.metrics["time_ms"]),
                number(pair.peer.metrics["time_ms"]),
                titled(pair.peer.contender),
            )
        table.add_section()
    console.print()
    console.print(table)
