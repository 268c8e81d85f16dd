"""`speed`: contenders in turn at every point, over several rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .again import again
from .contenders import OURS, Contender
from .contenders.base import Attention, CannotRun
from .flops import flops
from .inputs import Inputs, make_inputs
from .memory import MIB, peak_bytes
from .points import Point
from .results import Row
from .steps import Deadline, Step, attempt, cannot_run, free_memory, make_step, measuring
from .timing import Plan, Timer, make_timer, median, spread, turns

# The limit of rms(difference) / rms(value) between two contenders. The roundings of two right
# results stay far below it; a wrong mask or scale is far above it.
DISAGREEMENT = 0.05


@dataclass(frozen=True)
class Settings:
    """How points are measured; which points is not part of it."""

    device: torch.device
    contenders: Sequence[Contender]
    directions: Sequence[str] = ("fwd",)
    rounds: int = 5
    time_ms: float = 100.0
    limit_s: float | None = None
    peak_tflops: float | None = None
    memory: bool = False  # also measure the peak memory of each step
    seed: int = 0


def command(point: Point, direction: str, settings: Settings, contenders: Iterable[str]) -> str:
    """The command line that measures one row, or all rows of a point, again."""
    return again(
        "speed",
        point,
        settings.device,
        direction=direction,
        contenders=",".join(contenders),
        rounds=str(settings.rounds),
        time_ms=f"{settings.time_ms:g}",
    )


@dataclass
class _Entry:
    """A contender that runs at the point in hand."""

    contender: Contender
    step: Step
    plan: Plan
    memory_mib: float | None = None
    rounds: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass
class _Camp:
    """Contenders that computed the same."""

    names: list[str]
    result: object


class Bench:
    """One run of `speed`; `measure` yields the rows of each point and direction as they are
    finished."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.timer: Timer = make_timer(settings.device, settings.time_ms)
        self.deadline = Deadline(settings.limit_s)
        self._calls: dict[str, Attention] = {}  # by contender, for the point in hand
        self._camps: list[_Camp] = []  # for the point and direction in hand

    def measure(self, points: Iterable[Point], done: Callable[[list[Row]], None]) -> None:
        """Measures every point and direction; `done` receives the rows of each."""
        for point in points:
            device, seed = self.settings.device, self.settings.seed
            inputs, reason = attempt(make_inputs, point, device, seed=seed)
            for direction in self.settings.directions:
                if inputs is None:
                    done(self._rows(point, direction, {}, {}, default=reason))
                else:
                    done(self._measure_direction(point, direction, inputs))
            self._calls = {}
            del inputs
            free_memory()

    def _measure_direction(self, point: Point, direction: str, inputs: Inputs) -> list[Row]:
        entries: dict[str, _Entry] = {}
        reasons: dict[str, str] = {}
        # Ours run last: of two camps of the same size the first is believed.
        for contender in sorted(self.settings.contenders, key=lambda c: c.role == OURS):
            entry = None
            reason = self.deadline.passed()
            reason = reason or cannot_run(contender, point, direction, self.settings.device)
            if not reason:
                with measuring(contender, point):
                    entry, reason = attempt(self._prepare, contender, point, direction, inputs)
            if entry is None:
                reasons[contender.name] = reason
            else:
                entries[contender.name] = entry
        self._refuse_minorities(entries, reasons)
        self._run_rounds(point, list(entries.values()))
        reasons |= {name: entry.reason for name, entry in entries.items() if entry.reason}
        return self._rows(point, direction, entries, reasons)

    def _prepare(
        self, contender: Contender, point: Point, direction: str, inputs: Inputs
    ) -> _Entry:
        if contender.name not in self._calls:
            self._calls[contender.name] = contender.build(point, inputs)
        step = make_step(self._calls[contender.name], direction, inputs)
        self._join_camp(contender.name, step())
        memory = peak_bytes(step, self.settings.device) / MIB if self.settings.memory else None
        return _Entry(contender, step, self.timer.plan(step), memory)

    def _join_camp(self, name: str, result: object) -> None:
        for camp in self._camps:
            if relative_difference(result, camp.result) < DISAGREEMENT:
                camp.names.append(name)
                return
        self._camps.append(_Camp([name], result))

    def _refuse_minorities(self, entries: dict[str, _Entry], reasons: dict[str, str]) -> None:
        """Believes the result that most contenders found, and refuses the others: nobody may be
        fast by computing something else."""
        camps, self._camps = self._camps, []
        if len(camps) < 2:
            return
        right = max(camps, key=lambda camp: len(camp.names))  # the first of equals
        for camp in camps:
            if camp is right:
                continue
            difference = relative_difference(camp.result, right.result)
            for name in camp.names:
                entries.pop(name, None)
                reasons[name] = (
                    f"its result differs from that of {', '.join(right.names)} "
                    f"by {difference:.0%} (rms)"
                )

    def _run_rounds(self, point: Point, entries: list[_Entry]) -> None:
        for round_index in range(self.settings.rounds):
            for index in turns(len(entries), round_index):
                entry = entries[index]
                if entry.reason:
                    continue
                with measuring(entry.contender, point):
                    times, entry.reason = attempt(self.timer.sample, entry.step, entry.plan)
                if times is not None:
                    entry.rounds.append(median(times))

    def _rows(
        self,
        point: Point,
        direction: str,
        entries: dict[str, _Entry],
        reasons: dict[str, str],
        default: str = "",
    ) -> list[Row]:
        rows = []
        for contender in self.settings.contenders:
            reason = reasons.get(contender.name, default)
            entry = entries.get(contender.name)
            metrics = {} if reason or not entry else self._metrics(point, direction, entry)
            rows.append(
                Row(
                    point=point,
                    contender=contender.name,
                    role=contender.role,
                    what=direction,
                    metrics=metrics,
                    samples=tuple(entry.rounds) if entry and metrics else (),
                    reason=reason,
                    command=command(point, direction, self.settings, [contender.name]),
                )
            )
        return rows

    def _metrics(self, point: Point, direction: str, entry: _Entry) -> dict[str, float]:
        time_ms = median(entry.rounds)
        tflops = flops(point, direction) / time_ms / 1e9
        metrics = {"time_ms": time_ms, "tflops": tflops}
        if len(entry.rounds) > 1:
            metrics["spread"] = spread(entry.rounds)
        if entry.memory_mib is not None:
            metrics["memory_mib"] = entry.memory_mib
        if self.settings.peak_tflops and point.dtype in ("fp16", "bf16"):
            metrics["peak_share"] = tflops / self.settings.peak_tflops
        return metrics


def relative_difference(result: object, expected: object) -> float:
    """Largest rms(a - b) / rms(b) over the tensors of two results of a step."""
    results = result if isinstance(result, tuple) else (result,)
    others = expected if isinstance(expected, tuple) else (expected,)
    worst = 0.0
    for a, b in zip(results, others, strict=True):
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if a.shape != b.shape:
            raise CannotRun(f"its result has shape {list(a.shape)}, expected {list(b.shape)}")
        a, b = a.detach().float(), b.detach().float()
        size = float(b.square().mean().sqrt())
        worst = max(worst, float((a - b).square().mean().sqrt()) / max(size, 1e-30))
    return worst
