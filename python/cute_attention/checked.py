"""From what a user passes to `Arguments`: checks, autocast, defaults, a seed for dropout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .arguments import CHECKS, OPTIONAL_TENSORS, Arguments, is_positive, specialized
from .options import DEFAULTS, with_defaults
from .semantics.dropout import as_seed
from .shapes import check_kinds, check_packing, check_shapes


def checked(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    passed: Collection[str] = tuple(DEFAULTS),
) -> Arguments:
    """The arguments of a call, checked and in one form.

    torch.compile traces all of this, and a compiled function guards on each item of a module that
    it has read here: a quarter of a microsecond of every call. So nothing is read of options that
    were not passed.

    Args:
        name: the function that was called, for messages.
        q: queries, of any type.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        options: all of them, as `with_defaults` returns them; NumPy scalars become numbers there.
        passed: the names of those that may differ from the defaults.

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, or a value out of range.
    """
    checks.tensors(name, q=q, k=k, v=v)
    q, k, v, options["bias"] = as_autocast_does(q.device, (q, k, v, options["bias"]))
    check_kinds(name, q, k, v)
    check_shapes(name, q, k, v, len(packing) > 0)
    if packing:
        packing = check_packing(q, *packing)
    try:
        return _checked_options(name, (q, k, v), packing, options, passed)
    except TypeError:  # only then, so that ordinary calls take no time to look for NumPy scalars
        if not _without_numpy(options):
            raise
    return _checked_options(name, (q, k, v), packing, options, passed)


class Described(NamedTuple):
    """A call of `attention` or `attention_varlen` that another function is asked about."""

    name: str  # the function
    packing: tuple[Any, ...]  # as `checked` takes it
    options: dict[str, Any]  # all of them
    arguments: Arguments


def described(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    options: Mapping[str, Any],
) -> Described:
    """The call that has these arguments: of `attention_varlen` where there are `cu_seqlens_q`.
    `options` are those that were passed; errors as of `checked`."""
    packing: tuple[Any, ...] = ()
    name = "attention"
    if cu_seqlens_q is not None:
        packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        name = "attention_varlen"
    given = with_defaults(name, dict(options))
    return Described(name, packing, given, checked(name, q, k, v, packing, dict(given)))


_CAST = (torch.float16, torch.bfloat16, torch.float32)


def as_autocast_does(device: torch.device, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts what torch.autocast casts for PyTorch's own attention, where it is on for `device`:
    floating tensors but float64. Other values stay as they are."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return values
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        [
            value.to(dtype)
            if isinstance(value, Tensor) and value.dtype in _CAST and value.dtype != dtype
            else value
            for value in values
        ]
    )


def _without_numpy(options: dict[str, Any]) -> bool:
    """Puts Python numbers in the place of NumPy scalars; whether there was any."""
    found = False
    for name, value in options.items():
        number = checks.plain(value)
        if name == "window" and isinstance(value, (tuple, list)):
            sides = [checks.plain(side) for side in value]
            number = value if all(map(_is, sides, value)) else sides
        found = found or number is not value
        options[name] = number
    return found


def _is(one: object, other: object) -> bool:
    return one is other


def _checked_options(
    name: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    packing: tuple[Any, ...],
    options: dict[str, Any],
    passed: Collection[str],
) -> Arguments:
    for label in ("causal", "deterministic", "return_lse"):
        checks.flag(name, label, options[label])
    left, right = checks.window_sides(name, options["causal"], options["window"])
    scale, softcap = options["scale"], options["softcap"]
    if scale is None:
        scale = specialized(tensors[0].shape[-1]) ** -0.5
    call = Arguments(*tensors, options["backend"], scale, left, right, softcap or 0.0, *packing)
    extras: dict[str, Any] = {}
    for label in passed:
        if label not in CHECKS:
            continue
        value = options[label]
        if value is None and DEFAULTS[label] is None:
            continue
        CHECKS[label](name, label, value, call)
        if label == "bias":
            extras["bias"] = value[(None,) * (4 - value.dim())]
        elif label in OPTIONAL_TENSORS:
            extras[label] = value
    if "softcap" in passed:
        checks.softcap_of_scale(name, scale, softcap)
    if "dropout_p" in passed and is_positive(options["dropout_p"]):  # a seed is drawn at last
        extras["dropout_p"] = options["dropout_p"]
        extras["dropout_seed"] = as_seed(options["dropout_seed"], tensors[0].device)
    return call._replace(**extras) if extras else call
