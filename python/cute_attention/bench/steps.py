"""What the clock surrounds: a forward call, a backward call on prepared outputs, or both in a
row."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from .contenders.base import Attention, Contender, reason_for
from .inputs import Inputs
from .points import Point

DIRECTIONS = ("fwd", "bwd", "fwdbwd")
MODES = ("eager", "compiled", "graph")  # as it is, by torch.compile, as a CUDA graph

Step = Callable[[], object]
P = ParamSpec("P")
T = TypeVar("T")


def make_step(call: Attention, direction: str, inputs: Inputs) -> Step:
    """A callable without arguments that does one direction of a point once.

    The backward alone is autograd.grad with retain_graph=True over an output computed here, once.
    """
    if direction == "fwd":
        q, k, v = inputs.detached
        return lambda: call(q, k, v)
    if direction == "bwd":
        out = call(*inputs.leaves)
        return lambda: torch.autograd.grad(out, inputs.learned, inputs.grad_out, retain_graph=True)
    if direction == "fwdbwd":
        return lambda: torch.autograd.grad(call(*inputs.leaves), inputs.learned, inputs.grad_out)
    raise ValueError(f"direction is {direction!r}, expected one of {', '.join(DIRECTIONS)}")


@contextlib.contextmanager
def measuring(contender: Contender, point: Point) -> Iterator[None]:
    """While this is entered, a contender runs under the conditions of its measurement: its backend
    is forced, and PyTorch is deterministic if the point asks for it. PyTorch then also fills all
    new memory with NaN by default, which would cost time; this is switched off."""
    was = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    if point.deterministic:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
    try:
        with contender.scope():
            yield
    finally:
        torch.use_deterministic_algorithms(was)
        memory.fill_uninitialized_memory = filled


def attempt(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> tuple[T, Literal[""]] | tuple[None, str]:
    """Calls a function that may fail in any way on some machine. Returns its value and "", or None
    and the reason."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return function(*args, **kwargs), ""
        except Exception as error:
            reason = reason_for(error)
    if "No available kernel" in reason:  # PyTorch says why in its warnings
        texts = [str(warning.message).split(" (Triggered internally")[0] for warning in warned]
        reasons = [text for text in texts if not text.endswith("because:")]
        reason = "; ".join(dict.fromkeys(reasons)) or reason
    free_memory()  # only here are the frames of the failed call gone, and the tensors they held
    return None, reason


class Deadline:
    """A time limit for a whole run: when it has passed, nothing new is started."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._started = time.monotonic()

    def passed(self) -> str:
        """The reason for a row that is not measured any more, or ""."""
        if self.limit_s is None or time.monotonic() - self._started <= self.limit_s:
            return ""
        return f"not reached within the limit of {self.limit_s:g} s"


def free_memory() -> None:
    """Returns the allocator's cached memory to the GPU, so that the next contender can have it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def cannot_run(contender: Contender, point: Point, direction: str, device: torch.device) -> str:
    """Why a contender is not even tried on a point, or ""."""
    missing = contender.missing(device)
    return missing or contender.lacks(point) or contender.refuses(point, direction) or ""
