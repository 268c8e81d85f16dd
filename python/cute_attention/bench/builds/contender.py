"""A contender of ours in another build."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..contenders import BUILD, OURS, Contender
from ..contenders.base import CannotRun
from ..points import Point
from ..results import point_to_dict
from .process import BuildProcess


class RemoteStep:
    """A step that is prepared in the process of a build."""

    def __init__(self, sample: Callable[[], list[float]], result: object) -> None:
        self.sample = sample  # milliseconds of each repeat
        self.result = result  # a part of it, for comparison

    def __call__(self) -> object:
        return self.result


class InBuild(Contender):
    """A contender of ours in another build. Its calls are made in the process of that build, where
    `step` prepares them; it has no `build`."""

    role = BUILD

    def __init__(self, contender: Contender, process: BuildProcess) -> None:
        self.name = f"{contender.name} ({process.build.label})"
        self.title = f"{contender.title} ({process.build.label})"
        self.in_build = process.build.in_build
        self._contender = contender
        self._process = process

    @property
    def asked_as(self) -> str:
        return self._contender.name

    def lacks(self, point: Point) -> str | None:
        return self._contender.lacks(point)

    def refuses(self, point: Point, direction: str) -> str | None:
        try:
            refused: str = self._ask("cannot_run", point, direction)
        except CannotRun as error:
            return str(error)
        return refused or None

    def step(self, point: Point, direction: str, time_ms: float) -> RemoteStep:
        """A step of a point, warmed up and ready to be timed."""
        result = self._ask("prepare", point, direction, time_ms)

        def sample() -> list[float]:
            times: list[float] = self._ask("sample", point, direction)
            return times

        return RemoteStep(sample, result)

    def forget(self) -> None:
        """Gives back the memory of the steps."""
        with contextlib.suppress(CannotRun):  # a process that has ended holds none
            self._process.ask("forget")

    def _ask(self, method: str, point: Point, *arguments: object) -> Any:
        return self._process.ask(method, self._contender.name, point_to_dict(point), *arguments)


def with_builds(
    contenders: Sequence[Contender], processes: Sequence[BuildProcess]
) -> list[Contender]:
    """The contenders, and behind each of ours the same one in every build."""
    made: list[Contender] = []
    for contender in contenders:
        made.append(contender)
        if contender.role == OURS:
            made += [InBuild(contender, process) for process in processes]
    return made
