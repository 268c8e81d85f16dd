"""`speed`: contenders in turn at every point, over several rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..timing import Plan, Timer, make_timer, median, spread, turns
from .again import again
from .contenders import OURS, Contender
from .contenders.base import Attention, CannotRun
from .flops import flops
from .inputs import Inputs, make_inputs
from .memory import MIB, peak_bytes
from .points import Point
from .results import Row
from .steps import Deadline, Step, attempt, cannot_run, free_memory, make_step, measuring

# The limit of rms(difference) / rms(value) between two contenders. The roundings of two right
# results stay far below it; a wrong mask or scale is far above it.
DISAGREEMENT = 0.05
# With dropout everybody draws other bits, so root mean squares are compared instead of elements. At
# p = 0.1 a result without dropout is 5 % smaller, and one that is not scaled up is 10 % smaller.
# CHANCE over the root of the number of elements is what the bits may change.
SIZE_DISAGREEMENT = 0.03
CHANCE = 8.0


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


def command(
    point: Point, direction: str, settings: Settings, contenders: Sequence[Contender]
) -> str:
    """The command line that measures one row, or all rows of a point, again."""
    names = dict.fromkeys(contender.asked_as for contender in contenders)
    builds = dict.fromkeys(contender.in_build for contender in contenders if contender.in_build)
    return again(
        "speed",
        point,
        settings.device,
        direction=direction,
        contenders=",".join(names),
        build=tuple(builds),
        rounds=str(settings.rounds),
        time_ms=f"{settings.time_ms:g}",
    )


@dataclass(frozen=True)
class Case:
    """One of the calls that take turns."""

    contender: Contender
    point: Point
    name: str = ""  # of the case, where several points of a shape are measured together


@dataclass
class Prepared:
    """A case that runs at the shape in hand."""

    case: Case
    step: Step
    plan: Plan
    memory_mib: float | None = None
    rounds: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass
class _Camp:
    """Cases of a point that computed the same."""

    cases: list[Case]
    result: object


class Bench:
    """One run of `speed`; `measure` yields the rows of each point and direction as they are
    finished. Subclasses let several points of a shape take turns with each other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.timer: Timer = make_timer(settings.device, settings.time_ms)
        self.deadline = Deadline(settings.limit_s)
        self._calls: dict[tuple[str, Point], Attention] = {}  # for the shape in hand
        self._camps: dict[Point, list[_Camp]] = {}

    def measure(self, points: Iterable[Point], done: Callable[[list[Row]], None]) -> None:
        """Measures every point and direction; `done` receives the rows of each."""
        for point in points:
            cases = [Case(contender, point) for contender in self.settings.contenders]
            self._measure_together(point, cases, done)

    def _measure_together(
        self, shape: Point, cases: Sequence[Case], done: Callable[[list[Row]], None]
    ) -> None:
        """Measures cases in turn with each other, on the same tensors: those of `shape`, whose
        features are all that the points of the cases have."""
        device, seed = self.settings.device, self.settings.seed
        inputs, reason = attempt(make_inputs, shape, device, seed=seed)
        for direction in self.settings.directions:
            if inputs is None:
                done(self._rows(cases, direction, {}, dict.fromkeys(cases, reason)))
            else:
                done(self._measure_direction(cases, direction, inputs))
        self._calls = {}
        del inputs
        free_memory()

    def _refusal(self, case: Case, direction: str) -> str:
        """Why a case is not even tried, or ""."""
        return cannot_run(case.contender, case.point, direction, self.settings.device)

    def _command(self, case: Case, direction: str) -> str:
        """The command line that measures a row again."""
        return command(case.point, direction, self.settings, [case.contender])

    def _measure_direction(
        self, cases: Sequence[Case], direction: str, inputs: Inputs
    ) -> list[Row]:
        entries: dict[Case, Prepared] = {}
        reasons: dict[Case, str] = {}
        # Ours run last: of two camps of the same size the first is believed.
        for case in sorted(cases, key=lambda case: case.contender.role == OURS):
            entry = None
            reason = self.deadline.passed() or self._refusal(case, direction)
            if not reason:
                with measuring(case.contender, case.point):
                    entry, reason = attempt(self._prepare, case, direction, inputs)
            if entry is None:
                reasons[case] = reason
            else:
                entries[case] = entry
        self._refuse_minorities(entries, reasons)
        self._run_rounds(list(entries.values()))
        reasons |= {case: entry.reason for case, entry in entries.items() if entry.reason}
        return self._rows(cases, direction, entries, reasons)

    def _prepare(self, case: Case, direction: str, inputs: Inputs) -> Prepared:
        contender, point = case.contender, case.point
        inputs = inputs.only(point)
        key = contender.name, point
        if key not in self._calls:
            self._calls[key] = contender.build(point, inputs)
        step = make_step(self._calls[key], direction, inputs)
        self._join_camp(case, step())
        memory = peak_bytes(step, self.settings.device) / MIB if self.settings.memory else None
        return Prepared(case, step, self.timer.plan(step), memory)

    def _join_camp(self, case: Case, result: object) -> None:
        camps = self._camps.setdefault(case.point, [])
        for camp in camps:
            difference, limit = _disagreement(case.point, result, camp.result)
            if difference < limit:
                camp.cases.append(case)
                return
        camps.append(_Camp([case], result))

    def _believed(self, camps: Sequence[_Camp]) -> _Camp:
        """Whose result is right: that which most found, the first of equals."""
        return max(camps, key=lambda camp: len(camp.cases))

    def _refuse_minorities(self, entries: dict[Case, Prepared], reasons: dict[Case, str]) -> None:
        """Believes one result at a point and refuses the others: nobody may be fast by computing
        something else."""
        for point, camps in self._camps.items():
            right = self._believed(camps)
            believed = ", ".join(case.contender.name for case in right.cases)
            what = "the size of its result" if point.dropout else "its result"
            for camp in camps:
                if camp is right:
                    continue
                difference, _ = _disagreement(point, camp.result, right.result)
                for case in camp.cases:
                    entries.pop(case, None)
                    reasons[case] = (
                        f"{what} differs from that of {believed} by {difference:.0%} (rms)"
                    )
        self._camps = {}

    def _run_rounds(self, entries: Sequence[Prepared]) -> None:
        for round_index in range(self.settings.rounds):
            for index in turns(len(entries), round_index):
                entry = entries[index]
                if entry.reason:
                    continue
                with measuring(entry.case.contender, entry.case.point):
                    times, entry.reason = attempt(self.timer.sample, entry.step, entry.plan)
                if times is None:
                    self._failed(entry.case, entry.reason)
                else:
                    entry.rounds.append(median(times))

    def _failed(self, case: Case, reason: str) -> None:
        """Called when a case fails while it is timed, before any other runs."""

    def _rows(
        self,
        cases: Sequence[Case],
        direction: str,
        entries: dict[Case, Prepared],
        reasons: dict[Case, str],
    ) -> list[Row]:
        rows = []
        for case in cases:
            reason = reasons.get(case, "")
            entry = entries.get(case)
            metrics = {} if reason or not entry else self._metrics(case.point, direction, entry)
            rows.append(
                Row(
                    point=case.point,
                    contender=case.contender.name,
                    role=case.contender.role,
                    what=direction,
                    case=case.name,
                    metrics=metrics,
                    samples=tuple(entry.rounds) if entry and metrics else (),
                    reason=reason,
                    command=self._command(case, direction),
                )
            )
        return rows

    def _metrics(self, point: Point, direction: str, entry: Prepared) -> dict[str, float]:
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


def _pairs(result: object, expected: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two results of a step, side by side, in fp32."""
    results = result if isinstance(result, tuple) else (result,)
    others = expected if isinstance(expected, tuple) else (expected,)
    for a, b in zip(results, others, strict=True):
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if a.shape != b.shape:
            raise CannotRun(f"its result has shape {list(a.shape)}, expected {list(b.shape)}")
        yield a.detach().float(), b.detach().float()


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def relative_difference(result: object, expected: object) -> float:
    """Largest rms(a - b) / rms(b) over the tensors of two results of a step."""
    return max(_rms(a - b) / max(_rms(b), 1e-30) for a, b in _pairs(result, expected))


def _disagreement(point: Point, result: object, other: object) -> tuple[float, float]:
    """How far apart two results at a point are, and the limit of that."""
    if point.dropout:
        return size_excess(result, other), SIZE_DISAGREEMENT
    return relative_difference(result, other), DISAGREEMENT


def size_excess(result: object, expected: object) -> float:
    """Largest abs(rms(a) / rms(b) - 1) over the tensors of two results of a step, less what chance
    explains; 0 at least."""
    return max(
        abs(_rms(a) / max(_rms(b), 1e-30) - 1) - CHANCE / max(a.numel(), 1) ** 0.5
        for a, b in _pairs(result, expected)
    )
