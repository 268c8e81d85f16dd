"""The registry of backends: what each says to a problem, and the ops that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..native import binding, core, packages
from ..native.core import Candidate
from ..ops.schema import BRIEF_KERNELS, KERNELS, REFERENCE, Family
from ..problem import Problem

VECTOR = 8  # elements of a row that kernels load at a time; other head dims are filled up to it


@dataclass(frozen=True)
class Report:
    """The answer of one backend."""

    backend: str
    serves: bool
    reasons: tuple[str, ...]  # empty where it serves
    rows: tuple[Candidate, ...] = ()
    failed: bool = False  # it could not answer, and may answer otherwise the next time


@dataclass(frozen=True)
class Backend(ABC):
    """What serves calls."""

    name: str  # as users write it
    ops: Family
    multiple: int  # its ops take head dims that are multiples of this
    # Its brief ops, by the number of extras that they take; they refuse tensors that do not agree.
    brief: Mapping[int, Family]

    @abstractmethod
    def report(self, problem: Problem) -> Report:
        """Whether it serves a problem, and if not, why not."""


class Kernels(Backend):
    """The compiled kernels of one architecture, and of those after it that can run them."""

    def report(self, problem: Problem) -> Report:
        """What the rows of its libraries say."""
        device = problem.device
        ordinal = device.index if device is not None and device.type == "cuda" else None
        rounded = problem._replace(
            head_dim=whole_vectors(problem.head_dim), head_dim_v=whole_vectors(problem.head_dim_v)
        )
        core.check_sizes(rounded)
        if not core.available():
            return self._refuse("the package was installed without its kernel libraries")
        try:
            candidates = core.explain(rounded, ordinal)
        except RuntimeError as error:  # CUDA that torch can use and the kernel libraries cannot
            return Report(self.name, False, (str(error),), failed=True)
        rows = tuple(row for row in candidates if row.backend == self.name)
        if problem.row:
            rows = tuple(row for row in rows if row.name == problem.row)
            if not rows:
                return self._refuse(f"the call asks for kernel {problem.row}")
        if not rows:
            refused = [f"{entry.path}: {entry.error}" for entry in core.libraries() if entry.error]
            if not refused and self.name in _families_for(device):
                return self._refuse(
                    f"no {self.name} kernel is loaded: {packages.install_command(self.name)}"
                )
            return self._refuse(f"no {self.name} kernel is loaded", *refused)
        if ordinal is None:
            return Report(self.name, False, (f"q is on {device}, not on a CUDA device",), rows)
        if unbound := binding.binding_error():
            return Report(self.name, False, (unbound,), rows, failed=True)
        if any(not row.reasons for row in rows):
            return Report(self.name, True, (), rows)
        nearest = min(rows, key=lambda row: (row.on_request, len(row.reasons)))
        return Report(self.name, False, tuple(nearest.reasons), rows)

    def _refuse(self, *reasons: str) -> Report:
        return Report(self.name, False, reasons)


class Reference(Backend):
    """Pure PyTorch, which serves every call on every device."""

    def report(self, problem: Problem) -> Report:
        """It serves all but what asks for a kernel by its name."""
        if problem.row:
            return Report(self.name, False, (f"the call asks for kernel {problem.row}",))
        return Report(self.name, True, ())


def _families_for(device: torch.device | None) -> tuple[str, ...]:
    """The families that would serve a device if their kernels were installed."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return packages.families_for(major * 10 + minor)


def whole_vectors(head_dim: int) -> int:
    """The head dim to which kernels' tensors are filled up."""
    return -(-head_dim // VECTOR) * VECTOR


_FASTEST_FIRST: tuple[Backend, ...] = (
    Kernels("sm90", KERNELS, VECTOR, BRIEF_KERNELS),
    Kernels("sm80", KERNELS, VECTOR, BRIEF_KERNELS),
    Reference("reference", REFERENCE, 1, {}),
)
BACKENDS = {backend.name: backend for backend in _FASTEST_FIRST}


def survey(problem: Problem) -> tuple[Report, ...]:
    """Every backend's report, fastest backend first.

    Raises:
        ValueError: a size that no kernel can be asked about.
    """
    return tuple(backend.report(problem) for backend in BACKENDS.values())


def _expected(row: Candidate) -> str:
    """What the cost model expects of a row."""
    splits = f", {row.num_splits} splits of the keys" if row.num_splits > 1 else ""
    return f" (about {row.estimate_us:.1f} us{splits})"


def table(reports: tuple[Report, ...], chosen: str | None = None, estimates: bool = False) -> str:
    """One line per backend and per row: what it is, whether it serves, and every reason why not.

    Args:
        reports: of `survey`.
        chosen: the backend that runs, marked with an arrow.
        estimates: show the time that the cost model expects of a row.
    """
    lines = []
    for report in reports:
        mark = "->" if report.backend == chosen else "  "
        verdict = "serves" if report.serves else "; ".join(report.reasons)
        lines.append(f"{mark} {report.backend:<10} {verdict}")
        for row in report.rows:
            verdict = "; ".join(row.reasons) or "serves"
            time = _expected(row) if estimates and not row.reasons else ""
            mark = "->" if row.chosen and report.backend == chosen else "  "
            lines.append(f"     {mark} {row.name:<28} {verdict}{time}")
    return "\n".join(lines)
