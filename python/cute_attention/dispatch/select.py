"""The choice of a backend, cached by what was asked."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import BackendError, FallbackWarning
from ..native import core
from ..ops.dtensor import register_rules
from ..problem import Problem
from . import jit
from .backends import Report, survey, table

_choices: dict[tuple[Any, ...], str] = {}
_warned: dict[str, object] = {}


def select(requested: str, *problem: Any) -> str:
    """The backend of a forward or of a backward call, from a cache by exactly these arguments.

    What is requested of a forward is forced. Of a backward it holds if that backend serves, and
    `reference` does if not: the output is there by then. A kernel that is asked for by its name is
    forced in either direction. A choice is not cached where a backend
    failed to answer: the next call asks again.

    Args:
        requested: of `requested_backend`.
        *problem: the fields of a Problem whose sizes have their defaults. They come one by one,
            since torch.compile loses those of a NamedTuple that it passes to a constant function.

    Raises:
        BackendError: the backend that was asked for does not serve a forward call, or the kernel
            that was asked for does not serve.
    """
    register_rules()  # here, where all calls with DTensors pass, traced ones too
    key = (core.generation, requested, *problem)
    choice = _choices.get(key)
    if choice is None:
        choice, lasting = _choose(Problem(*problem), requested)
        if lasting:
            _choices[key] = choice
    return choice


def is_kept(requested: str, *problem: Any) -> bool:
    """Whether `select` has the choice in its cache."""
    return (core.generation, requested, *problem) in _choices


# For torch.compile, as in request.py.
select._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _choose(problem: Problem, requested: str) -> tuple[str, bool]:
    """The choice, and whether it may be cached."""
    forward = problem.direction == "forward"
    on_gpu = problem.device is not None and problem.device.type == "cuda"
    if problem.row:
        return choose_row(requested, problem.row, survey(problem)), True
    if requested == "reference" or (not on_gpu and (requested == "auto" or not forward)):
        return "reference", True
    if jit.is_on():
        jit.build_for(problem, requested)
    reports = survey(problem)
    choice = choose_forward(requested, reports) if forward else choose_backward(requested, reports)
    if choice == "reference":
        _warn_of_fallback(reports, "" if forward else "backward ")
    return choice, not any(report.failed for report in reports)


def choose_row(requested: str, row: str, reports: tuple[Report, ...]) -> str:
    """The backend of the row, which was asked for by its name.

    Raises:
        BackendError: the row does not serve, or another backend was asked for besides.
    """
    serving = [report.backend for report in reports if report.serves]
    if not serving:
        raise BackendError(f"attention: kernel {row!r} cannot serve this call\n{table(reports)}")
    if requested not in ("auto", *serving):
        raise BackendError(
            f"attention: the call asks for kernel {row!r} of backend {serving[0]!r}, and for "
            f"backend {requested!r}"
        )
    return serving[0]


def choose_forward(requested: str, reports: tuple[Report, ...]) -> str:
    """The requested backend, or the first that serves.

    Raises:
        BackendError: the requested backend does not serve.
    """
    serving = [report.backend for report in reports if report.serves]
    if requested == "auto":
        return serving[0]
    if requested not in serving:
        raise BackendError(
            f"attention: backend {requested!r} cannot serve this call\n{table(reports)}"
        )
    return requested


def choose_backward(requested: str, reports: tuple[Report, ...]) -> str:
    """What was requested of the forward, if it serves, and `reference` if it does not. The first
    that serves where nothing was requested."""
    serving = [report.backend for report in reports if report.serves]
    if requested == "auto":
        return serving[0]
    return requested if requested in serving else "reference"


def _warn_of_fallback(reports: tuple[Report, ...], direction: str) -> None:
    reasons = "; ".join(
        f"{report.backend}: {', '.join(report.reasons)}" for report in reports if not report.serves
    )
    mine = object()
    if _warned.setdefault(direction + reasons, mine) is not mine:  # one step: threads may race
        return
    warnings.warn(
        f"attention: no {direction}kernel serves this call, so the slower reference backend does "
        f"({reasons}); cute_attention.explain shows more, backend='reference' silences this",
        FallbackWarning,
        stacklevel=8,  # whoever calls attention
    )
