"""`cycles`: what Nsight Compute counts in one call of each contender, at a clock that it holds. One
call tells as much as many: the cycles of a kernel differ less from run to run than its time, which
follows the clock that the GPU has at the moment."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..layouts import counters
from ..layouts.errors import LayoutError
from .again import again
from .builds import Build
from .contenders import BUILD, OURS, Contender
from .points import Point
from .results import Row, point_to_dict

CLOCKS = ("base", "none")  # of --clock-control
METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "instructions": counters.INSTRUCTIONS,
    "dram_bytes": "dram__bytes.sum",
}
BETWEEN = "spin_kernel"  # what `builds.child.count` launches before each call


@dataclass(frozen=True)
class Settings:
    """How calls are counted; which calls is not part of it."""

    device: torch.device
    clock: str = "base"
    seed: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a contender."""

    contender: Contender
    point: Point
    direction: str


@dataclass
class Launch:
    """A kernel of a call."""

    name: str
    counted: dict[str, float] = field(default_factory=dict)


def calls_of(
    build: Build,
    points: Sequence[Point],
    directions: Sequence[str],
    contenders: Sequence[Contender],
) -> list[Call]:
    """The calls that are made in a build: in another one than this package only those of ours."""
    return [
        Call(contender, point, direction)
        for point in points
        for direction in directions
        for contender in contenders
        if not build.label or contender.role == OURS
    ]


def command(build: Build, file: Path, settings: Settings, ncu: str) -> list[str]:
    """The command line that makes the calls of a file under Nsight Compute."""
    return [
        *(ncu, "--csv", "--print-units", "base", "--clock-control", settings.clock),
        *("--profile-from-start", "off", "--target-processes", "all"),
        *("--metrics", ",".join(METRICS.values())),
        *build.command(settings.device, settings.seed, "count", str(file)),
    ]


def parse(output: str) -> list[list[Launch]]:
    """The kernels of each call, in their order, from the CSV that ncu prints."""
    columns = {metric: name for name, metric in METRICS.items()}
    launches: dict[str, Launch] = {}
    for line in counters.csv_lines(output):
        launch = launches.setdefault(line["ID"], Launch(line["Kernel Name"]))
        value = line["Metric Value"].replace(",", "")
        if line["Metric Name"] in columns and re.fullmatch(r"[0-9.]+", value):
            launch.counted[columns[line["Metric Name"]]] = float(value)
    calls: list[list[Launch]] = []
    for launch in launches.values():
        if BETWEEN in launch.name:
            calls.append([])
        elif calls:
            calls[-1].append(launch)
    return calls


def metrics_of(launches: Sequence[Launch]) -> dict[str, float]:
    """The metrics of a row: sums over all kernels of a call, and the cycles of the longest one."""
    found = {name: sum(launch.counted[name] for launch in launches) for name in METRICS}
    return found | {
        "longest_cycles": max(launch.counted["cycles"] for launch in launches),
        "kernels": float(len(launches)),
    }


def measure(calls: Sequence[Call], build: Build, settings: Settings) -> list[Row]:
    """A row for each call, in order: all are made in one process of a build.

    Raises:
        LayoutError: Nsight Compute is not there, or fails.
    """
    asked = [[c.contender.name, point_to_dict(c.point), c.direction] for c in calls]
    with tempfile.TemporaryDirectory(prefix="cute-attention-") as folder:
        file = Path(folder) / "calls.json"
        file.write_text(json.dumps(asked))
        words = command(build, file, settings, counters.find_ncu())
        found = parse(counters.run(words, build.environment))
        reasons = json.loads(file.read_text())
    if len(found) != len(calls):
        raise LayoutError(f"ncu has counted {len(found)} calls, and {len(calls)} were asked for")
    return [
        row_of(call, build, settings, reason or _lacking(launches), launches)
        for call, reason, launches in zip(calls, reasons, found, strict=True)
    ]


def _lacking(launches: Sequence[Launch]) -> str:
    """What Nsight Compute has not told of a call, as a reason; "" if nothing."""
    if not launches:
        return "Nsight Compute has seen no kernel"
    absent = [name for name in METRICS if any(name not in each.counted for each in launches)]
    return f"Nsight Compute has not counted {', '.join(absent)}" if absent else ""


def row_of(
    call: Call, build: Build, settings: Settings, reason: str, launches: Sequence[Launch] = ()
) -> Row:
    """The row of a call, with a reason in place of figures if there is one."""
    contender = call.contender
    return Row(
        point=call.point,
        contender=f"{contender.name} ({build.label})" if build.label else contender.name,
        role=BUILD if build.label else contender.role,
        what=call.direction,
        metrics={} if reason else metrics_of(launches),
        reason=reason,
        command=again(
            "cycles",
            call.point,
            settings.device,
            direction=call.direction,
            contenders=contender.name,
            build=[build.in_build] if build.label else [],
            clock=settings.clock,
        ),
    )
