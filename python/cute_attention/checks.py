"""Checks of single values: numbers, flags, windows, devices.

A message names the argument, what was expected and what came. Wrong types raise TypeError, wrong
values ValueError. `arguments.py` says which check is whose.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (int, torch.SymInt)  # the second while torch.export or make_fx traces
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
LARGEST_SIZE = 2**31 - 1  # of the sizes that cu_seqlens and the kernels can tell
LARGEST_FACTOR = 2.0**127  # kMaxFactor of check_params.cpp: of a scale or a softcap
LEAST_QUOTIENT = 2.0**-100  # kMinQuotient of check_params.cpp: of a scale and a softcap
_LARGEST_WINDOW = 2**63 - 1  # of what an op takes


def tensors(name: str, **arguments: object) -> None:
    """Raise TypeError for the first argument that is no tensor."""
    for label, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected a torch.Tensor")


def size(name: str, label: str, value: Any) -> int:
    """An int from 0 to LARGEST_SIZE; the int of a NumPy scalar."""
    if type(value) is not int:
        value = plain(value)
        if not isinstance(value, _INTEGERS) or isinstance(value, bool):
            tensor = isinstance(value, Tensor)
            hint = " (call .item() on it once, outside of the model)" if tensor else ""
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected an int{hint}")
    return _bounded(name, label, value, LARGEST_SIZE)


def _bounded(name: str, label: str, value: Any, largest: int, hint: str = "") -> int:
    """`value`, from 0 to `largest`. In a traced graph, which may know the value only when it runs,
    no branch may depend on it: the graph checks then that it is not negative."""
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        torch._check(value >= 0)  # without a message: torch.export(strict=True) takes no function
    elif value < 0:
        raise ValueError(f"{name}: {label} is {value}, expected an int >= 0{hint}")
    elif value > largest:
        raise ValueError(f"{name}: {label} is {value}, expected an int from 0 to {largest}{hint}")
    return value


def plain(value: Any) -> Any:
    """The Python number that a NumPy scalar stands for; everything else as it is."""
    numpy = sys.modules.get("numpy")  # without it there is no such scalar
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def flag(name: str, label: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {label} is {type_name(value)}, expected a bool")


def number(name: str, label: str, value: object, _: object = None) -> None:
    """A finite number, of at most LARGEST_FACTOR."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name}: {label} is {type_name(value)}, expected a float or None")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: {label} is {value}, expected a finite number")
    if not -LARGEST_FACTOR <= value <= LARGEST_FACTOR:
        raise ValueError(f"{name}: {label} is too large, expected a number of at most 2^127")


def softcap(name: str, label: str, value: object, _: object = None) -> None:
    """A finite number, 0 or more."""
    number(name, label, value)
    assert isinstance(value, _NUMBERS)
    if value < 0:
        raise ValueError(
            f"{name}: {label} is {value}, expected a number >= 0 (None or 0 for no cap)"
        )


def softcap_of_scale(name: str, scale: Any, softcap: Any) -> None:
    """Their quotient, by which kernels and the reference backend multiply, is finite, and not so
    small that a product with a score is 0 in fp32."""
    if softcap and abs(scale) > softcap * (LARGEST_FACTOR / 4):
        raise ValueError(
            f"{name}: softcap is {softcap}, expected a larger one for scale {scale}: their "
            "quotient overflows"
        )
    if softcap and scale and abs(scale) < softcap * LEAST_QUOTIENT:
        raise ValueError(
            f"{name}: softcap is {softcap}, expected a smaller one for scale {scale}, or None for "
            "no cap: their quotient is below 2^-100"
        )


def window_sides(name: str, causal: bool, window: object) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal bounds the right side at 0."""
    if window is None:
        return (-1, 0) if causal else (-1, -1)
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{name}: window is {type_name(window)}, expected (left, right) or None")
    if len(window) != 2:
        raise ValueError(f"{name}: window has {len(window)} sides, expected (left, right)")
    left, right = window
    for label, value in (("window's left side", left), ("window's right side", right)):
        if value is None:
            continue
        if type(value) is not int and (not isinstance(value, _INTEGERS) or isinstance(value, bool)):
            raise TypeError(f"{name}: {label} is {type_name(value)}, expected an int or None")
        _bounded(name, label, value, _LARGEST_WINDOW, " (None is unbounded)")
    return (-1 if left is None else left), (0 if causal else -1 if right is None else right)


def without_gradient(name: str, slopes: Tensor) -> None:
    """Raise for ALiBi slopes that would wait for a gradient in vain."""
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: alibi_slopes requires a gradient, expected a tensor that does not, since the "
            "slopes have none (pass alibi_slopes.detach())"
        )


def dropout_p(name: str, label: str, value: object, _: object = None) -> None:
    """A number from 0 to 1."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name}: {label} is {type_name(value)}, expected a float")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {label} is {value}, expected 0 <= {label} <= 1")


def on_device(name: str, label: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name}: {label} is on {tensor.device}, expected {device} (the device of q)"
        )


def type_name(value: object) -> str:
    """The type of an argument, for a message: "a list", "None"."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
