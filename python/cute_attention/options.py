"""The options: the keyword arguments that users pass, with their types, meanings and defaults."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from .names import unknown_option
from .native.core import Kernel

Window = tuple[int | None, int | None]


class Options(TypedDict, total=False):
    """What `attention`, `attention_varlen` and `explain` take by keyword.

    Args:
        causal: query `i` sees keys `j <= i + seqlen_k - seqlen_q`.
        window: `(left, right)`, in keys: query `i` sees keys `j` with `-left <= j - (i + seqlen_k -
            seqlen_q) <= right`; None is unbounded. With `causal`, `right` is 0.
        scale: multiplies q·k; `head_dim ** -0.5` where None.
        softcap: scaled scores become `softcap * tanh(scores / softcap)`; None or 0 for no cap.
        alibi_slopes: float32 `[heads]` or `[batch, heads]`: adds `-slope * abs(i + seqlen_k -
            seqlen_q - j)` to the scores. They have no gradient and may require none.
        bias: added to the scores; broadcastable to `[batch, heads, seqlen_q, seqlen_k]`, of q's
            dtype or float32.
        sink: float32 `[heads]`: a logit that joins the denominator of the softmax only. One of +inf
            has all the weight: the head's output is 0 and its LSE +inf.
        dropout_p: share of the probabilities to drop, rounded to 256ths, the others scaled up; 0
            draws nothing.
        dropout_seed: an int, or an int64 tensor of one element on q's device: the same seed drops
            the same. None draws one from PyTorch's generator of q's device, so that
            `torch.manual_seed` governs it.
        deterministic: ask for a backward that is bitwise repeatable, as
            `torch.use_deterministic_algorithms` does. The forward always is.
        return_lse: return `(out, lse)`.
        backend: "sm90", "sm80" or "reference" to force one; "auto" for what `use_backend` or the
            environment variable CUTE_ATTENTION_BACKEND says, or else the fastest that serves the
            call.
        kernel: exactly this kernel is to run, of `rows.Row.build` or of `kernels()`, or a tuple of
            one for the forward and one for the backward; None for what `rows.use` says, or else
            what serves the call best.
    """

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    deterministic: bool
    backend: str
    kernel: Kernel | tuple[Kernel, ...] | None


class AllOptions(Options, total=False):
    """`Options`, and the one that decides what is returned, which overloads tell apart."""

    return_lse: bool


DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window": None,
    "scale": None,
    "softcap": None,
    "alibi_slopes": None,
    "bias": None,
    "sink": None,
    "dropout_p": 0.0,
    "dropout_seed": None,
    "deterministic": False,
    "return_lse": False,
    "backend": "auto",
    "kernel": None,
}


def with_defaults(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a call of the function `name`.

    Raises:
        TypeError: an option that there is not.
    """
    for option in options:
        if option not in DEFAULTS:
            raise unknown_option(name, option)
    return {**DEFAULTS, **options}


Function = TypeVar("Function", bound=Callable[..., Any])


def documenting(
    options: type, all_options: type, defaults: Mapping[str, Any]
) -> Callable[[Function], Function]:
    """A decorator that shows the options of a function that takes `**options` one by one, to `help`
    and to `inspect`: in its signature, and in its docstring for the line that stands for them.

    Args:
        options: a TypedDict whose docstring has the meanings.
        all_options: one that has the types, those of `options` among them.
        defaults: of all of them.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        hints = get_type_hints(all_options)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[name]
            )
            for name, value in defaults.items()
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *shown]
        )
        if function.__doc__ and options.__doc__:  # python -OO has neither
            meanings = inspect.cleandoc(options.__doc__).split("Args:\n")[1]
            lines = textwrap.indent(textwrap.dedent(meanings), "    ")
            text = inspect.cleandoc(function.__doc__)
            function.__doc__ = re.sub(r"    \*\*options:.*\n", lambda _: lines + "\n", text)
        return function

    return decorate


documented = documenting(Options, AllOptions, DEFAULTS)
