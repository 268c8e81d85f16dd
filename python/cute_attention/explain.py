"""Why a call runs on the backend it runs on: `explain` and `kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _check, _core
from ._call import Options, autocast, autocasts, check_options, features_of, without_numpy
from ._core import Row
from .backend import (
    ENVIRONMENT,
    check_name,
    choose_backward,
    environment_backend,
    requested_backend,
)
from .functional import Window
from .survey import DTYPE_NAMES, Question, Report, Sizes, survey, table


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str()` of it is a table for people."""

    call: str  # the call in words
    requested: str  # what was asked for, and by what
    chosen: str | None  # the backend of the forward; None where the one asked for cannot serve
    chosen_backward: str
    forward: tuple[Report, ...]  # every backend, fastest first, with its rows
    backward: tuple[Report, ...]

    def __str__(self) -> str:
        verdict = self.chosen or "none: the call raises BackendError"
        return "\n".join(
            [
                f"call:     {self.call}",
                f"asked:    {self.requested}",
                f"forward:  {verdict}",
                table(self.forward, self.chosen, estimates=True),
                f"backward: {self.chosen_backward}",
                table(self.backward, self.chosen_backward, estimates=True),
            ]
        )

    __repr__ = __str__


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
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
        causal: as in `attention`, like all that follow.
        window: `(left, right)`.
        scale: multiplies q·k.
        softcap: caps the scores.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`.
        bias: broadcastable to `[batch, heads, seqlen_q, seqlen_k]`.
        sink: float32 `[heads]`.
        dropout_p: share of the probabilities to drop.
        dropout_seed: an int, or an int64 tensor of one element.
        deterministic: ask for a backward that is bitwise repeatable.
        return_lse: return `(out, lse)`.
        backend: the backend to force, or "auto".

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
    packed = cu_seqlens_q is not None
    name = "attention_varlen" if packed else "attention"
    _check.tensors(name, q=q, k=k, v=v)
    if autocasts(q):
        q, k, v, bias = autocast(q, k, v, bias)
    _check.same_kind(name, q, k, v)
    if packed:
        totals = _check.packed_shapes(name, q, k, v)
        offsets, longest = _check.cu_seqlens(
            q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        shape = _check.Shape(offsets[0].shape[0] - 1, *longest, *totals[3:])
    else:
        shape = _check.dense_shapes(name, q, k, v)
    options = Options(
        causal, window, scale, softcap, alibi_slopes, bias, sink, dropout_p, dropout_seed,
        deterministic, return_lse, backend,
    )  # fmt: skip
    try:
        sides = check_options(name, q, shape, options)
    except TypeError:
        if (plain := without_numpy(options)) is None:
            raise
        options, sides = plain, check_options(name, q, shape, plain)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    sizes = Sizes(*shape[:5], *sides, options.softcap or 0.0)
    features = features_of(options, sides, packed)
    question = Question("forward", q.dtype, *shape[5:], features, q.device, sizes, deterministic)
    return explain_question(question, backend)


def explain_question(question: Question, backend: str = "auto") -> Explanation:
    """`explain` for a call that is only described."""
    requested, source = _requested(backend)
    forward = survey(question)
    backward = survey(question._replace(direction="backward"))
    serving = [report.backend for report in forward if report.serves]
    wanted = serving[0] if requested == "auto" else requested
    return Explanation(
        call=_describe(question),
        requested=f"{requested} ({source})",
        chosen=wanted if wanted in serving else None,
        chosen_backward=choose_backward(requested, backward),
        forward=forward,
        backward=backward,
    )


def kernels() -> list[Row]:
    """The rows of every kernel library that is loaded: name, architecture, direction, dtype, head
    dims, tile and resources.

    Loads the libraries, which does not initialise CUDA. Empty where the package was built without
    kernels.

    Example:
        >>> from cute_attention import kernels
        >>> sorted({row.arch for row in kernels()} - {"sm80", "sm90"})
        []
    """
    return _core.kernels()


def _requested(argument: str) -> tuple[str, str]:
    """What backend is asked for, and by what."""
    if argument != "auto":
        return argument, "argument"
    if (context := requested_backend(argument)) != "auto":
        return context, "use_backend"
    environment = environment_backend()
    check_name("attention", ENVIRONMENT, environment)
    return environment, ENVIRONMENT if environment != "auto" else "nothing was asked for"


def _describe(question: Question) -> str:
    sizes, features = question.sizes, question.features
    head_dims = f"{question.head_dim}"
    if question.head_dim_v != question.head_dim:
        head_dims += f" and {question.head_dim_v}"
    words = [
        f"{DTYPE_NAMES[question.dtype]} on {question.device}",
        f"batch {sizes.batch}",
        f"seqlen {sizes.seqlen_q} x {sizes.seqlen_k}",
        f"heads {sizes.heads} of {sizes.heads_kv}",
        f"head dim {head_dims}",
    ]
    if features.window_left or features.window_right:
        left = sizes.window_left if features.window_left else None
        right = sizes.window_right if features.window_right else None
        words.append("causal" if (left, right) == (None, 0) else f"window ({left}, {right})")
    for feature in ("varlen", "softcap", "bias", "alibi", "sink", "dropout", "nonpositive_scale"):
        if getattr(features, feature):
            words.append(feature.replace("_", " "))
    if question.deterministic:
        words.append("deterministic")
    return ", ".join(words)
