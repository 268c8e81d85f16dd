"""Prints the Markdown tables of docs/performance.md for a result file of `bench speed`.

python tools/performance_table.py speed.json [PEER]

TFLOP/s of every contender at every point, and our fastest over PEER, or over the fastest peer of
the point where none is named. Of points with names (`--set models`): microseconds of ours and of
that peer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cute_attention.bench.contenders import OURS, PEER
from cute_attention.bench.ratios import best, by_point, geometric_mean
from cute_attention.bench.results import Row, read_json
from cute_attention.bench.tables import WHAT, measured_columns, titled


def tables(rows: Sequence[Row], peer: str | None) -> str:
    """A table and its summary for each direction."""
    directions = dict.fromkeys(row.what for row in rows if row.metrics)
    return "\n".join(_table([row for row in rows if row.what == what], peer) for what in directions)


def _table(rows: Sequence[Row], peer: str | None) -> str:
    """The table of one direction."""
    named = any(row.point.label for row in rows)
    columns = measured_columns(rows)
    name = titled(peer) if peer else "best peer"
    if named:
        head = [WHAT[rows[0].what], "ours, us", f"{name}, us", "ours / peer"]
    else:
        head = ["pass", "head dim", "mask", "seqlen", *columns, f"ours / {name}"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    ratios = []
    for (what, point), group in by_point(rows).items():
        ours = best(group, OURS)
        other = best([row for row in group if peer in (None, row.contender)], PEER)
        ratio = ours.metrics["tflops"] / other.metrics["tflops"] if ours and other else None
        ratios += [ratio] if ratio else []
        if named:
            cells = [point.label, _microseconds(ours), _microseconds(other)]
            cells[-1] += f" ({titled(other.contender)})" if other and not peer else ""
        else:
            found = {row.contender: row.metrics.get("tflops") for row in group}
            figures = [f"{found[c]:.0f}" if found.get(c) else "-" for c in columns]
            cells = [what, str(point.head_dim), point.mask, str(point.seqlen_q), *figures]
        lines.append("| " + " | ".join([*cells, f"{ratio:.2f}" if ratio else "-"]) + " |")
    if ratios:
        ahead = sum(ratio >= 1 for ratio in ratios)
        lines.append(
            f"\nGeometric mean {geometric_mean(ratios):.2f}, ahead at {ahead} of {len(ratios)}, "
            f"worst {min(ratios):.2f}.\n"
        )
    return "\n".join(lines)


def _microseconds(row: Row | None) -> str:
    return f"{1e3 * row.metrics['time_ms']:.0f}" if row else "-"


if __name__ == "__main__":
    print(tables(read_json(Path(sys.argv[1])).rows, sys.argv[2] if len(sys.argv) > 2 else None))
