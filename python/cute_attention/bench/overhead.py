"""`overhead`: host microseconds per call, on a shape so small that nothing else takes time.

Calls are issued back to back and the clock stops before the GPU is waited for. On a CPU there is no
queue: the figure then holds the arithmetic of the call too, on the smallest shape there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console

from .again import again
from .contenders import Contender
from .contenders.base import Attention, CannotRun
from .contenders.ours import Ours
from .inputs import Inputs, make_inputs
from .parts import PARTS
from .points import Point
from .results import Row
from .steps import Deadline, Step, attempt, cannot_run, free_memory, measuring
from .tables import make_table, measured_columns, number, print_reasons, titled
from .timing import median, spread

KINDS = {
    "fwd": "forward, no gradient",
    "fwd+tape": "forward, gradient recorded",
    "fwdbwd": "forward and backward",
}


def default_point(device: torch.device) -> Point:
    if device.type == "cuda":
        return Point(batch=1, heads=8, seqlen_q=128, head_dim=64)
    return Point(batch=1, heads=1, seqlen_q=1, head_dim=8, dtype="fp32")


def make_step(call: Attention, kind: str, inputs: Inputs) -> Step:
    q, k, v = leaves = inputs.detached if kind == "fwd" else inputs.leaves
    if kind != "fwdbwd":
        return lambda: call(q, k, v)
    grad_out = inputs.grad_out
    return lambda: torch.autograd.grad(call(q, k, v), leaves, grad_out)


def _captured(step: Step) -> Step:
    """The step as a CUDA graph, replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up off the capture, as torch.cuda.graph asks
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def build(contender: Contender, point: Point, kind: str, mode: str, inputs: Inputs) -> Step:
    native, inputs = contender.native(point, inputs)
    call: Any = native
    if mode == "compiled":
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True)
    if mode != "graph":
        return make_step(call, kind, inputs)
    if inputs.q.device.type != "cuda":
        raise CannotRun("CUDA graphs need an NVIDIA GPU")
    if kind == "fwd+tape":
        raise CannotRun("a graph is replayed without recording: see forward and backward")
    return _captured(make_step(call, kind, inputs))


def microseconds(step: Step, calls: int, rounds: int, device: torch.device) -> list[float]:
    """Host time per call of each round."""
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    return found


@dataclass(frozen=True)
class Settings:
    kind: str
    mode: str
    calls: int
    rounds: int
    device: torch.device


def _direction(kind: str) -> str:
    """What a contender must be able to do for a kind of call."""
    return "fwdbwd" if kind == "fwdbwd" else "fwd"


def _rates(contender: Contender, point: Point, inputs: Inputs, settings: Settings) -> list[float]:
    with measuring(contender, point):
        step = build(contender, point, settings.kind, settings.mode, inputs)
        microseconds(step, settings.calls, 1, settings.device)
        return microseconds(step, settings.calls, settings.rounds, settings.device)


def _parts(contender: Ours, point: Point, inputs: Inputs, settings: Settings) -> dict[str, float]:
    """Microseconds of each part of a call without gradient."""
    found = {}
    with measuring(contender, point):
        build(contender, point, "fwd", "eager", inputs)()  # the first call of its kind
        native, used = contender.native(point, inputs)
        native(*used.detached)
        for name, step in contender.parts(point, used).items():
            microseconds(step, settings.calls, 1, settings.device)
            rates = microseconds(step, settings.calls, settings.rounds, settings.device)
            found[f"{name}_us"] = median(rates)
    return found


def measure(
    point: Point,
    contenders: Sequence[Contender],
    modes: Sequence[str],
    device: torch.device,
    calls: int,
    rounds: int,
    deadline: Deadline,
    done: Callable[[Row], None],
) -> None:
    inputs = make_inputs(point, device)
    for mode in modes:
        for contender in contenders:
            for kind in KINDS:
                rates = None
                reason = cannot_run(contender, point, _direction(kind), device)
                reason = reason or deadline.passed()
                if not reason:
                    settings = Settings(kind, mode, calls, rounds, device)
                    rates, reason = attempt(_rates, contender, point, inputs, settings)
                metrics = {"host_us": median(rates), "spread": spread(rates)} if rates else {}
                if rates and isinstance(contender, Ours) and (kind, mode) == ("fwd", "eager"):
                    parts, reason = attempt(_parts, contender, point, inputs, settings)
                    metrics |= parts or {}
                done(
                    Row(
                        point=point,
                        contender=contender.name,
                        role=contender.role,
                        what=kind,
                        case=mode,
                        metrics=metrics,
                        samples=tuple(rates or ()),
                        reason=reason,
                        command=again(
                            "overhead", point, device, contenders=contender.name, modes=mode
                        ),
                    )
                )
    free_memory()


def print_overhead(console: Console, rows: Sequence[Row]) -> None:
    """One line per contender, one column per mode and kind."""
    columns = [
        (mode, kind)
        for mode in dict.fromkeys(row.case for row in rows)
        for kind in KINDS
        if any(row.metrics for row in rows if (row.case, row.what) == (mode, kind))
    ]
    title = f"host microseconds per call: {rows[0].point.text()}"
    table = make_table(title)
    table.add_column("contender")
    for mode, kind in columns:
        table.add_column(f"{mode}\n{KINDS[kind]}", justify="right")
    for name in measured_columns(rows):
        found = {(row.case, row.what): row.metrics for row in rows if row.contender == name}
        cells = []
        for column in columns:
            metrics = found.get(column)
            cells.append(number(metrics["host_us"]) if metrics else "-")
        table.add_row(titled(name), *cells)
    console.print()
    console.print(table)
    _print_parts(console, rows)
    print_reasons(console, rows)


def _print_parts(console: Console, rows: Sequence[Row]) -> None:
    """Where the time of our eager calls goes. Autograd is what recording a gradient adds."""
    table = make_table(f"parts of an eager call, microseconds: {rows[0].point.text()}")
    for column in ("contender", *PARTS.values(), "the rest", "autograd", "backward"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name in measured_columns(rows):
        mine = [row for row in rows if (row.contender, row.case) == (name, "eager")]
        found = {row.what: row.metrics for row in mine}
        whole = found.get("fwd", {})
        if "launch_us" not in whole:
            continue
        parts = [whole[f"{part}_us"] for part in PARTS]
        hosts = [found.get(kind, {}).get("host_us") for kind in KINDS]
        recorded = [b - a if a and b else None for a, b in pairwise(hosts)]
        cells = [*parts, whole["host_us"] - sum(parts), *recorded]
        table.add_row(titled(name), *("-" if cell is None else number(cell) for cell in cells))
    if table.row_count:
        console.print()
        console.print(table)
