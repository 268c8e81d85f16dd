"""Recorded figures of other contenders, read from a file and set beside what is measured now.

Two forms are read. Results of this tool: every measured row joins the same point. A list of
records: {head_dim, mask, seqlen, direction, contender, tflops} with optional dtype, batch, heads,
heads_kv, head_dim_v; short names (d, s, causal: true/false) and wide records ("fa3:fwd": 520.0) are
understood as well. A record without batch or heads is about 16k tokens and a hidden size of 2048,
and a record without a dtype is about bf16.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .contenders import PEER
from .flops import flops
from .points import Point
from .results import SCHEMA, Row
from .steps import DIRECTIONS

SUFFIX = " (recorded)"
_ALIASES = {"d": "head_dim", "s": "seqlen", "seqlen_q": "seqlen", "what": "direction"}


def read_recorded(path: Path) -> list[Row]:
    """The rows of a file for --against. Raises ValueError with the place in the file where
    something is not the figure of a contender."""
    data = json.loads(path.read_text())
    if isinstance(data, dict) and data.get("schema") == SCHEMA:
        rows = [Row.from_dict(row) for row in data["rows"]]
        return [_recorded(row) for row in rows if "tflops" in row.metrics]
    if not isinstance(data, list):
        raise ValueError(f"{path}: expected a list of records or a result file of this tool")
    rows = []
    for index, record in enumerate(data):
        try:
            rows += _from_record(record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: record {index} cannot be read: {error!r}") from error
    return rows


def _recorded(row: Row) -> Row:
    return Row(row.point, row.contender + SUFFIX, PEER, row.what, metrics=row.metrics)


def _from_record(record: dict[str, Any]) -> list[Row]:
    record = {_ALIASES.get(name, name): value for name, value in record.items()}
    head_dim, seqlen = int(record["head_dim"]), int(record["seqlen"])
    causal = record["mask"] == "causal" if "mask" in record else bool(record["causal"])
    if record.get("mask", "full") not in ("full", "causal"):
        raise ValueError(f"mask is {record['mask']!r}, expected full or causal")
    point = Point(
        batch=int(record.get("batch", max(1, 16384 // seqlen))),
        heads=int(record.get("heads", max(1, 2048 // head_dim))),
        heads_kv=int(record.get("heads_kv", 0)),
        seqlen_q=seqlen,
        head_dim=head_dim,
        head_dim_v=int(record.get("head_dim_v", 0)),
        dtype=record.get("dtype", "bf16"),
        causal=causal,
    )
    if "tflops" in record:
        figures = {(record["contender"], record["direction"]): record["tflops"]}
    else:
        wide = {name: value for name, value in record.items() if ":" in name}
        figures = {_split(name): value for name, value in wide.items()}
    if not figures:
        raise ValueError("no figure: expected tflops, or names such as 'fa3:fwd'")
    for name, direction in figures:
        if direction not in DIRECTIONS:
            raise ValueError(f"direction of {name} is {direction!r}, not {', '.join(DIRECTIONS)}")
    return [
        Row(point, name + SUFFIX, PEER, direction, metrics=_metrics(point, direction, float(value)))
        for (name, direction), value in figures.items()
    ]


def _split(name: str) -> tuple[str, str]:
    contender, _, direction = name.partition(":")
    return contender, direction


def _metrics(point: Point, direction: str, tflops: float) -> dict[str, float]:
    return {"tflops": tflops, "time_ms": flops(point, direction) / tflops / 1e9}


def joining(recorded: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """The recorded rows whose point and direction were measured now."""
    wanted = {(row.point.key(), row.what): row.point for row in rows}
    return [
        Row(wanted[key], row.contender, row.role, row.what, metrics=row.metrics)
        for row in recorded
        if (key := (row.point.key(), row.what)) in wanted
    ]
