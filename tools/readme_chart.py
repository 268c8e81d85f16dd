"""Draws the chart at the top of README.md from a result file of `bench speed --set paper`.

python tools/readme_chart.py speed.json [CONTENDER]

CONTENDER is the one of ours that the chart shows beside the peers: auto unless named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import readme_section

from cute_attention.bench.contenders import OURS, PEER
from cute_attention.bench.plots import plot_speed
from cute_attention.bench.ratios import summaries
from cute_attention.bench.results import Row, read_json
from cute_attention.bench.sets import named_set
from cute_attention.bench.tables import WHAT, titled

IMAGE = "docs/images/speed.png"
DIRECTIONS = ("fwd", "bwd")


def chosen(rows: Sequence[Row], ours: str) -> list[Row]:
    """The rows that the chart shows. Raises ValueError where one of ours is missing."""
    points = {point.key() for point in named_set("paper")}
    kept = [
        row
        for row in rows
        if row.metrics
        and row.what in DIRECTIONS
        and row.point.key() in points
        and (row.contender == ours if row.role == OURS else row.role == PEER)
    ]
    for direction in DIRECTIONS:
        found = {r.point.key() for r in kept if r.what == direction and r.contender == ours}
        if found != points:
            raise ValueError(
                f"the file has {len(found)} of the {len(points)} points of the paper's grid for "
                f"{ours}, {WHAT[direction]}: measure with --set paper --direction fwd,bwd"
            )
    return kept


def caption(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    """The picture and what it shows, in Markdown."""
    peers = dict.fromkeys(titled(row.contender) for row in rows if row.role == PEER)
    verdicts = [
        f"{WHAT[line.what]} {line.geomean:.2f} (ahead at {line.ahead} of {line.count})"
        for line in summaries(rows)
    ]
    machine = f"{environment['device']}, torch {environment['torch']}"
    alt = f"TFLOP/s of cute-attention and its peers on {environment['device']}"
    return (
        f"![{alt}]({IMAGE})\n\n"
        f"{machine}, bf16, 16k tokens, hidden size 2048,\n"
        f"beside {', '.join(peers)}, all taking turns.\n"
        "Speed over that of the fastest peer of each point, geometric mean: "
        f"{', '.join(verdicts)}.\nThe figures, and how they are measured: "
        "`docs/performance.md`, `docs/benchmarking.md`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("contender", nargs="?", default="auto")
    args = parser.parse_args()
    results = read_json(args.results)
    rows = chosen(results.rows, args.contender)
    plot_speed(readme_section.ROOT / IMAGE, rows, results.environment["device"])
    readme_section.replace("chart", caption(rows, results.environment))


if __name__ == "__main__":
    main()
