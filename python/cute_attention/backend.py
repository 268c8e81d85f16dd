"""Which backend serves a call: what was asked for, and the choice, cached."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch

from ._check import type_name
from .errors import BackendError, FallbackWarning
from .survey import BACKENDS, Features, Question, Report, survey, table

if TYPE_CHECKING:
    from types import TracebackType

ENVIRONMENT = "CUTE_ATTENTION_BACKEND"


class _Context:
    """What `use_backend` asked for: a plain attribute, on which torch.compile can guard."""

    requested = "auto"


_context = _Context()


class use_backend:
    """Context manager that forces a backend for the calls inside it, as an argument would.

    The argument of a call wins over the context, the context over the environment variable
    CUTE_ATTENTION_BACKEND. Like `torch.nn.attention.sdpa_kernel` it holds for the whole process,
    not for the current thread alone. What was asked for at the forward of a call also holds for its
    backward. A compiled function compiles again under another context; it reads the environment
    while it compiles, and no more.

    Args:
        backend: "auto", "sm90", "sm80" or "reference".

    Raises:
        ValueError: an unknown backend.

    Example:
        >>> import torch
        >>> from cute_attention import attention, use_backend
        >>> q = k = v = torch.randn(1, 16, 4, 64)
        >>> with use_backend("reference"):
        ...     out = attention(q, k, v)
    """

    def __init__(self, backend: str) -> None:
        check_name("use_backend", "backend", backend)
        self.backend = backend
        self.previous: list[str] = []

    def __enter__(self) -> use_backend:
        self.previous.append(_context.requested)
        _context.requested = self.backend
        return self

    def __exit__(
        self,
        exception: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _context.requested = self.previous.pop()


def requested_backend(argument: str) -> str:
    """The argument, else the context's; "auto" where neither asks (the environment may still)."""
    return argument if argument != "auto" else _context.requested


def check_name(name: str, label: str, backend: object) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"{name}: {label} is {type_name(backend)}, expected a str")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"{name}: {label} is {backend!r}, expected one of {('auto', *BACKENDS)}")


Key = tuple[torch.dtype, int, int, Features, torch.device, str]

_choices: dict[Key, str] = {}
_backward_choices: dict[tuple[Key, bool], str] = {}
_warned: set[str] = set()


def select_forward(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    device: torch.device,
    requested: str,
) -> str:
    """The backend of a forward call, from a cache by exactly these arguments.

    Raises:
        BackendError: `requested` is a backend that does not serve the call.
    """
    if requested == "auto":
        requested = os.environ.get(ENVIRONMENT, "auto")
    key = (dtype, head_dim, head_dim_v, features, device, requested)
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _choose_forward(key)
    return choice


# torch.compile calls the function while tracing and keeps its answer. The mark is what
# torch.compiler.assume_constant_result sets, without its import of torch._dynamo (a second).
select_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _choose_forward(key: Key) -> str:
    dtype, head_dim, head_dim_v, features, device, requested = key
    check_name("attention", ENVIRONMENT, requested)
    if requested == "reference" or (requested == "auto" and device.type != "cuda"):
        return "reference"
    question = Question("forward", dtype, head_dim, head_dim_v, features, device)
    reports = survey(question)
    choice = choose(requested, reports)
    if choice == "reference":
        _warn_of_fallback(reports)
    return choice


def choose(requested: str, reports: tuple[Report, ...]) -> str:
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


def select_backward(
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    features: Features,
    device: torch.device,
    requested: str,
    deterministic: bool,
) -> str:
    """The backend of the backward of a forward call, from a cache by exactly these arguments.

    `reference` repeats bitwise whatever `deterministic` asks for.
    """
    if requested == "auto":
        requested = os.environ.get(ENVIRONMENT, "auto")
    key = (dtype, head_dim, head_dim_v, features, device, requested)
    choice = _backward_choices.get((key, deterministic))
    if choice is None:
        choice = _backward_choices[key, deterministic] = _choose_backward(key, deterministic)
    return choice


select_backward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _choose_backward(key: Key, deterministic: bool) -> str:
    dtype, head_dim, head_dim_v, features, device, requested = key
    if requested == "reference" or device.type != "cuda":
        return "reference"
    question = Question(
        "backward", dtype, head_dim, head_dim_v, features, device, deterministic=deterministic
    )
    reports = survey(question)
    choice = choose_backward(requested, reports)
    if choice == "reference":
        _warn_of_fallback(reports, "backward ")
    return choice


def choose_backward(requested: str, reports: tuple[Report, ...]) -> str:
    """What was requested of the forward, if it serves, and `reference` if it does not: the output
    is there by then. The first that serves where nothing was requested."""
    serving = [report.backend for report in reports if report.serves]
    if requested == "auto":
        return serving[0]
    return requested if requested in serving else "reference"


def _warn_of_fallback(reports: tuple[Report, ...], direction: str = "") -> None:
    reasons = "; ".join(
        f"{report.backend}: {', '.join(report.reasons)}" for report in reports if not report.serves
    )
    if direction + reasons in _warned:
        return
    _warned.add(direction + reasons)
    warnings.warn(
        f"attention: no {direction}kernel serves this call, so the slower reference backend does "
        f"({reasons}); cute_attention.explain shows more, backend='reference' silences this",
        FallbackWarning,
        stacklevel=6,  # whoever calls attention
    )
