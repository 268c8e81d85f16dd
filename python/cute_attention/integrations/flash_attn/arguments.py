"""Arguments of flash-attn as our options, and our errors in flash-attn's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checks import type_name

# A pair, a list or a tensor of two numbers.
WindowSize = Sequence[int] | Tensor


def options_of(
    name: str,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool | None,
) -> dict[str, Any]:
    """The options of `attention` that differ from their defaults: a call with fewer options takes
    less time.

    Slopes are detached, since flash-attn takes those that require a gradient and gives them none.
    """
    options: dict[str, Any] = {}
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if causal is not False and is_set(name, "causal", causal):
        options["causal"] = True
    window = window_of(name, window_size)
    if window is not None:
        options["window"] = window
    if softcap:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        detached = isinstance(alibi_slopes, Tensor) and alibi_slopes.requires_grad
        options["alibi_slopes"] = alibi_slopes.detach() if detached else alibi_slopes
    if deterministic is not False and is_set(name, "deterministic", deterministic):
        options["deterministic"] = True
    return options


def is_set(name: str, label: str, value: Any) -> bool:
    """Whether a flag is set: all that has a truth is taken, as by upstream, but no text.

    Raises:
        TypeError: it has none.
    """
    try:
        if not isinstance(value, str):
            return bool(value)
    except (RuntimeError, ValueError):  # a tensor of several
        pass
    raise TypeError(f"{name}: {label} is {type_name(value)}, expected a bool")


def sides_of(name: str, left: Any, right: Any) -> tuple[int, int]:
    """The window of a function that takes its sides one by one.

    Raises:
        TypeError: one is no int.
    """
    for label, value in (("window_size_left", left), ("window_size_right", right)):
        if not isinstance(value, (int, torch.SymInt)):
            raise TypeError(
                f"{name}: {label} is {value!r}, expected an int; a negative one is unbounded"
            )
    return left, right


def window_of(name: str, window_size: Any) -> tuple[int | None, int | None] | None:
    """`(left, right)` with None for a side that is unbounded, negative there; None where both are.

    Raises:
        TypeError: not two numbers.
    """
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    try:
        left, right = window_size
        if left < 0 and right < 0:
            return None
        return (None if left < 0 else left), (None if right < 0 else right)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: window_size is {window_size!r}, expected two ints (left, right), of which a "
            "negative one is unbounded"
        ) from None


def length(name: str, label: str, value: Any) -> Any:
    """A length; the number in a tensor of one element, which flash-attn takes too. Reading it waits
    for the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_floating_point():
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected an int")
        return int(value)
    return value


# What our options are called there.
_LABELS = {"scale": "softmax_scale", "window": "window_size", "return_lse": "return_attn_probs"}
_MESSAGE = re.compile(r"attention(?:_varlen|_with_cache)?: (\w+)(.*)", re.DOTALL)


def renamed(name: str, error: Exception, labels: Mapping[str, str] | None = None) -> Exception:
    """`error` as the function `name` would raise it.

    Args:
        name: the function of flash-attn that was called.
        error: what `attention`, `attention_varlen` or `attention_with_cache` raised.
        labels: what further arguments are called there, by our names.
    """
    match = _MESSAGE.fullmatch(str(error))
    if match is None:
        return error
    labels = labels or {}
    label, rest = match.groups()
    label = labels.get(label) or _LABELS.get(label, label)
    for ours, theirs in labels.items():
        rest = re.sub(rf"\b{ours}\b", theirs, rest) if len(ours) > 1 else rest
    return type(error)(f"{name}: {label}{rest}")


class ForwardOnly(torch.autograd.Function):
    """An output without a gradient that says so when one is asked for.

    Without it, a residual connection would carry the gradient past the attention in silence.
    """

    @staticmethod
    def forward(ctx: Any, reason: str, out: Tensor, *inputs: Tensor) -> Tensor:
        """Returns `out`; `inputs` are those that may require a gradient."""
        ctx.reason = reason
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raises."""
        raise NotImplementedError(ctx.reason)


def forward_only(reason: str, out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, whose gradient raises NotImplementedError with `reason`."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return ForwardOnly.apply(reason, out, *inputs)
    return out
