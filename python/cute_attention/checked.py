"""From what a user passes to `Arguments`: checks, autocast, defaults, a seed for dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .arguments import CHECKED, OPTIONAL_TENSORS, Arguments, is_positive, specialized
from .options import DEFAULTS
from .semantics.dropout import as_seed
from .shapes import check_kinds, check_packing, check_shapes

_FLAGS = ("causal", "deterministic", "return_lse")


def checked(
    name: str, q: Any, k: Any, v: Any, packing: tuple[Any, ...], options: dict[str, Any]
) -> Arguments:
    """The arguments of a call, checked and in one form.

    Args:
        name: the function that was called, for messages.
        q: queries, of any type.
        k: keys.
        v: values.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; empty where dense.
        options: all of them, as `with_defaults` returns them; NumPy scalars become numbers there.

    Raises:
        TypeError: an argument of the wrong type, or a tensor of the wrong dtype.
        ValueError: shapes or devices that do not agree, or a value out of range.
    """
    checks.tensors(name, q=q, k=k, v=v)
    q, k, v, bias = _autocast(q, k, v, options["bias"])
    options["bias"] = bias
    check_kinds(name, q, k, v)
    check_shapes(name, q, k, v, len(packing) > 0)
    if packing:
        packing = check_packing(q, *packing)
    try:
        return _checked_options(name, (q, k, v), packing, options)
    except TypeError:  # only then, so that ordinary calls take no time to look for NumPy scalars
        if not _without_numpy(options):
            raise
    return _checked_options(name, (q, k, v), packing, options)


def _autocast(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Casts what torch.autocast casts for PyTorch's own attention, where it is on for q's device:
    floating tensors but float64."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
        ):
            return value.to(dtype)
        return value

    return cast(q), cast(k), cast(v), cast(bias)


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
) -> Arguments:
    for label in _FLAGS:
        checks.flag(name, label, options[label])
    left, right = checks.window_sides(name, options["causal"], options["window"])
    scale, softcap = options["scale"], options["softcap"]
    if scale is None:
        scale = specialized(tensors[0].shape[-1]) ** -0.5
    call = Arguments(*tensors, options["backend"], scale, left, right, softcap or 0.0, *packing)
    for label, check in CHECKED:
        value = options[label]
        if value is not None or DEFAULTS[label] is not None:
            check(name, label, value, call)
    extras = {label: options[label] for label in OPTIONAL_TENSORS}
    bias = extras["bias"]
    if bias is not None:
        extras["bias"] = bias[(None,) * (4 - bias.dim())]
    if is_positive(options["dropout_p"]):
        extras["dropout_p"] = options["dropout_p"]
        extras["dropout_seed"] = as_seed(options["dropout_seed"], tensors[0].device)
    return call._replace(**extras)
