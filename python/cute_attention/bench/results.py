"""Rows of results, and the JSON and CSV files that hold them.

A file is {"schema": 1, "kind": subcommand, "environment": {...}, "rows": [...]}; a row is flat: the
fields of its Point, who and what was measured, the measurements, and the command that measures it
again. A row that could not be measured has no measurements and a reason.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .machine import Environment
from .points import Bounds, Point

SCHEMA = 1
POINT_FIELDS = [f.name for f in fields(Point)]


def point_to_dict(point: Point) -> dict[str, Any]:
    """A point as JSON has it."""
    window = list(point.window) if point.window else None
    return {**asdict(point), "window": window, "lengths": list(point.lengths)}


def point_from_dict(data: dict[str, Any]) -> Point:
    """The point of a dictionary that may have more than its fields."""
    point = {name: data[name] for name in POINT_FIELDS if name in data}
    if point.get("window"):
        point["window"] = Bounds(*point["window"])
    point["lengths"] = tuple(point.get("lengths", ()))
    return Point(**point)


@dataclass(frozen=True)
class Row:
    """One contender measured on one point."""

    point: Point
    contender: str
    role: str
    what: str  # fwd, bwd, fwdbwd; of accuracy out, lse, dq, dk, dv; of robustness both
    case: str = ""  # of accuracy and robustness the inputs; of overhead eager, compiled, graph
    metrics: dict[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()  # one per round; of accuracy the rms error of each draw
    max_samples: tuple[float, ...] = ()  # of accuracy: the largest error of each draw
    reason: str = ""  # why there are no metrics
    command: str = ""

    def key(self) -> tuple[Point, str, str, str]:
        """What identifies a row when two files are compared."""
        return self.point.key(), self.contender, self.what, self.case

    def to_dict(self) -> dict[str, Any]:
        return {
            **point_to_dict(self.point),
            "mask": self.point.mask,
            "contender": self.contender,
            "role": self.role,
            "what": self.what,
            "case": self.case,
            **self.metrics,
            "samples": list(self.samples),
            "max_samples": list(self.max_samples),
            "reason": self.reason,
            "command": self.command,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        known = {*POINT_FIELDS, "mask", "contender", "role", "what", "case"}
        known |= {"samples", "max_samples", "reason", "command"}
        return cls(
            point=point_from_dict(data),
            contender=data["contender"],
            role=data["role"],
            what=data["what"],
            case=data.get("case", ""),
            metrics={name: float(x) for name, x in data.items() if name not in known},
            samples=tuple(data.get("samples", ())),
            max_samples=tuple(data.get("max_samples", ())),
            reason=data.get("reason", ""),
            command=data.get("command", ""),
        )


@dataclass(frozen=True)
class Results:
    """All that one run of a subcommand measured."""

    kind: str
    environment: dict[str, Any]
    rows: list[Row]


def write_whole(path: Path, data: object) -> None:
    """Writes a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(part, path)


def write_json(path: Path, kind: str, environment: Environment, rows: Sequence[Row]) -> None:
    """Writes the file whole or not at all, so that it can be rewritten after every point."""
    data = {
        "schema": SCHEMA,
        "kind": kind,
        "environment": environment.to_dict(),
        "rows": [row.to_dict() for row in rows],
    }
    write_whole(path, data)


def read_json(path: Path) -> Results:
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result file of this tool (schema {SCHEMA})")
    rows = [Row.from_dict(row) for row in data["rows"]]
    return Results(data["kind"], data["environment"], rows)


def write_csv(path: Path, environment: Environment, rows: Sequence[Row]) -> None:
    """One line per row, every row with the same columns; the machine is repeated on each."""
    machine = {
        "device": environment.device,
        "driver": environment.driver,
        "torch": environment.torch,
        "package": environment.package,
        "commit": environment.commit,
    }
    lines = [{**row.to_dict(), **machine} for row in rows]
    for line in lines:
        for name in ("window", "lengths", "samples", "max_samples"):
            line[name] = " ".join(str(x) for x in line[name] or ())
    columns = list(dict.fromkeys(name for line in lines for name in line))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(lines)
