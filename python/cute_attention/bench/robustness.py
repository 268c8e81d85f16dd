"""`robustness`: inputs made to break an online softmax, each timed in turn with standard normal
ones of the same shape, and held against float64 and the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..timing import Plan, Timer, make_timer, median, spread
from .adversarial import ADVERSARIAL, Adversarial, select
from .again import again
from .contenders import OURS, Contender
from .inputs import TORCH_DTYPES, Inputs, make_inputs
from .points import Point
from .results import Row
from .roundings import Exact, exact
from .steps import Deadline, Step, attempt, cannot_run, free_memory, make_step, measuring

TENSORS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
DIRECTIONS = tuple(TENSORS)
BASELINE_INPUT = "random_x1"
FAILED = "failed: "  # begins the reason of a row that should have figures

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """How points are measured; which points is not part of it."""

    device: torch.device
    contenders: Sequence[Contender]
    inputs: Sequence[str] = ("all",)  # names or groups of ADVERSARIAL
    directions: Sequence[str] = DIRECTIONS
    rounds: int = 5
    time_ms: float = 5.0
    seed: int = 0


@dataclass(frozen=True)
class _Timed:
    """A contender's step on one input, warm."""

    step: Step
    plan: Plan


def check_words(words: Sequence[str]) -> list[str]:
    """The names and groups of inputs as given; raises ValueError where one is unknown."""
    known = {"all", *ADVERSARIAL, *(entry.group for entry in ADVERSARIAL.values())}
    unknown = [word for word in words if word not in known]
    if unknown:
        groups = dict.fromkeys(entry.group for entry in ADVERSARIAL.values())
        raise ValueError(
            f"no input is named {', '.join(map(repr, unknown))}: choose from all, "
            f"the groups {', '.join(groups)}, and what --list shows"
        )
    return list(words)


def check_points(points: Iterable[Point]) -> None:
    """Raises ValueError for points at which the inputs are not what their descriptions say: where a
    window shows a query nothing but hidden keys, for example."""
    for point in points:
        if point.varlen or point.window:
            raise ValueError("robustness measures dense calls without a window")
        if point.dtype not in ("fp16", "bf16"):
            raise ValueError(f"robustness measures fp16 and bf16, not {point.dtype}")


def entries_of(point: Point, words: Sequence[str]) -> list[Adversarial]:
    return select(words, TORCH_DTYPES[point.dtype])


class Robustness:
    """One run; `measure` hands the rows of each input to `done` as they are finished."""

    def __init__(self, settings: Settings, deadline: Deadline) -> None:
        self.settings, self.deadline = settings, deadline
        self.timer: Timer = make_timer(settings.device, settings.time_ms)
        self._normal: dict[tuple[str, str], tuple[_Timed | None, str]] = {}

    def measure(self, points: Iterable[Point], done: Callable[[list[Row]], None]) -> None:
        for point in points:
            normal = make_inputs(point, self.settings.device, seed=self.settings.seed)
            self._normal = {}
            for entry in entries_of(point, self.settings.inputs):
                done(self._measure_entry(point, entry, normal))
            del normal
            self._normal = {}
            free_memory()

    def _measure_entry(self, point: Point, entry: Adversarial, normal: Inputs) -> list[Row]:
        inputs = change(normal, entry, point)
        truth: Exact | None = None
        late = self.deadline.passed()
        reason = ""
        if not late:
            truth, reason = attempt(_truth, point, inputs)
        rows: list[Row] = []
        for contender in self.settings.contenders:
            for direction in self.settings.directions:
                if redundant(contender, direction, self.settings):
                    continue
                place = (point, contender, direction, entry)
                why = late or (f"no float64 result: {reason}" if truth is None else "")
                why = why or cannot_run(contender, point, direction, self.settings.device)
                if why or truth is None:
                    rows += [self._row(*place, what, {}, why) for what in _whats(direction)]
                    continue
                with measuring(contender, point):
                    rows += self._errors(place, inputs, truth)
                    if contender.role == OURS:
                        rows.append(self._time(place, normal, inputs))
        return rows

    def _errors(
        self, place: tuple[Point, Contender, str, Adversarial], inputs: Inputs, truth: Exact
    ) -> list[Row]:
        point, contender, direction, _ = place
        found, reason = attempt(_results, contender, point, direction, inputs)
        rows = []
        for name in TENSORS[direction]:
            if found is None:
                rows.append(self._row(*place, name, {}, FAILED + reason))
            elif name in found:
                metrics, wrong = attempt(errors, truth, name, found[name])
                rows.append(self._row(*place, name, metrics or {}, wrong and FAILED + wrong))
        return rows

    def _time(
        self, place: tuple[Point, Contender, str, Adversarial], normal: Inputs, inputs: Inputs
    ) -> Row:
        """The time row of one input. Normal inputs and these are measured in turn, so that both see
        the same clock rate of the GPU."""
        point, contender, direction, _ = place
        key = (contender.name, direction)
        if key not in self._normal:
            self._normal[key] = attempt(self._prepare, contender, point, direction, normal)
        base, reason = self._normal[key]
        timed = None
        if base is not None:
            timed, reason = attempt(self._prepare, contender, point, direction, inputs)
        pairs = None
        if base is not None and timed is not None:
            pairs, reason = attempt(self._rounds, base, timed)
        if not pairs:
            return self._row(*place, direction, {}, FAILED + reason)
        ratios = [mine / usual for usual, mine in pairs]
        metrics = {
            "time_ms": median([mine for _, mine in pairs]),
            "normal_ms": median([usual for usual, _ in pairs]),
            "time_ratio": median(ratios),
            "spread": spread(ratios),
        }
        return replace(self._row(*place, direction, metrics, ""), samples=tuple(ratios))

    def _prepare(
        self, contender: Contender, point: Point, direction: str, inputs: Inputs
    ) -> _Timed:
        step = make_step(contender.build(point, inputs), direction, inputs)
        return _Timed(step, self.timer.plan(step))

    def _rounds(self, base: _Timed, timed: _Timed) -> list[tuple[float, float]]:
        """(milliseconds on normal inputs, milliseconds on these) of each round. They take turns at
        going first."""
        pairs = []
        for index in range(self.settings.rounds):
            order = (base, timed) if index % 2 == 0 else (timed, base)
            times = [median(self.timer.sample(each.step, each.plan)) for each in order]
            pairs.append((times[0], times[1]) if index % 2 == 0 else (times[1], times[0]))
        return pairs

    def _row(
        self,
        point: Point,
        contender: Contender,
        direction: str,
        entry: Adversarial,
        what: str,
        metrics: dict[str, float],
        reason: str,
    ) -> Row:
        device, inputs = self.settings.device, entry.name
        return Row(
            point=point,
            contender=contender.name,
            role=contender.role,
            what=what,
            case=entry.name,
            metrics=metrics,
            reason=reason,
            command=again("robustness", point, device, inputs=inputs, direction=direction),
        )


def _whats(direction: str) -> tuple[str, ...]:
    """The `what` of the rows of a direction: its tensors, and the direction itself for the time."""
    return (*TENSORS[direction], direction)


def redundant(contender: Contender, direction: str, settings: Settings) -> bool:
    """Whether a row would repeat another: on a Hopper GPU `auto` differs from sm90 in the backward
    of large head dims alone, so its forward is left out where sm90 is measured."""
    named = {each.name: each for each in settings.contenders}
    if contender.name != "auto" or direction != "fwd" or "sm90" not in named:
        return False
    return named["sm90"].missing(settings.device) is None


def change(normal: Inputs, entry: Adversarial, point: Point) -> Inputs:
    """The normal inputs with q and k changed as the entry says, and v as it was."""
    if entry.name == BASELINE_INPUT:
        return normal
    q, k, v = normal.detached
    q, k = entry.make(q, k, TORCH_DTYPES[point.dtype])
    leaves = [x.requires_grad_() for x in (q, k, v.clone())]
    return replace(normal, q=leaves[0], k=leaves[1], v=leaves[2])


def _truth(point: Point, inputs: Inputs) -> Exact:
    """The float64 results of the first batch entry. One entry is enough: all hold inputs of the
    same kind."""
    q, k, v, grad_out = (x.detach()[:1] for x in (*inputs.leaves, inputs.grad_out))
    return exact(q, k, v, grad_out, causal=point.causal, softcap=point.softcap or None)


def _results(contender: Contender, point: Point, direction: str, inputs: Inputs) -> Results:
    """Results of the whole shape, of which the first batch entry is compared. Peers' interfaces
    return no LSE."""
    if direction == "bwd":
        out = contender.build(point, inputs)(*inputs.leaves)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.grad_out)
        return {name: x[:1] for name, x in zip(TENSORS["bwd"], grads, strict=True)}
    if contender.role != OURS:
        return {"out": contender.build(point, inputs)(*inputs.detached)[:1]}
    out, lse = contender.build_with_lse(point, inputs)(*inputs.detached)
    return {"out": out[:1], "lse": lse[:1]}


def errors(truth: Exact, name: str, result: torch.Tensor) -> dict[str, float]:
    """Errors where float64 is finite: root mean square and largest, relative to the same of the
    truth; root mean square and largest in roundings; or how many values are not finite.

    `stored_lse` is the relative error that a gradient gets from rounding the LSE to fp32, half an
    ulp. Where scores are huge, no backward that reads such an LSE can promise less.
    """
    expected = truth.values[name]
    if result.shape != expected.shape:
        raise ValueError(f"shape is {list(result.shape)}, expected {list(expected.shape)}")
    seen = expected.isfinite()
    wrong = int((~result.isfinite() & seen).sum())
    if wrong:
        return {"not_finite": float(wrong)}
    difference = (result.detach().double() - expected)[seen]
    expected, sizes = expected[seen], truth.sizes[name][seen]
    rms, largest = float(difference.square().mean().sqrt()), float(difference.abs().max())
    size = truth.eps[name] * float(sizes.square().mean().sqrt())
    lse = truth.values["lse"]
    half_an_ulp = 0.5 * truth.eps["lse"] * float(lse[lse.isfinite()].square().mean().sqrt())
    return {
        "rms_error": rms / (float(expected.square().mean().sqrt()) or 1.0),
        "max_error": largest / (float(expected.abs().max()) or 1.0),
        "rms_roundings": rms / size,
        "roundings": float(truth.roundings(name, result).max()),
        "stored_lse": half_an_ulp if name in TENSORS["bwd"] else 0.0,
    }
