"""The tables of `bench steps`, for a terminal and for docs/steps.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from .contenders import PEER
from .optimisations import STEPS
from .results import Row
from .tables import make_table, print_reasons, titled

# Of each figure: its title, its name, and how it is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("TFLOP/s", "tflops", lambda x: f"{x:.0f}"),
    ("of peak", "peak_share", lambda x: f"{x:.0%}"),
    ("of FlashAttention-2", "of_peer", lambda x: f"{x:.2f}"),
    ("registers", "registers", lambda x: f"{x:.0f}"),
    ("spilled bytes", "spilled_bytes", lambda x: f"{x:.0f}"),
    ("shared memory", "shared_memory", lambda x: f"{x:.0f}"),
    ("MMAs", "mma", lambda x: f"{x:.0f}"),
    ("MMAs counted", "counted_mma", lambda x: f"{x:.0f}"),
    ("ldmatrix", "ldmatrix", lambda x: f"{x:.0f}"),
    ("ldmatrix counted", "counted_ldmatrix", lambda x: f"{x:.0f}"),
    ("conflicts", "conflicts", lambda x: f"{x:.0f}"),
    ("conflicts counted", "counted_conflicts", lambda x: f"{x:.0f}"),
    ("instructions counted", "counted_instructions", lambda x: f"{x:.0f}"),
)


def with_peer(rows: Sequence[Row]) -> list[tuple[Row, dict[str, float]]]:
    """Each step of one point with its figures, those against FlashAttention-2 among them."""
    peer = next((row for row in rows if row.role == PEER and "tflops" in row.metrics), None)
    found = []
    for row in rows:
        if row.role == PEER:
            continue
        figures = dict(row.metrics)
        if peer and "tflops" in figures:
            figures["of_peer"] = figures["tflops"] / peer.metrics["tflops"]
        found.append((row, figures))
    order = {step.name: index for index, step in enumerate(STEPS)}
    return sorted(found, key=lambda each: order.get(each[0].contender, len(order)))


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The columns that have a figure, and the lines of one point."""
    steps = with_peer(rows)
    columns = [column for column in _COLUMNS if any(column[1] in known for _, known in steps)]
    lines = [
        [row.contender, *(text(known[name]) if name in known else "-" for _, name, text in columns)]
        for row, known in steps
    ]
    return ["step", *(title for title, _, _ in columns)], lines


def print_steps(console: Console, rows: Sequence[Row]) -> None:
    for point in dict.fromkeys(row.point for row in rows):
        own = [row for row in rows if row.point == point]
        head, lines = cells(own)
        table = make_table(f"forward: {point.text()}{_peer_text(own)}")
        for title in head:
            table.add_column(title, justify="left" if title == "step" else "right")
        for line in lines:
            table.add_row(*line)
        console.print()
        console.print(table)
    if any("tflops" in row.metrics for row in rows):
        print_reasons(console, rows)


def _peer_text(rows: Sequence[Row]) -> str:
    peer = next((row for row in rows if row.role == PEER and "tflops" in row.metrics), None)
    return f"; {titled(peer.contender)}: {peer.metrics['tflops']:.0f} TFLOP/s" if peer else ""


def markdown(rows: Sequence[Row], machine: str) -> str:
    """The tables as docs/steps.md has them. `machine` is where they were measured."""
    parts = []
    for point in dict.fromkeys(row.point for row in rows):
        own = [row for row in rows if row.point == point]
        head, lines = cells(own)
        measured = any("tflops" in row.metrics for row in own)
        where = f"On {machine}, {point.text()}{_peer_text(own)}:" if measured else "Predicted:"
        parts += [where, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        parts += [f"| {' | '.join(line)} |" for line in lines]
        parts.append("")
    return "\n".join(parts)


def explanations() -> str:
    """What each step does and why it pays, as a list in Markdown."""
    return "".join(f"- **{step.name}** (`{step.row.name}`): {step.why}\n" for step in STEPS)
