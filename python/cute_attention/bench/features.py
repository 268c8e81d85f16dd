"""`features`: what each score feature costs. Ours with it, ours without, and every peer that can do
the same take turns at each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..timing import median
from .again import again
from .contenders import CONTENDERS, OURS
from .points import FEATURES, Point
from .results import Row
from .speed import Bench, Case, Settings
from .steps import cannot_run

PLAIN = "plain"
# Measured unless --features says otherwise: each alone, those that cost something in pairs, and all
# together.
DEFAULT = (
    "alibi",
    "dropout",
    "softcap",
    "sink",
    "softcap+alibi",
    "alibi+dropout",
    "softcap+dropout",
    "softcap+alibi+sink+dropout",
)
# A name for all of them together, a bias too.
EVERY = "every"
# Shown with the reason why they are not measured: a bias takes the memory of all scores.
LEFT_OUT = ("bias", "+".join(FEATURES))


@dataclass(frozen=True)
class Values:
    """The numbers of the features that have one."""

    softcap: float = 30.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.softcap <= 0:
            raise ValueError(f"--softcap is {self.softcap}, expected a number above 0")
        if not 0 < self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}, expected 0 < P < 1")


def check_names(names: Sequence[str]) -> list[str]:
    """The features as given, each combination in the order of FEATURES; raises ValueError where one
    is unknown."""
    checked = []
    for name in names:
        parts = FEATURES if name == EVERY else name.split("+")
        unknown = [part for part in parts if part not in FEATURES]
        if unknown or len(set(parts)) < len(parts):
            raise ValueError(
                f"--features has {name!r}, expected some of {', '.join(FEATURES)}, "
                f"combinations such as {DEFAULT[-1]}, and {EVERY}"
            )
        checked.append("+".join(part for part in FEATURES if part in parts))
    return list(dict.fromkeys(checked))


def with_features(point: Point, name: str, values: Values) -> Point:
    """A point with the features of a name such as softcap+alibi."""
    numbers = {"softcap": values.softcap, "dropout": values.dropout}
    given = {part: numbers.get(part, True) for part in name.split("+")}
    return replace(point, **given)  # type: ignore[arg-type]


def default_contenders(device: torch.device) -> str:
    """The fastest backend of ours that is here, and the peers that have some of the features."""
    if device.type != "cuda":
        return "reference,math,flash"
    kernels = "sm80" if CONTENDERS["sm90"].missing(device) else "sm90"
    return f"{kernels},flex,efficient,cudnn,flash"


class Features(Bench):
    """One run. `measure` hands over the rows of each shape and direction as they are finished."""

    def __init__(self, settings: Settings, names: Sequence[str], values: Values) -> None:
        super().__init__(settings)
        self.names, self.values = check_names(names), values
        self.ours = [c for c in settings.contenders if c.role == OURS]
        if not self.ours:
            raise ValueError("--contenders has none of ours: whose features are to be measured?")

    def measure(self, points: Iterable[Point], done: Callable[[list[Row]], None]) -> None:
        for point in points:
            cases = self._cases(point)
            asked = [part for name in self.names for part in name.split("+")]
            shape = with_features(point, "+".join(asked), self.values) if asked else point
            self._measure_together(shape, cases, lambda rows: done(with_ratios(rows)))

    def _cases(self, point: Point) -> list[Case]:
        cases = [Case(contender, point, PLAIN) for contender in self.ours]
        for name in self.names:
            variant = with_features(point, name, self.values)
            cases += [Case(contender, variant, name) for contender in self.settings.contenders]
        for name in LEFT_OUT:
            if name not in self.names and not point.varlen:
                variant = with_features(point, name, self.values)
                cases += [Case(contender, variant, name) for contender in self.ours]
        return cases

    def _refusal(self, case: Case, direction: str) -> str:
        reason = super()._refusal(case, direction)
        if reason:
            return reason
        if case.name not in (PLAIN, *self.names):
            return f"{case.name} is left out unless --features names it"
        if case.contender.role != OURS and not self._ours_can(case.point, direction):
            return "nothing to compare with: none of ours that is measured does this"
        return ""

    def _ours_can(self, point: Point, direction: str) -> bool:
        device = self.settings.device
        return any(not cannot_run(c, point, direction, device) for c in self.ours)

    def _command(self, case: Case, direction: str) -> str:
        """Measures a row again, and that of ours without the feature, without which it says
        little."""
        names = [c.name for c in self.ours]
        if case.contender.name not in names:
            names.append(case.contender.name)
        return again(
            "features",
            case.point.plain(),
            self.settings.device,
            features=self.names[0] if case.name == PLAIN else case.name,
            softcap=f"{self.values.softcap:g}",
            dropout=f"{self.values.dropout:g}",
            direction=direction,
            contenders=",".join(names),
            rounds=str(self.settings.rounds),
            time_ms=f"{self.settings.time_ms:g}",
        )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of ours with `to_plain`: their speed over that without features. The ratio is
    taken in each round, since the clock may differ between rounds, and the median counts."""
    plain = {row.contender: row for row in rows if row.case == PLAIN and row.metrics}
    found = []
    for row in rows:
        base = plain.get(row.contender)
        if row.metrics and base is not None and row.case != PLAIN:
            ratios = [usual / mine for usual, mine in zip(base.samples, row.samples, strict=True)]
            row = replace(row, metrics={**row.metrics, "to_plain": median(ratios)})
        found.append(row)
    return found
