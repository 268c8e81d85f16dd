"""Candidates on a GPU: each is tried for its results, and those that are right are measured in turn
with the present row and the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..bench.contenders import Contender
from ..bench.contenders.base import OURS, reason_for
from ..bench.contenders.blocks import BuiltKernel
from ..bench.inputs import Inputs
from ..bench.points import Point
from ..bench.results import Row
from ..bench.speed import Bench, Case, Prepared, Settings, _Camp
from ..errors import BuildError
from ..native import core, packages
from ..native.core import Kernel
from ..rows.libraries import load_library
from ..rows.trial import fault_of
from ..timing import median
from .folder import BEGUN, Folder
from .plan import Entry, Search

TO_PRESENT = "to_present"  # the metric: speed over that of the present row in the same rounds

Trial = Callable[[Kernel, Kernel, Search, torch.device], str]


def cannot_run_on(device: torch.device, arch: str) -> str | None:
    """Why a GPU does not run kernels of a family, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    if arch in packages.families_for(10 * major + minor):
        return None
    return f"{arch} kernels do not run on compute capability {major}.{minor}"


@dataclass(frozen=True)
class Ready:
    """What of a search can be measured here, and why the rest cannot."""

    present: BuiltKernel
    candidates: tuple[Contender, ...]
    reasons: dict[str, str]  # of candidates, by the names of their kernels


class GpuUnusable(BaseException):
    """A kernel has left the GPU in a state in which this process cannot use it any more. No
    Exception, since those of contenders become reasons in rows."""


# Records that a kernel, by its name, has a fault.
Lost = Callable[[str, str], None]


def check_gpu(kernel: Kernel, device: torch.device, fault: str, lost: Lost) -> None:
    """Raises GpuUnusable, and records that it is the kernel's fault, where the GPU does not work
    any more."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        lost(kernel.name, fault)
        raise GpuUnusable(
            f"after {kernel.name} this process cannot use the GPU any more ({fault}). That is "
            "recorded: run the command again, and it goes on without this kernel"
        ) from error


def prepared(
    search: Search,
    folder: Folder,
    device: torch.device,
    device_name: str,
    trial: Trial,
) -> Ready:
    """Loads the libraries of a search and tries its candidates, each once on a GPU of this name. A
    trial that has begun and not ended, because the kernel hangs or ends the process, counts as
    failed from the next run on.

    Raises:
        ValueError: the present row is not in the folder, or does not load.
        GpuUnusable: after a trial the GPU cannot be used; another run goes on without the kernel.
    """
    trusted, reason = _load(search.present, folder)
    if trusted is None:
        raise ValueError(f"{search.subject.present.name}, with which all is compared: {reason}")
    candidates: list[Contender] = []
    reasons: dict[str, str] = {}
    known = folder.trials(device_name)
    for entry in search.entries[1:]:
        kernel, reason = _load(entry, folder)
        if kernel is not None:
            if kernel.name not in known:
                folder.save_trial(device_name, kernel.name, BEGUN)
                reason = _fault(kernel, trusted, search, device, trial)
                folder.save_trial(device_name, kernel.name, reason)
                if reason and device.type == "cuda":
                    check_gpu(kernel, device, reason, partial(folder.save_trial, device_name))
            else:
                reason = known[kernel.name]
        if kernel is None or reason:
            reasons[entry.name or entry.columns.name] = reason
        else:
            candidates.append(BuiltKernel(kernel))
    return Ready(BuiltKernel(trusted), tuple(candidates), reasons)


def _load(entry: Entry, folder: Folder) -> tuple[Kernel | None, str]:
    if not folder.has(entry):
        return None, entry.error or "it is not compiled"
    if not _loaded(entry.name):  # the name tells the content: another folder may have had it
        try:
            load_library(folder.path / entry.file, on_request=True)
        except BuildError as error:
            return None, str(error)
    found = _loaded(entry.name)
    return found, "" if found else f"{entry.file} has no kernel of this name"


def _loaded(name: str) -> Kernel | None:
    return next((kernel for kernel in core.kernels() if kernel.name == name), None)


def _fault(
    kernel: Kernel, trusted: Kernel, search: Search, device: torch.device, trial: Trial
) -> str:
    try:
        return trial(kernel, trusted, search, device)
    except Exception as error:
        return reason_for(error)


def trial_of(kernel: Kernel, trusted: Kernel, search: Search, device: torch.device) -> str:
    """What is wrong with a kernel at each kind of call that the points make."""
    problems = search.subject.problems(device)
    kinds = {(p.heads // p.heads_kv, p.softcap, p.head_dim, p.head_dim_v): p for p in problems}
    return next((fault for p in kinds.values() if (fault := fault_of(kernel, trusted, p))), "")


class Turns(Bench):
    """Measures candidates in turn with the present row and the peers. Where results differ, the
    present row is believed."""

    def __init__(self, settings: Settings, present: BuiltKernel, command: str, lost: Lost) -> None:
        super().__init__(settings)
        self.present = present
        self.again = command
        self.lost = lost

    def measure_point(
        self, point: Point, candidates: Sequence[Contender], done: Callable[[list[Row]], None]
    ) -> None:
        """Measures some candidates at a point; `done` receives the rows."""
        contenders = [self.present, *candidates, *self.settings.contenders]
        cases = [Case(contender, point) for contender in contenders]
        self._measure_together(
            point, cases, lambda rows: done(with_ratios(rows, self.present.name))
        )

    def _prepare(self, case: Case, direction: str, inputs: Inputs) -> Prepared:
        try:
            return super()._prepare(case, direction, inputs)
        except Exception as error:
            self._failed(case, reason_for(error))
            raise

    def _failed(self, case: Case, reason: str) -> None:
        if isinstance(case.contender, BuiltKernel):
            fault = f"{reason}, at {case.point.text()}"
            check_gpu(case.contender.kernel, self.settings.device, fault, self.lost)

    def _believed(self, camps: Sequence[_Camp]) -> _Camp:
        for camp in camps:
            if any(case.contender is self.present for case in camp.cases):
                return camp
        return super()._believed(camps)

    def _command(self, case: Case, direction: str) -> str:
        return self.again


def measure(
    search: Search,
    ready: Ready,
    turns: Turns,
    known: Sequence[Row],
    done: Callable[[list[Row]], None],
) -> None:
    """Measures at each point the candidates that were not measured there.

    Args:
        search: what is tuned.
        ready: its kernels.
        turns: who measures.
        known: rows of earlier runs on this GPU.
        done: receives the rows of each point that had something left to measure.
    """
    finished = {row.key()[:3] for row in known}
    direction = search.subject.direction
    for point in search.subject.points:

        def is_left(contender: Contender, point: Point = point) -> bool:
            return (point.key(), contender.name, direction) not in finished

        left = [contender for contender in ready.candidates if is_left(contender)]
        if left or is_left(ready.present):
            turns.measure_point(point, left, done)


def with_ratios(rows: Iterable[Row], present: str) -> list[Row]:
    """The rows with the speed over that of the present row. The ratio is taken in each round, since
    the clock may differ between rounds, and the median counts."""
    found = list(rows)
    base = next((row for row in found if row.contender == present and row.metrics), None)
    if base is None:
        return found
    return [
        replace(
            row,
            metrics={
                **row.metrics,
                TO_PRESENT: median(
                    [usual / own for usual, own in zip(base.samples, row.samples, strict=True)]
                ),
            },
        )
        if row.metrics
        else row
        for row in found
    ]


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, a newer one in the place of an older one of the same key. What was not reached in
    time is left out, so that it is measured another time."""
    rows = {row.key(): row for row in known}
    rows |= {row.key(): row for row in new if row.metrics or row.role == OURS}
    return [row for row in rows.values() if "not reached within" not in row.reason]
