"""Prints the Markdown table of docs/performance.md for a result file of the benchmark.

python tools/performance_table.py speed.json [PEER]

TFLOP/s of every contender at every point, and the ratio of ours (the first named) to PEER.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

POINT = ("what", "head_dim", "mask", "seqlen_q")


def table(rows: list[dict[str, Any]], peer: str) -> str:
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    ours = contenders[0]
    points: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        points.setdefault(tuple(row[key] for key in POINT), {})[row["contender"]] = row["tflops"]
    lines = [
        "| pass | head dim | mask | seqlen | " + " | ".join(contenders) + f" | {ours} / {peer} |",
        "|---" * (5 + len(contenders)) + "|",
    ]
    ratios = []
    for point, tflops in points.items():
        ratio = tflops[ours] / tflops[peer] if tflops.get(ours) and tflops.get(peer) else None
        ratios += [ratio] if ratio else []
        cells = [f"{tflops[name]:.0f}" if tflops.get(name) else "-" for name in contenders]
        last = f"{ratio:.2f}" if ratio else "-"
        lines.append("| " + " | ".join([*map(str, point), *cells, last]) + " |")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    lines.append(f"\nGeometric mean {mean:.2f}, worst {min(ratios):.2f}.")
    return "\n".join(lines)


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text())
    print(table(results["rows"], sys.argv[2] if len(sys.argv) > 2 else "flash"))
