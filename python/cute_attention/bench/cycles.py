"""`cycles`: what Nsight Compute counts in one call of each contender, at a clock that it holds. One
call tells as much as many: the cycles of a kernel differ less from run to run than its time, which
follows the clock that the GPU has at the moment."""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..layouts.counters import find_ncu
from ..layouts.errors import LayoutError
from .builds import Build
from .contenders import BUILD, OURS, Contender
from .points import Point
from .results import Row, point_to_dict

CLOCKS = ("base", "none")  # of --clock-control
METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "instructions": "smsp__inst_executed.sum",
    "dram_bytes": "dram__bytes.sum",
}
BETWEEN = "spin_kernel"  # what `builds.child.run_once` launches before each call


@dataclass(frozen=True)
class Case:
    """One call."""

    contender: Contender
    point: Point
    direction: str


@dataclass
class Launch:
    """A kernel of a call."""

    name: str
    counters: dict[str, float] = field(default_factory=dict)


def command(build: Build, file: Path, clock: str, ncu: str) -> list[str]:
    """The command line that makes the calls of a file under Nsight Compute."""
    return [
        *(ncu, "--csv", "--print-units", "base", "--clock-control", clock),
        *("--profile-from-start", "off", "--target-processes", "all"),
        *("--metrics", ",".join(METRICS.values())),
        *build.command("once", str(file)),
    ]


def parse(output: str) -> list[list[Launch]]:
    """The kernels of each call that ran, in their order, from the CSV that ncu prints."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    columns = {metric: name for name, metric in METRICS.items()}
    launches: dict[str, Launch] = {}
    for line in csv.DictReader(lines):
        launch = launches.setdefault(line["ID"], Launch(line["Kernel Name"]))
        if line["Metric Name"] in columns:
            value = float(line["Metric Value"].replace(",", ""))
            launch.counters[columns[line["Metric Name"]]] = value
    calls: list[list[Launch]] = []
    for launch in launches.values():
        if BETWEEN in launch.name:
            calls.append([])
        elif calls:
            calls[-1].append(launch)
    return calls


def metrics_of(launches: Sequence[Launch]) -> dict[str, float]:
    """The metrics of a row: sums over all kernels of a call, and the cycles of the longest one."""
    found = {name: sum(launch.counters[name] for launch in launches) for name in METRICS}
    return found | {
        "longest_cycles": max(launch.counters["cycles"] for launch in launches),
        "kernels": float(len(launches)),
    }


def measure(
    cases: Sequence[Case], build: Build, device: torch.device, seed: int, clock: str
) -> list[Row]:
    """A row for each case, in order: all are made in one process of a build.

    Raises:
        LayoutError: Nsight Compute is not there, or fails.
    """
    asked = [[c.contender.name, point_to_dict(c.point), c.direction] for c in cases]
    with tempfile.TemporaryDirectory(prefix="cute-attention-") as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps({"device": str(device), "seed": seed, "cases": asked}))
        words = command(build, file, clock, find_ncu())
        done = subprocess.run(words, env=build.environment, capture_output=True, text=True)
        if done.returncode != 0 or "==ERROR==" in done.stdout + done.stderr:
            raise LayoutError(f"ncu: {(done.stdout + done.stderr)[-1500:]}")
        reasons = json.loads(file.read_text())
    calls = iter(parse(done.stdout))
    return [
        _row(case, build, reason, [] if reason else next(calls, []))
        for case, reason in zip(cases, reasons, strict=True)
    ]


def _row(case: Case, build: Build, reason: str, launches: Sequence[Launch]) -> Row:
    contender = case.contender
    reason = reason or ("" if launches else "Nsight Compute has counted no kernel")
    return Row(
        point=case.point,
        contender=f"{contender.name} ({build.label})" if build.label else contender.name,
        role=BUILD if build.label else contender.role,
        what=case.direction,
        metrics={} if reason else metrics_of(launches),
        reason=reason,
    )


def cases_of(
    build: Build,
    points: Sequence[Point],
    directions: Sequence[str],
    contenders: Sequence[Contender],
) -> list[Case]:
    """The calls that are made in a build: in another one than this package only those of ours."""
    return [
        Case(contender, point, direction)
        for point in points
        for direction in directions
        for contender in contenders
        if not build.label or contender.role == OURS
    ]
