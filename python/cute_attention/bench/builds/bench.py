"""`speed` with other builds: their steps are prepared and timed in the processes of the builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...timing import Plan, Timer
from ..inputs import Inputs
from ..points import Point
from ..results import Row
from ..speed import Bench, Case, Prepared, Settings
from .child import sampled
from .contender import InBuild, RemoteStep


class _Timers:
    """A timer that lets the process of a build time a step that is there."""

    def __init__(self, here: Timer) -> None:
        self._here = here

    def plan(self, step: Callable[[], object]) -> Plan:
        return self._here.plan(step)

    def sample(self, step: Callable[[], object], plan: Plan) -> list[float]:
        if isinstance(step, RemoteStep):
            return step.sample()
        return self._here.sample(step, plan)


class BuildsBench(Bench):
    """One run of `speed`. Parts of the results are compared, the same of each contender, since
    those of other processes are copied."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.timer = _Timers(self.timer)

    def _prepare(self, case: Case, direction: str, inputs: Inputs) -> Prepared:
        contender, point = case.contender, case.point
        if not isinstance(contender, InBuild):
            return super()._prepare(case, direction, inputs)
        step = contender.step(point, direction, self.settings.time_ms)
        self._join_camp(case, step())
        return Prepared(case, step, Plan(1))  # the plan is in its process

    def _join_camp(self, case: Case, result: object) -> None:
        parts: Any = result if isinstance(case.contender, InBuild) else sampled(result)
        super()._join_camp(case, tuple(map(torch.from_numpy, parts)))

    def _measure_together(
        self, shape: Point, cases: Sequence[Case], done: Callable[[list[Row]], None]
    ) -> None:
        super()._measure_together(shape, cases, done)
        for case in cases:
            if isinstance(case.contender, InBuild):
                case.contender.forget()
