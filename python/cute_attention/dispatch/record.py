"""Explanations of calls as they are made, by whatever name: `explain_calls`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .explain import Explanation
from .request import recorded


class Record:
    """The explanations of one `explain_calls`, each once. Part of the keys of plans, where a new
    one equals no other: the calls inside find no plan, and take the way that explains them."""

    def __init__(self) -> None:
        self.explanations: list[Explanation] = []


@contextlib.contextmanager
def explain_calls() -> Iterator[list[Explanation]]:
    """What `explain` says of the calls inside, which run as always: those of this package's
    functions, and those that come here from flash-attn's names, PyTorch or transformers.

    Yields the list of explanations, in the order of the first call of each; equal ones are there
    once. Calls from the current thread or asyncio task count. Code that torch.compile has compiled
    runs no Python, and is not seen; nor are calls that PyTorch's own kernels serve.

    Example:
        >>> import torch
        >>> from cute_attention import explain_calls
        >>> from cute_attention.flash_attn import flash_attn_func
        >>> q = k = v = torch.randn(1, 16, 4, 64)
        >>> with explain_calls() as calls:
        ...     out = flash_attn_func(q, k, v, causal=True)
        >>> [call.chosen for call in calls]
        ['reference']
    """
    record = Record()
    token = recorded.set(record)
    try:
        yield record.explanations
    finally:
        recorded.reset(token)


def is_recorded(explain: Callable[..., Explanation], *args: Any) -> bool:
    """Whether somebody wants to know of a call, and then is told what `explain` says of it."""
    if torch.compiler.is_compiling():
        return False
    record = recorded.get()
    if record is None:
        return False
    explanation = explain(*args)
    if explanation not in record.explanations:
        record.explanations.append(explanation)
    return True
