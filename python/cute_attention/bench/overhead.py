"""`overhead`: host microseconds per call, on a shape so small that nothing else takes time.

Calls are issued back to back and the clock stops before the GPU is waited for. On a CPU there is no
queue: the figure then holds the arithmetic of the call too, on the smallest shape there is.
`forms.py` has the forms of a call that are measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..timing import median, spread
from .again import again
from .contenders import OURS, PEER, Contender
from .contenders.base import CannotRun
from .contenders.ours import Ours
from .forms import KINDS, case_of, decoding, form_of, kinds_of, mode_of, point_of
from .inputs import Inputs, make_inputs
from .parts import PARTS
from .points import Point
from .results import Row
from .steps import Deadline, Step, attempt, cannot_run, free_memory, measuring
from .tables import make_table, measured_columns, number, print_reasons, titled


def default_point(device: torch.device) -> Point:
    if device.type == "cuda":
        return Point(batch=1, heads=8, seqlen_q=128, head_dim=64)
    return Point(batch=1, heads=1, seqlen_q=1, head_dim=8, dtype="fp32")


def make_step(call: Callable[..., Any], kind: str, inputs: Inputs) -> Step:
    q, k, v = inputs.detached if kind == "fwd" else inputs.leaves
    if kind != "fwdbwd":
        return lambda: call(q, k, v)
    learned, grad_out = inputs.learned, inputs.grad_out

    def step() -> object:
        results = call(q, k, v)
        out = results[0] if isinstance(results, tuple) else results
        return torch.autograd.grad(out, learned, grad_out)

    return step


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


def _compiled(call: Callable[..., object]) -> Callable[..., object]:
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True)


def _as_it_is(call: Callable[..., object]) -> Callable[..., object]:
    return call


def build(
    contender: Contender, point: Point, form: str, kind: str, mode: str, inputs: Inputs
) -> Step:
    prepared = _compiled if mode == "compiled" else _as_it_is
    if mode == "graph" and inputs.q.device.type != "cuda":
        raise CannotRun("CUDA graphs need an NVIDIA GPU")
    if form == "decode":
        if mode == "graph":
            raise CannotRun("a graph has one number of keys")
        return decoding(contender, point, inputs, prepared)
    native = contender.native_with_lse if form == "lse" else contender.native
    call, inputs = native(point, inputs)
    if mode != "graph":
        return make_step(prepared(call), kind, inputs)
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


_WITH_PARTS = ("dense", "fwd", "eager")  # form, kind and mode


@dataclass(frozen=True)
class Settings:
    form: str
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
        step = build(contender, point, settings.form, settings.kind, settings.mode, inputs)
        microseconds(step, settings.calls, 1, settings.device)
        return microseconds(step, settings.calls, settings.rounds, settings.device)


def _parts(contender: Ours, point: Point, inputs: Inputs, settings: Settings) -> dict[str, float]:
    """Microseconds of each part of a call without gradient."""
    found = {}
    with measuring(contender, point):
        build(contender, point, "dense", "fwd", "eager", inputs)()  # the first call of its kind
        native, used = contender.native(point, inputs)
        native(*used.detached)
        for name, step in contender.parts(point, used).items():
            microseconds(step, settings.calls, 1, settings.device)
            rates = microseconds(step, settings.calls, settings.rounds, settings.device)
            found[f"{name}_us"] = median(rates)
    return found


def measurements(
    point: Point, contenders: Sequence[Contender], forms: Sequence[str], modes: Sequence[str]
) -> Iterator[tuple[Point, str, str, Contender, str]]:
    """Point, form, mode, contender and kind of everything that is measured."""
    for form in forms:
        formed = point_of(form, point)
        if formed is not None:
            yield from itertools.product([formed], [form], modes, contenders, kinds_of(form))


def measure(
    point: Point,
    contenders: Sequence[Contender],
    forms: Sequence[str],
    modes: Sequence[str],
    device: torch.device,
    calls: int,
    rounds: int,
    deadline: Deadline,
    done: Callable[[Row], None],
) -> None:
    inputs = None
    last = None
    for each, form, mode, contender, kind in measurements(point, contenders, forms, modes):
        if inputs is None or each != last:
            inputs, last = make_inputs(each, device), each
        rates = None
        reason = cannot_run(contender, each, _direction(kind), device)
        reason = reason or deadline.passed()
        if not reason:
            settings = Settings(form, kind, mode, calls, rounds, device)
            rates, reason = attempt(_rates, contender, each, inputs, settings)
        metrics = {"host_us": median(rates), "spread": spread(rates)} if rates else {}
        if rates and isinstance(contender, Ours) and (form, kind, mode) == _WITH_PARTS:
            parts, reason = attempt(_parts, contender, each, inputs, settings)
            metrics |= parts or {}
        options = {"contenders": contender.name, "forms": form, "modes": mode}
        done(
            Row(
                point=each,
                contender=contender.name,
                role=contender.role,
                what=kind,
                case=case_of(form, mode),
                metrics=metrics,
                samples=tuple(rates or ()),
                reason=reason,
                command=again("overhead", each, device, **options),
            )
        )
    free_memory()


def print_overhead(console: Console, rows: Sequence[Row]) -> None:
    """A table for each form: a line for each contender and for each ratio of ours to a peer, a
    column for each mode and kind."""
    groups = itertools.groupby(rows, lambda row: (row.point, form_of(row.case)))
    for (point, form), members in groups:
        group = list(members)
        if not measured_columns(group):
            continue
        console.print()
        console.print(_table_of(f"host microseconds per call, {form}: {point.text()}", group))
        _print_parts(console, group)
    print_reasons(console, rows)


def _table_of(title: str, rows: Sequence[Row]) -> Table:
    hosts = {
        (row.contender, row.case, row.what): row.metrics["host_us"] for row in rows if row.metrics
    }
    columns = list(dict.fromkeys((case, kind) for _, case, kind in hosts))
    table = make_table(title)
    table.add_column("contender")
    for case, kind in columns:
        table.add_column(f"{mode_of(case)}\n{KINDS[kind]}", justify="right")
    names = measured_columns(rows)
    for name in names:
        found = [hosts.get((name, *column)) for column in columns]
        table.add_row(titled(name), *("-" if us is None else number(us) for us in found))
    roles = {row.contender: row.role for row in rows}
    for mine, other in itertools.product(names, names):
        if roles[mine] != OURS or roles[other] != PEER:
            continue
        pairs = [(hosts.get((mine, *c)), hosts.get((other, *c))) for c in columns]
        cells = [f"{a / b:.2f}" if a and b else "-" for a, b in pairs]
        table.add_row(f"{titled(mine)} / {titled(other)}", *cells)
    return table


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
