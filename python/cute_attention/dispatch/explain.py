"""Why a call runs on the backend it runs on: `explain` and `kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack  # which torch depends on

from ..arguments import Arguments, feature_words, problem_of
from ..checked import described
from ..native import core
from ..native.core import Kernel
from ..options import AllOptions, documented
from ..problem import Problem
from .backends import Report, survey, table
from .request import (
    ENVIRONMENT,
    check_name,
    context_backend,
    environment_backend,
    requested_rows,
)
from .select import choose_backward


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str()` of it is a table for people."""

    call: str  # the call in words
    requested: str  # what was asked for, and by what
    chosen: str | None  # the backend of the forward; None where the one asked for cannot serve
    chosen_backward: str | None  # None as for the forward; empty where there is no backward
    forward: tuple[Report, ...]  # every backend, fastest first, with its rows
    backward: tuple[Report, ...]

    def __str__(self) -> str:
        nothing = "none: the call raises BackendError"
        lines = [
            f"call:     {self.call}",
            f"asked:    {self.requested}",
            f"forward:  {self.chosen or nothing}",
            table(self.forward, self.chosen, estimates=True),
        ]
        if self.chosen_backward != "":
            lines += [
                f"backward: {self.chosen_backward or nothing}",
                table(self.backward, self.chosen_backward, estimates=True),
            ]
        return "\n".join(lines)

    __repr__ = __str__


@documented
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[AllOptions],
) -> Explanation:
    """For a call of `attention` or `attention_varlen`: what every backend and every kernel says to
    it, and which one runs.

    Computes nothing and never falls back. Takes the arguments of either function; with
    `cu_seqlens_q` it is about `attention_varlen`. Whether a backend serves depends on dtype, head
    dims, mask, device and the features in use; the sizes decide between its kernels. Masks are
    those of `attention`, such as causal with seqlen_q 2 and seqlen_k 3:

        1 1 0
        1 1 1

    Args:
        q: `[batch, seqlen_q, heads, head_dim]`, or packed `[total_q, heads, head_dim]`.
        k: `[batch, seqlen_k, heads_kv, head_dim]`, or packed.
        v: `[batch, seqlen_k, heads_kv, head_dim_v]`, or packed.
        cu_seqlens_q: int32 `[batch + 1]` where packed.
        cu_seqlens_k: int32 `[batch + 1]` where packed.
        max_seqlen_q: the longest sequence of q where packed.
        max_seqlen_k: the longest sequence of k where packed.
        **options: those of `Options` in options.py.

    Returns:
        An `Explanation`.

    Raises:
        TypeError: as the call would.
        ValueError: as the call would, but that the values of cu_seqlens are not read; or a size
            that is no int32.

    Example:
        >>> import torch
        >>> from cute_attention import explain
        >>> q = k = v = torch.randn(1, 16, 4, 64)
        >>> explain(q, k, v, causal=True).chosen
        'reference'
    """
    name, _, given, call = described(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options
    )
    return explain_checked(name, call, given)


def explain_checked(name: str, call: Arguments, given: Mapping[str, Any]) -> Explanation:
    """`explain` for checked arguments of the function `name`; `given` are all options."""
    words = feature_words(call)
    if given["deterministic"] or torch.are_deterministic_algorithms_enabled():
        words.append("deterministic")
    check_name(name, "backend", given["backend"])
    asked_for = requested_rows(name, given["kernel"])
    return explain_problem(problem_of(call), given["backend"], words, asked_for)


def explain_problem(
    problem: Problem,
    backend: str = "auto",
    words: Sequence[str] = (),
    rows: tuple[str, str] = ("", ""),
) -> Explanation:
    """`explain` for a call that is only described; `words` say what it asks of a kernel, `rows` are
    the kernels that are asked for by name, forward and backward."""
    requested, source = _requested(backend)
    forward = survey(problem._replace(row=rows[0]))
    backward = survey(problem._replace(direction="backward", row=rows[1]))
    asked_for = "".join(f", kernel {row}" for row in rows if row)
    return Explanation(
        call=", ".join([*_describe(problem), *words]),
        requested=f"{requested} ({source}){asked_for}",
        chosen=_forced(requested, forward),
        chosen_backward=_forced(requested, backward)
        if rows[1]
        else choose_backward(requested, backward),
        forward=forward,
        backward=backward,
    )


def _forced(requested: str, reports: tuple[Report, ...]) -> str | None:
    """The backend that was asked for, or for "auto" the first that serves; None where none does."""
    serving = [report.backend for report in reports if report.serves]
    wanted = serving[0] if requested == "auto" and serving else requested
    return wanted if wanted in serving else None


def kernels() -> list[Kernel]:
    """The rows of every kernel library that is loaded: name, architecture, direction, dtype, head
    dims, tile and resources; of those that `rows.load_library` loads later, too.

    Loads the libraries, which does not initialise CUDA. Empty where the package was built without
    kernels.

    Example:
        >>> from cute_attention import kernels
        >>> sorted({row.arch for row in kernels()} - {"sm80", "sm90"})
        []
    """
    return core.kernels()


def _requested(argument: str) -> tuple[str, str]:
    """What backend is asked for, and by what."""
    if argument != "auto":
        return argument, "argument"
    if (context := context_backend()) != "auto":
        return context, "use_backend"
    environment = environment_backend()
    return environment, ENVIRONMENT if environment != "auto" else "nothing was asked for"


def _describe(problem: Problem) -> list[str]:
    head_dims = f"{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        head_dims += f" and {problem.head_dim_v}"
    words = [
        f"{problem.dtype} on {problem.device}",
        f"batch {problem.batch}",
        f"seqlen {problem.seqlen_q} x {problem.seqlen_k}",
        f"heads {problem.heads} of {problem.heads_kv}",
        f"head dim {head_dims}",
    ]
    left, right = (
        None if bound < 0 else bound for bound in (problem.window_left, problem.window_right)
    )
    if (left, right) != (None, None):
        words.append("causal" if (left, right) == (None, 0) else f"window ({left}, {right})")
    return words
